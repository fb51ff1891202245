"""A folder of results appears whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from siammm.core import folders
from siammm.core.errors import InputError
from siammm.core.folders import check_new_folder, new_folder

OURS = frozenset({"a", "b"})


def tree(path: Path) -> list[str]:
    return sorted(str(entry.relative_to(path)) for entry in path.rglob("*"))


def write(folder: Path, text: str = "new") -> None:
    (folder / "a").write_text(text)
    (folder / "b").mkdir()
    (folder / "b" / "c").write_text(text)


def write_and_raise(target: Path, error: type[BaseException]) -> None:
    with new_folder(target, overwrite=True, ours=OURS) as folder:
        write(folder)
        raise error


def test_the_folder_appears_at_the_end_with_its_parents(tmp_path: Path) -> None:
    target = tmp_path / "x" / "y" / "out"
    with new_folder(target) as folder:
        write(folder)
        assert not target.exists()
    assert tree(tmp_path) == ["x", "x/y", "x/y/out", "x/y/out/a", "x/y/out/b", "x/y/out/b/c"]


def test_it_may_be_there_and_empty(tmp_path: Path) -> None:
    with new_folder(tmp_path) as folder:
        write(folder)
    assert tree(tmp_path) == ["a", "b", "b/c"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_failure_leaves_nothing(error: type[BaseException], tmp_path: Path) -> None:
    with pytest.raises(error):
        write_and_raise(tmp_path / "x" / "out", error)
    assert tree(tmp_path) == []


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(folders.os, "fsync", full)
    with pytest.raises(InputError, match="No space left on device"), new_folder(tmp_path / "out") as folder:
        write(folder)
    assert tree(tmp_path) == []


def test_an_earlier_result_is_kept_unless_told(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write(tmp_path / "out", "old")
    with pytest.raises(InputError, match="--overwrite"), new_folder(tmp_path / "out", ours=OURS):
        pytest.fail("the block must not run")
    assert (tmp_path / "out" / "a").read_text() == "old"


def test_an_earlier_result_is_replaced_only_when_the_new_one_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    write(target, "old")
    with pytest.raises(RuntimeError):
        write_and_raise(target, RuntimeError)
    assert (target / "a").read_text() == "old"
    with new_folder(target, overwrite=True, ours=OURS) as folder:
        write(folder)
        assert (target / "a").read_text() == "old"
    assert (target / "a").read_text() == "new"
    assert tree(tmp_path) == ["out", "out/a", "out/b", "out/b/c"]


def test_a_failed_move_puts_the_earlier_result_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out"
    target.mkdir()
    write(target, "old")
    rename = Path.rename

    def fails(self: Path, to: Path) -> Path:
        if self.name.endswith(".partial"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(InputError, match="cannot be written"), new_folder(target, overwrite=True, ours=OURS) as folder:
        write(folder)
    assert (target / "a").read_text() == "old"
    assert tree(tmp_path) == ["out", "out/a", "out/b", "out/b/c"]


def test_other_files_are_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match=r"'thesis\.tex'"):
        check_new_folder(tmp_path, overwrite=True, ours=OURS)
    assert (tmp_path / "thesis.tex").exists()


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(InputError, match="is a file"):
        check_new_folder(tmp_path / "out", overwrite=True)
    with pytest.raises(InputError, match="cannot be written"):
        check_new_folder(tmp_path / "out" / "deeper")


def test_a_link_to_a_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with new_folder(tmp_path / "link") as folder:
        write(folder)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "a").read_text() == "new"


def test_checking_leaves_nothing(tmp_path: Path) -> None:
    check_new_folder(tmp_path / "x" / "out")
    assert tree(tmp_path) == []


def test_a_name_that_is_not_utf_8_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a UTF-8 name; choose another --output"):
        check_new_folder(tmp_path / os.fsdecode(b"caf\xe9-run"))
    assert not list(tmp_path.iterdir())
