"""Real processes that run a command, started quickly: one process imports everything, and is forked for each command.

Importing torch takes seconds, a fork milliseconds. Each command has its own process, folder, standard streams and
limits, so a fault can be injected from outside: a signal, a closed pipe, a limit.

    with Nursery() as nursery:
        command = nursery.start(["cluster", "t.npy"], cwd=folder)
        command.signal(signal.SIGHUP)
        assert command.wait() == 129
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass
class Command:
    """A running command."""

    nursery: Nursery
    pid: int
    cwd: Path

    def signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def wait(self, timeout: float = 240.0) -> int:
        """The exit code, as ``subprocess`` gives it; a command that takes longer is killed, with its children."""
        return int(self.nursery.ask({"wait": self.pid, "timeout": timeout})["code"])

    def wait_for(self, text: str, timeout: float = 240.0) -> None:
        """Until the command has printed this."""
        until = time.monotonic() + timeout
        while text not in self.err + self.out:
            assert time.monotonic() < until, f"no {text!r} in: {self.err}{self.out}"
            time.sleep(0.02)

    @property
    def out(self) -> str:
        """What was printed on standard output, where that is a file."""
        return self._printed(".out")

    @property
    def err(self) -> str:
        """What was printed on standard error, where that is a file."""
        return self._printed(".err")

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
        command = [sys.executable, __file__]
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

    def start(
        self,
        arguments: list[str],
        *,
        cwd: Path,
        memory: int | None = None,
        stdout: str = ".out",
        stderr: str = ".err",
        environment: dict[str, str] | None = None,
    ) -> Command:
        """Start ``siammm`` with these arguments in a folder.

        ``memory`` limits its address space to what it has when it starts and so many bytes. ``stdout`` and ``stderr``
        are files or named pipes, relative to the folder.
        """
        order = {"arguments": arguments, "cwd": str(cwd), "memory": memory, "stdout": stdout, "stderr": stderr}
        return Command(self, int(self.ask(order | {"environment": environment or {}})["pid"]), cwd)

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """Pass an order to the process that forks, and return its answer."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())


# -- the process that forks --------------------------------------------------------------------------------------------


def _serve() -> list[str]:
    """Answer orders; in a child, the arguments of its command."""
    orders, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    for line in orders:
        order = json.loads(line)
        if "end" in order:
            break
        if "wait" in order:
            answer = {"code": _waited(order["wait"], order["timeout"])}
        else:
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
                _become(order)
                return order["arguments"]
            answer = {"pid": pid}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    os._exit(0)


def _waited(pid: int, timeout: float) -> int:
    until = time.monotonic() + timeout
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        time.sleep(0.01)


def _become(order: dict[str, Any]) -> None:
    import resource

    os.setsid()
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


def _exit(code: int) -> None:
    """What Python does at its end, without taking torch apart, which takes longer than most commands."""
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

    for name in ("audit", "cluster", "train"):
        importlib.import_module(f"siammm.commands.{name}")
    gc.freeze()  # what is imported is not looked through again in every child
    arguments = _serve()
    try:
        code = main(arguments)
    except BaseException:
        traceback.print_exc()
        code = 1
    _exit(code)
