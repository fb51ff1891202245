"""Files of other people, opened safely: regular files alone, without waiting, and within a budget of bytes.

A link in a folder of images may lead anywhere: to a pipe that nobody writes to, to a device without end, to itself.
What must not be read raises an ``OSError`` that says why, as a file does that is not there.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def check_regular(path: str | Path) -> os.stat_result:
    """Raise ``OSError`` unless the path, or what it links to, is a regular file; its facts otherwise.

    For the libraries that open a file by its name alone; everything else uses ``open_regular``.
    """
    # Asked for before the file is opened: opening a device may do something.
    status = os.stat(path)
    _check(status)
    return status


def open_regular(path: str | Path) -> IO[bytes]:
    """Open a regular file for reading bytes. Raises ``OSError``, also for anything that is no regular file."""
    check_regular(path)
    # Without waiting: between the look and this, a pipe may have taken the file's place.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    try:
        _check(os.fstat(descriptor))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | Path, *, most: int) -> bytes:
    """The contents of a regular file of at most so many bytes. Raises ``OSError``, also where there are more."""
    with open_regular(path) as file:
        # No more than the file has now: those of the kernel have no bytes, and some of them have no end.
        return file.read(check_size(file, most))


def check_size(file: IO[bytes], most: int) -> int:
    """The bytes that an open file has; raises ``OSError`` where they are more than ``most``."""
    size = os.fstat(file.fileno()).st_size
    if size > most:
        raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than {most:,}")
    return size


def _check(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a file")
