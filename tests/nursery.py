"""Real processes that run a command, started quickly: one process imports everything, and is forked for each command.

Importing torch takes seconds, a fork milliseconds. Each command has its own process, folder, standard streams and
limits, so a fault can be injected from outside: a signal, a closed pipe, a limit.

    with Nursery() as nursery:
        command = nursery.start(["cluster", "t.npy"], cwd=folder)
        command.signal(signal.SIGHUP)
        assert command.wait() == 129
        command = nursery.start(["train", "images"], cwd=folder, watched=True)
        assert "write_results" in command.stack()  # what it is doing just now
        rank = nursery.start_program(Path("worker.py"), ["given"], cwd=folder, environment={"RANK": "0"})
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STACK = ".stack"
"""Where a command that is watched writes what it is doing."""
_OUTERMOST = (b" in <module>\n", b"  ...\n")


@dataclass
class Command:
    """A running command."""

    nursery: Nursery
    pid: int
    cwd: Path
    streams: tuple[str, str]
    peak: int = 0
    """The most memory that it had, in bytes; known once it has been waited for, as is the next."""
    seconds: float = 0.0
    """The processor time that it took."""

    def signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def wait(self, timeout: float = 240.0) -> int:
        """The exit code, as ``subprocess`` gives it; a command that takes longer is killed, with its children."""
        answer = self.nursery.ask({"wait": self.pid, "timeout": timeout})
        self.peak, self.seconds = 1024 * int(answer["peak"]), float(answer["seconds"])
        return int(answer["code"])

    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.nursery.ask({"poll": self.pid})["code"] is None

    def kill(self) -> None:
        """End it at once, and what it has started; nothing happens if it has ended."""
        if self.is_running():
            with contextlib.suppress(ProcessLookupError):  # before it has become the leader of a group
                os.killpg(self.pid, signal.SIGKILL)
            self.signal(signal.SIGKILL)
        self.wait()

    def seconds_so_far(self) -> float:
        """The processor time that it has taken until now."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def stack(self) -> str:
        """Where it is just now, the innermost call first; empty if it has ended. For one that is ``watched``."""
        path = self.cwd / STACK
        if not path.exists() or not (before := path.stat().st_size):
            return ""
        try:
            self.signal(signal.SIGUSR1)
        except ProcessLookupError:
            return ""
        asked = time.monotonic()
        while not (text := path.read_bytes()[before:]).endswith(_OUTERMOST):
            if time.monotonic() > asked + 0.05 and not self.is_running():
                return ""
            time.sleep(0.0005)
        return text.decode()

    def wait_for(self, text: str, timeout: float = 240.0) -> None:
        """Until the command has printed this."""
        until = time.monotonic() + timeout
        while text not in self.err + self.out:
            assert time.monotonic() < until, f"no {text!r} in: {self.err}{self.out}"
            time.sleep(0.02)

    @property
    def out(self) -> str:
        """What was printed on standard output, where that is a file."""
        return self._printed(self.streams[0])

    @property
    def err(self) -> str:
        """What was printed on standard error, where that is a file."""
        return self._printed(self.streams[1])

    def _printed(self, name: str) -> str:
        path = self.cwd / name
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def refusal(self, timeout: float = 240.0) -> str:
        """The one sentence that the command ends with, and exit code 2."""
        code, text = self.wait(timeout), self.err
        assert code == 2, f"exit code {code}: {text}"
        assert "Traceback" not in text
        assert text.startswith("siammm: "), text
        assert text.count("\n") == 1, text
        return text


