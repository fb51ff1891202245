"""Folders of results that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from siammm.core.errors import InputError
from siammm.core.files import check_writable, flush_entry, is_leftover, unwritable
from siammm.core.locks import alone_in
from siammm.core.text import shown

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def check_new_folder(
    path: Path,
    *,
    overwrite: bool = False,
    ours: frozenset[str] = frozenset(),
    passed_over: frozenset[str] = frozenset(),
    flag: str = "--output",
) -> None:
    """Fail now, with one sentence, if ``new_folder`` would fail later, after hours of work.

    ``ours`` are the names that an earlier result consists of. A folder that holds anything else is never replaced,
    ``overwrite`` or not: a mistyped path must not cost anybody their files. What is ``passed_over`` counts as nothing.
    ``flag`` is where the user named the folder; without ``ours`` there is nothing to overwrite. What ``new_folder``
    left in a process that was killed is put in order first.
    """
    target = _resolved(path, flag)
    try:
        str(target).encode()
    except UnicodeEncodeError as error:
        # The libraries that write tensors and tables cannot open such a file.
        raise InputError(f"The output {shown(path)} is not a UTF-8 name; choose another {flag}.") from error
    try:
        _tidy(target)
        if target.exists() and not target.is_dir():
            raise InputError(f"The output {path} is a file, but a folder is needed; choose another {flag}.")
        present = {entry.name for entry in target.iterdir()} - passed_over if target.exists() else set()
        present = {name for name in present if not is_leftover(name, passed_over)}
        if present and not overwrite:
            remedy = f"choose another {flag}{', or add --overwrite' if ours else ''}"
            raise InputError(f"The output folder {path} is not empty; {remedy}.")
        foreign = sorted(name for name in present - ours if not is_leftover(name, ours))
        if foreign:
            raise InputError(
                f"The output folder {path} holds {foreign[0]!r}, which is not part of an earlier result, so it is not "
                f"replaced; choose another {flag}."
            )
        check_writable(target)
    except OSError as error:
        raise _unwritable(path, error, flag) from error


@contextlib.contextmanager
def new_folder(
    path: Path, *, overwrite: bool = False, ours: frozenset[str] = frozenset(), flag: str = "--output"
) -> Iterator[Path]:
    """A temporary folder beside ``path`` to write into, which becomes ``path`` when the block ends well.

    Whatever ends the block otherwise leaves nothing behind. Everything is on the disk before the folder gets its name,
    and an earlier result is moved aside only then.
    """
    check_new_folder(path, overwrite=overwrite, ours=ours, flag=flag)
    target = _resolved(path, flag)
    made = [parent for parent in target.parents if not parent.exists()]  # the deepest first
    token = secrets.token_hex(4)
    scratch = target.with_name(f".{target.name}.{token}.partial")
    complete = False
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _held(scratch):
            yield scratch
            _flush(scratch)
            _put_in_place(scratch, target, target.with_name(f".{target.name}.{token}.old"))
        complete = True
    except OSError as error:
        raise _unwritable(path, error, flag) from error
    finally:
        if not complete:
            shutil.rmtree(scratch, ignore_errors=True)
            for parent in made:
                with contextlib.suppress(OSError):
                    parent.rmdir()


@contextlib.contextmanager
def _held(scratch: Path) -> Iterator[None]:
    """Make a folder that shows, by a lock on it, that its process is alive; the system lets go with the process."""
    descriptor = None
    with alone_in(scratch.parent):
        scratch.mkdir()
        if fcntl is not None:
            descriptor = os.open(scratch, os.O_RDONLY)
            with contextlib.suppress(OSError):  # not every file system has locks
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _tidy(target: Path) -> None:
    """Put in order what processes left beside ``target`` that were killed while they wrote it.

    Half a result is removed, and an earlier one that was aside gets its name back, where nothing else has it.
    Nobody else's folder is touched where there are no such locks: better something left than something lost.
    """
    if fcntl is None or not target.parent.is_dir():
        return
    pattern = re.compile(rf"\.{re.escape(target.name)}\.([0-9a-f]{{8}})\.(partial|old)")
    with contextlib.suppress(OSError), alone_in(target.parent):
        left = sorted(entry for entry in target.parent.iterdir() if pattern.fullmatch(entry.name))
        for entry in left:
            aside = entry.suffix == ".old"
            # The one that put an earlier result aside holds what is to take its place, under either name.
            owner = entry.with_suffix(".partial") if aside else entry
            if _is_held(owner if owner.exists() else target):
                continue
            if aside and not target.exists():
                entry.rename(target)
            elif entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)


def _is_held(folder: Path) -> bool:
    """Whether a process that is alive writes a folder."""
    assert fcntl is not None
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # nobody can say
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _put_in_place(scratch: Path, target: Path, aside: Path) -> None:
    if not target.exists():
        scratch.rename(target)
    else:
        target.rename(aside)
        try:
            scratch.rename(target)
        except BaseException:
            aside.rename(target)
            raise
        shutil.rmtree(aside, ignore_errors=True)
    flush_entry(target.parent)


def _flush(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for name in files:
            if not (Path(root) / name).is_symlink():  # what it leads to is not ours; the link is part of its folder
                flush_entry(Path(root) / name)
        flush_entry(Path(root))


def _resolved(path: Path, flag: str) -> Path:
    try:
        return path.expanduser().resolve()
    except (OSError, RuntimeError) as error:
        raise InputError(f"The output folder {path} cannot be used ({error}); choose another {flag}.") from error


def _unwritable(path: Path, error: OSError, flag: str) -> InputError:
    return unwritable(f"The output folder {path}", error, f"choose another {flag} or make room")
