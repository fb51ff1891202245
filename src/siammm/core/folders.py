"""Folders of results that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from siammm.core.errors import InputError
from siammm.core.text import shown


def check_new_folder(path: Path, *, overwrite: bool = False, ours: frozenset[str] = frozenset()) -> None:
    """Fail now, with one sentence, if ``new_folder`` would fail later, after hours of work.

    ``ours`` are the names that an earlier result consists of. A folder that holds anything else is never replaced,
    ``overwrite`` or not: a mistyped path must not cost anybody their files.
    """
    target = _resolved(path)
    try:
        str(target).encode()
    except UnicodeEncodeError as error:
        # The libraries that write tensors and tables open no such file.
        raise InputError(
            f"The output {shown(path)} has a name that is not UTF-8, and nothing can be stored there; choose another "
            "--output."
        ) from error
    if target.exists() and not target.is_dir():
        raise InputError(f"The output {path} is a file, but a folder is needed; choose another --output.")
    try:
        present = {entry.name for entry in target.iterdir()} if target.exists() else set()
        if present and not overwrite:
            raise InputError(f"The output folder {path} is not empty; choose another --output, or add --overwrite.")
        foreign = sorted(present - ours)
        if foreign:
            raise InputError(
                f"The output folder {path} holds {foreign[0]!r}, which is no part of an earlier result, so it is not "
                "replaced; choose another --output."
            )
        # The only sure test of whether a folder can be written to is to write to it.
        scratch = _existing_parent(target) / f".siammm-{secrets.token_hex(4)}"
        scratch.mkdir()
        scratch.rmdir()
    except OSError as error:
        raise _unwritable(path, error) from error


@contextlib.contextmanager
def new_folder(path: Path, *, overwrite: bool = False, ours: frozenset[str] = frozenset()) -> Iterator[Path]:
    """A temporary folder beside ``path`` to write into, which becomes ``path`` when the block ends well.

    Whatever ends the block otherwise leaves nothing behind. Everything is on the disk before the folder gets its name,
    and an earlier result is moved aside only then.
    """
    check_new_folder(path, overwrite=overwrite, ours=ours)
    target = _resolved(path)
    made = _missing_parents(target)
    token = secrets.token_hex(4)
    scratch = target.with_name(f".{target.name}.{token}.partial")
    complete = False
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch.mkdir()
        yield scratch
        _flush(scratch)
        _put_in_place(scratch, target, target.with_name(f".{target.name}.{token}.old"))
        complete = True
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        if not complete:
            shutil.rmtree(scratch, ignore_errors=True)
            for parent in made:
                with contextlib.suppress(OSError):
                    parent.rmdir()


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
    _flush_entry(target.parent)


def _flush(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for name in files:
            _flush_entry(Path(root) / name)
        _flush_entry(Path(root))


def _flush_entry(path: Path) -> None:
    """fsync a file or a folder; Windows cannot open folders, and keeps their entries safe by itself."""
    if path.is_dir() and os.name == "nt":
        return
    # Windows flushes only what is open for writing.
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _resolved(path: Path) -> Path:
    try:
        return path.expanduser().resolve()
    except (OSError, RuntimeError) as error:
        raise InputError(f"The output folder {path} cannot be used ({error}); choose another --output.") from error


def _existing_parent(target: Path) -> Path:
    return next(parent for parent in target.parents if parent.exists())


def _missing_parents(target: Path) -> list[Path]:
    """The folders above the target that will have to be made, the deepest first."""
    return [parent for parent in target.parents if not parent.exists()]


def _unwritable(path: Path, error: OSError) -> InputError:
    reason = " ".join((error.strerror or str(error)).split()).rstrip(".")
    return InputError(f"The output folder {path} cannot be written ({reason}); choose another --output or make room.")