class Nursery:
    """Starts commands; a context manager."""

    def __enter__(self) -> Nursery:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        command = [sys.executable, "-P", __file__]  # the folders beside this file are not for import by themselves
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        # In words: the pipe may still be open in a process that was forked meanwhile.
        self._server.stdin.write(json.dumps({"end": True}) + "\n")
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()

    def start(self, arguments: list[str], *, cwd: Path, **how: Any) -> Command:
        """Start ``siammm`` with these arguments in a folder."""
        return self._started(None, arguments, cwd, **how)

    def start_program(self, program: Path, arguments: list[str], *, cwd: Path, **how: Any) -> Command:
        """Start a program of Python with these arguments in a folder, as ``python program`` would."""
        return self._started(str(program.resolve()), arguments, cwd, **how)

    def _started(
        self,
        program: str | None,
        arguments: list[str],
        cwd: Path,
        *,
        memory: int | None = None,
        data: int | None = None,
        largest_file: int | None = None,
        watched: bool = False,
        stdout: str = ".out",
        stderr: str = ".err",
        environment: dict[str, str] | None = None,
    ) -> Command:
        """A process.

        ``memory`` limits its address space to what it has when it starts and so many bytes, ``data`` only what it
        allocates, of which it is not told. No file may grow beyond ``largest_file`` bytes, which programs meet as they
        meet a full disk: a write that fails. One that is ``watched`` can say where it is. ``stdout`` and ``stderr`` are
        files or named pipes, relative to the folder.
        """
        order = {
            "program": program, "arguments": arguments, "cwd": str(cwd.resolve()), "memory": memory,
            "data": data, "largest_file": largest_file, "watched": watched,
            "stdout": stdout, "stderr": stderr, "environment": environment or {},
        }  # fmt: skip
        for name in {stdout, stderr}:  # what an earlier one has printed is not taken for what this one prints
            if (cwd / name).is_file():
                (cwd / name).unlink()
        return Command(self, int(self.ask(order)["pid"]), cwd, (stdout, stderr))

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """Pass an order to the process that forks, and return its answer."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())


# -- the process that forks --------------------------------------------------------------------------------------------


def _serve() -> dict[str, Any]:
    """Answer orders; in a child, the order that it is to follow."""
    orders, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    ended: dict[int, dict[str, Any]] = {}
    for line in orders:
        order = json.loads(line)
        if "end" in order:
            break
        if "wait" in order:
            answer = _waited(order["wait"], order["timeout"], ended)
        elif "poll" in order:
            answer = {"code": _code(order["poll"], ended)}
        else:
            pid = os.fork()
            if pid == 0:
                _become(order)
                return order
            answer = {"pid": pid}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    os._exit(0)


def _code(pid: int, ended: dict[int, dict[str, Any]]) -> int | None:
    """With what a child has ended; None while it runs."""
    if pid not in ended:
        found, status, used = os.wait4(pid, os.WNOHANG)
        if not found:
            return None
        code, seconds = os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
        ended[pid] = {"code": code, "peak": used.ru_maxrss, "seconds": seconds}
    return ended[pid]["code"]


def _waited(pid: int, timeout: float, ended: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """The code, the most memory in kilobytes, and the processor time."""
    until, pause = time.monotonic() + timeout, 0.001
    while _code(pid, ended) is None:
        if time.monotonic() > until:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        time.sleep(pause)
        pause = min(0.01, 1.2 * pause)
    return ended[pid]


_kept: list[Any] = []


def _become(order: dict[str, Any]) -> None:
    import resource

    os.setsid()
    # The tests themselves may run under nohup, or in the background of a shell, which both have signals ignored.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(order["cwd"])
    os.environ.update(order["environment"])
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = None
        if order[name] == "closed":
            os.close(number)
        else:
            # A terminal that is also read from becomes that of the process.
            access = os.O_RDWR if order[name].startswith("/dev/pts") else os.O_WRONLY
            opened = os.open(order[name], access | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(opened, number)
            os.close(opened)
            # As Python makes them when it starts.
            buffering = 1 if number == 2 or os.isatty(number) else -1
            stream = open(number, "w", buffering, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115 - for good
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if order["memory"] is not None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + order["memory"]
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    if order["data"] is not None:
        text = Path("/proc/self/status").read_text()
        limit = 1024 * int(text.split("VmData:")[1].split()[0]) + order["data"]
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    if order["largest_file"] is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python has it
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["largest_file"], order["largest_file"]))
    if order["watched"]:
        stack = open(STACK, "wb", buffering=0)  # noqa: SIM115 - for good
        faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
        stack.write(b"\n")  # from now on it can be asked
        _kept.append(stack)


def _run(order: dict[str, Any]) -> int:
    """What the child is for; its exit code."""
    try:
        if order["program"] is None:
            return main(order["arguments"])
        sys.argv = [order["program"], *order["arguments"]]
        runpy.run_path(order["program"], run_name="__main__")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _exit(code: int) -> None:
    """What Python does at its end, without taking torch apart, which takes longer than most commands."""
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except OSError:
        code = 120
    os._exit(code)


if __name__ == "__main__":
    from siammm.cli import main

    # The last is what torch's optimisers import when the first one is made.
    commands = ("audit", "cluster", "embed", "evaluate", "export", "report", "sort", "train")
    for name in (*(f"siammm.commands.{command}" for command in commands), "torch._dynamo"):
        importlib.import_module(name)
    gc.freeze()  # what is imported is not looked through again in every child
    _exit(_run(_serve()))
