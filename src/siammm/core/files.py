"""One file that appears whole or not at all, and never in place of another that nobody gave up."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from siammm.core.errors import InputError
from siammm.core.text import one_line


def check_new_file(path: Path, *, overwrite: bool) -> None:
    """Fail now, with one sentence, if ``new_file`` would fail later, after hours of work."""
    if path.is_dir():
        raise InputError(f"The output {path} is a folder, but a file is written; choose another --output.")
    if path.exists() and not overwrite:
        raise InputError(f"The output {path} exists; choose another --output, or add --overwrite.")
    try:
        parent = next(folder for folder in path.absolute().parents if folder.exists())
        # The only sure test of whether a folder can be written to is to write to it.
        scratch = parent / f".siammm-{secrets.token_hex(4)}"
        scratch.touch()
        scratch.unlink()
    except OSError as error:
        raise _unwritable(path, error) from error


@contextlib.contextmanager
def new_file(path: Path, *, overwrite: bool) -> Iterator[tuple[Path, Path]]:
    """Two scratch files beside ``path``: the first becomes it when the block ends well, the second is for anything.

    Whatever ends the block otherwise leaves nothing behind, and an earlier file as it was.
    """
    check_new_file(path, overwrite=overwrite)
    token = secrets.token_hex(4)
    scratch, spool = (path.with_name(f".{path.name}.{token}.{kind}") for kind in ("partial", "spool"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield scratch, spool
        with scratch.open("rb+") as written:
            os.fsync(written.fileno())
        os.replace(scratch, path)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        for leftover in (scratch, spool):
            leftover.unlink(missing_ok=True)


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(f"The output {path} cannot be written ({one_line(error)}); choose another --output or make room.")
