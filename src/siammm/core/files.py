"""Files that appear whole or not at all: everything that siammm writes under a final name goes through here."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Collection, Iterator
from pathlib import Path

from siammm.core.errors import InputError
from siammm.core.text import one_line

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_LEFTOVER = re.compile(r"\.(.+)\.[0-9a-f]{8}\.partial", re.DOTALL)
# safetensors writes under a name of its own first, and leaves it where its process is killed.
_OF_SAFETENSORS = re.compile(r"\.tmp[0-9A-Za-z]{6}")


@contextlib.contextmanager
def written_whole(path: Path, *, previous: Path | None = None, flush: bool = True) -> Iterator[Path]:
    """A scratch file beside ``path`` to write to, which becomes ``path`` when the block ends well.

    Whatever ends the block otherwise leaves nothing behind, and an earlier file as it was. The contents are on the disk
    before the file gets its name, unless ``flush`` is False: for caches of many small files. An earlier file is
    replaced, or kept under the name ``previous``.
    """
    scratch = scratch_beside(path)
    try:
        yield scratch
        make_readable(scratch)
        if flush:
            flush_entry(scratch)
        if previous is not None and path.exists():
            os.replace(path, previous)
        os.replace(scratch, path)
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink()


def scratch_beside(path: Path) -> Path:
    """A new name beside ``path`` for what is being written; see ``is_leftover``."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")


def is_leftover(name: str, of: Collection[str]) -> bool:
    """Whether a process that was killed while it wrote one of these files left this behind."""
    found = _LEFTOVER.fullmatch(name)
    return _OF_SAFETENSORS.fullmatch(name) is not None or (found is not None and found[1] in of)


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with written_whole(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def make_readable(path: Path) -> None:
    """Give a file the usual permissions: safetensors writes for the owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def flush_entry(path: Path) -> None:
    """fsync a file or a folder; Windows cannot open folders, and keeps their entries safe by itself."""
    if path.is_dir() and os.name == "nt":
        return
    # Windows flushes only what is open for writing.
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unwritable(what: object, error: BaseException, remedy: str) -> InputError:
    """The error for a file or folder that cannot be written."""
    return InputError(f"{what} cannot be written ({one_line(error)}); {remedy}.")


def check_writable(path: Path) -> None:
    """Raise ``OSError`` if nothing can be created at ``path``: the only sure test is to write beside it.

    Under a name as long as the longest that will be used, which is where a long ``path`` fails.
    """
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    scratch = parent / f".{path.name}.{secrets.token_hex(4)}.partial"
    scratch.mkdir()
    scratch.rmdir()


def check_new_file(path: Path, *, overwrite: bool) -> None:
    """Fail now, with one sentence, if ``new_file`` would fail later, after hours of work."""
    try:
        if path.is_dir():
            raise InputError(f"The output {path} is a folder, but this command writes a file; choose another --output.")
        if path.exists() and not overwrite:
            raise InputError(f"The output {path} exists; choose another --output, or add --overwrite.")
        check_writable(path)
    except OSError as error:
        raise unwritable(f"The output {path}", error, "choose another --output or make room") from error


@contextlib.contextmanager
def new_file(path: Path, *, overwrite: bool) -> Iterator[tuple[Path, Path]]:
    """Two scratch files beside ``path``: the first becomes it when the block ends well, the second is for anything.

    Whatever ends the block otherwise leaves nothing behind, and an earlier file as it was. A process that is killed
    leaves both; the next one that writes ``path`` removes them.
    """
    check_new_file(path, overwrite=overwrite)
    spool: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_left(path)
        with written_whole(path) as scratch:
            spool = scratch.with_suffix(".spool")
            with _held(spool):
                yield scratch, spool
    except OSError as error:
        raise unwritable(f"The output {path}", error, "choose another --output or make room") from error
    finally:
        if spool is not None:
            spool.unlink(missing_ok=True)


@contextlib.contextmanager
def _held(spool: Path) -> Iterator[None]:
    """Make an empty file that shows, by a lock on it, that its process is alive; the system lets go with the process.

    Nobody else's file is removed where there are no such locks: better something left than something lost.
    """
    with spool.open("wb") as file:
        if fcntl is not None:
            with contextlib.suppress(OSError):  # not every file system has locks
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_left(path: Path) -> None:
    """Remove the scratch files that processes left beside ``path`` when they were killed."""
    if fcntl is None:
        return
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.spool")
    for spool in [entry for entry in path.parent.iterdir() if pattern.fullmatch(entry.name)]:
        with contextlib.suppress(OSError), spool.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while its process lives
            spool.with_suffix(".partial").unlink(missing_ok=True)
            spool.unlink()
