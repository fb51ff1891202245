"""Files appear whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from siammm.core import files
from siammm.core.errors import InputError


def fail(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    files.write_text(path, "before")
    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        files.write_text(path, "after")
    assert path.read_text() == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_the_file_before_is_kept_where_it_is_asked_for(tmp_path: Path) -> None:
    last, previous = tmp_path / "last", tmp_path / "previous"
    for text in "abc":
        with files.written_whole(last, previous=previous) as scratch:
            scratch.write_text(text)
    assert (last.read_text(), previous.read_text()) == ("c", "b")
    with pytest.raises(KeyError), files.written_whole(last, previous=previous) as scratch:
        raise KeyError
    assert (last.read_text(), previous.read_text()) == ("c", "b")


def test_a_cache_need_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.os, "fsync", fail)
    with files.written_whole(tmp_path / "file", flush=False) as scratch:
        scratch.write_text("text")
    assert (tmp_path / "file").read_text() == "text"


@pytest.mark.skipif(os.name == "nt", reason="permissions of POSIX")
def test_others_may_read_what_the_usual_mask_lets_them(tmp_path: Path) -> None:
    with files.written_whole(tmp_path / "file") as scratch:
        scratch.touch(0o600)
    (tmp_path / "plain").touch()
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_new_file_leaves_no_scratch_files(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    with files.new_file(path, overwrite=False) as (scratch, spool):
        spool.write_text("aside")
        scratch.write_text("text")
    assert path.read_text() == "text"
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]
    with pytest.raises(InputError, match="exists; choose another --output, or add --overwrite"):
        files.check_new_file(path, overwrite=False)


KILLED = """
import os, signal, sys
from pathlib import Path
from siammm.core.files import new_file
with new_file(Path(sys.argv[1]), overwrite=False) as (scratch, spool):
    scratch.write_text("half")
    spool.write_text("aside")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(os.name == "nt", reason="locks of POSIX")
def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "file.parquet"
    other = tmp_path / ".another.parquet.0123abcd.spool"
    other.touch()
    subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    left = {entry.suffix for entry in tmp_path.iterdir() if entry != other}
    assert left == {".partial", ".spool"}
    with files.new_file(path, overwrite=False) as (scratch, _):
        assert len(list(tmp_path.iterdir())) <= 3  # the other's, and this one's own
        scratch.write_text("whole")
    assert sorted(tmp_path.iterdir()) == [other, path]


@pytest.mark.skipif(os.name == "nt", reason="locks of POSIX")
def test_what_a_living_process_writes_is_left_to_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with files.new_file(path, overwrite=True) as (scratch, spool):
        scratch.write_text("first")
        spool.write_bytes(b"aside")  # as it is written by a path of its own
        with files.new_file(path, overwrite=True) as (later, _):
            later.write_text("second")
        assert spool.read_bytes() == b"aside"
        assert path.read_text() == "second"
    assert path.read_text() == "first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
