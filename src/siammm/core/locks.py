"""One writer for a folder: a file in it names the process that writes there, and shows that it is alive.

The file outlives a process that is killed, so whoever finds it asks whether its owner still runs. On the same machine
the number of the process and the time of its start tell at once. Of another machine, or another container, nothing can
be asked; there the owner touches the file every few seconds, and one that is silent for long has gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from siammm.core.errors import InputError
from siammm.core.files import scratch_beside, unwritable

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

BEAT_SECONDS = 10.0
"""How often the owner of a lock touches its file."""
SILENT_SECONDS = 120.0
"""A lock from elsewhere that was not touched for so long belongs to nobody: writing a large file may delay a touch."""
_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class _Owner:
    """The process that has a lock, as its file says."""

    host: str
    pid: int
    started: int | None
    """When it started, in ticks since the machine did; None where the system does not say."""
    place: str
    """Where its number means something: the machine since its last start, and the container."""
    token: str

    @classmethod
    def this_process(cls) -> Self:
        host, pid = socket.gethostname(), os.getpid()
        return cls(host, pid, _started(pid), _place(host), secrets.token_hex(8))

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Who has the lock; None where nobody has, or nobody can say."""
        try:
            found = cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        return found if isinstance(found.pid, int) and found.pid > 0 else None

    @property
    def is_here(self) -> bool:
        """Whether this process can ask the system about it."""
        return os.name == "posix" and self.place == _place(socket.gethostname())

    @property
    def runs(self) -> bool:
        """Whether it is still there, under its number and not another process that has got the same one."""
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:  # somebody else's
            pass
        return _started(self.pid) in (None, self.started) or self.started is None


class FolderLock:
    """The right to write into a folder, as a context manager; refused while another process has it.

    The folder is made if need be, and removed at the end if nothing else has come into it. ``patience``: wait for as
    long as it takes to see that an owner elsewhere has gone, as a job does that is started again on another machine.
    """

    def __init__(self, folder: Path, name: str, *, remedy: str, patience: bool = False) -> None:
        self.folder, self.path, self._remedy, self._patience = folder, folder / name, remedy, patience
        self._mine: _Owner | None = None
        self._made: list[Path] = []
        self._over = threading.Event()

    def __enter__(self) -> Self:
        try:
            self._made = [one for one in (self.folder, *self.folder.parents) if not one.exists()]
            self.folder.mkdir(parents=True, exist_ok=True)
            self._take()
        except OSError as error:
            raise unwritable(f"The folder {self.folder}", error, "choose another --output or make room") from error
        # The thread ends with the process; a copy of the process that reads images does not have it.
        threading.Thread(target=self._beat, daemon=True, name="siammm-lock").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        owner = _Owner.read(self.path)
        if self._mine is not None and owner is not None and owner.token == self._mine.token:
            with contextlib.suppress(OSError):
                self.path.unlink()
        self._mine = None
        for folder in self._made:
            with contextlib.suppress(OSError):
                folder.rmdir()

    def check_free(self) -> None:
        """Refuse now what entering would refuse; changes nothing."""
        if not self._patience and self.path.exists() and (owner := self._holder()) is not None:
            raise self._refusal(owner)

    def check_mine(self) -> None:
        """Refuse to write on where another process has taken the folder over: this one was asleep for long."""
        owner = _Owner.read(self.path)
        if self._mine is None or (owner is not None and owner.token == self._mine.token):
            return
        if owner is None:  # removed by hand, or damaged, while this process runs
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)
                self._create()
            owner = _Owner.read(self.path)
        if owner is not None and owner.token != self._mine.token:
            raise InputError(
                f"Process {owner.pid} on {owner.host} took over {self.folder} because this process did not respond; "
                "this one stops, so that their results are not mixed."
            )

    def _take(self) -> None:
        seen: float | None = None
        while True:
            with alone_in(self.folder):
                owner = self._holder()
                if owner is None:
                    self.path.unlink(missing_ok=True)  # of a process that has gone
                    self._mine = _Owner.this_process()
                    self._create()
                    return
            touched = self._touched()
            if not self._patience or owner.is_here or (seen is not None and touched != seen):
                raise self._refusal(owner)
            seen = touched
            time.sleep(_POLL_SECONDS)

    def _create(self) -> None:
        assert self._mine is not None
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(asdict(self._mine)) + "\n")

    def _holder(self) -> _Owner | None:
        """The process that has the lock and is alive, as far as can be said."""
        owner = _Owner.read(self.path)
        if owner is None:
            return None
        is_gone = not owner.runs if owner.is_here else self._silence() > SILENT_SECONDS
        return None if is_gone else owner

    def _refusal(self, owner: _Owner) -> InputError:
        if owner.is_here:
            return InputError(
                f"{self.folder} is being written by process {owner.pid} of this machine; wait until it ends, or "
                f"{self._remedy}."
            )
        silence = max(0.0, self._silence())
        return InputError(
            f"{self.folder} is being written by process {owner.pid} on {owner.host}, last seen {silence:.0f} s ago; "
            f"wait until it ends, or {self._remedy}. If it no longer runs, the folder is free {SILENT_SECONDS:.0f} s "
            f"after that, or at once if you remove {self.path}."
        )

    def _touched(self) -> float:
        try:
            return self.path.stat().st_mtime
        except OSError:
            return 0.0

    def _silence(self) -> float:
        """Seconds since the owner touched its file, by the clock of the drive: machines may disagree on the time."""
        scratch = scratch_beside(self.path)
        try:
            scratch.touch()
            now = scratch.stat().st_mtime
        except OSError:  # a folder that can only be read
            now = time.time()
        finally:
            with contextlib.suppress(OSError):
                scratch.unlink()
        return now - self._touched()

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            owner = _Owner.read(self.path)
            if owner == self._mine:
                with contextlib.suppress(OSError):
                    os.utime(self.path)


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """No two processes are in such a block for one folder at the same time, where the file system can do that.

    For moments: looking for an owner and taking its place.
    """
    if fcntl is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a folder that cannot be read, or a file system without locks
            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _started(pid: int) -> int | None:
    """When a process started; None if that cannot be known, -1 if it has ended and only waits to be noticed."""
    if sys.platform != "linux":
        return None
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        state, *fields = text.rpartition(")")[2].split()
        return -1 if state in "ZX" else int(fields[18])
    except (OSError, ValueError, IndexError):
        return None


def _place(host: str) -> str:
    parts = [host]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)
