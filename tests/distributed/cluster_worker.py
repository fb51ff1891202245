"""One rank: runs ``siammm cluster`` for every case, and writes how it ended. ``test_cluster_command.py`` starts it."""

from __future__ import annotations

import contextlib
import io
import json
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from siammm.cli import main
from siammm.core import ranks


def done(case: dict[str, Any]) -> dict[str, Any]:
    """The exit code of a case, and what this rank printed."""
    arguments = case["arguments"]
    out, err = io.StringIO(), io.StringIO()
    with _room(case.get("room")), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments[ranks.rank()] if isinstance(arguments[0], list) else arguments)
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


@contextlib.contextmanager
def _room(room: int | None) -> Iterator[None]:
    """No file of this process grows beyond so many bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if room is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")  # the commands find the group and leave it as it is
    ended = {case["name"]: done(case) for case in json.loads((folder / "cases.json").read_text())}
    (folder / f"ended.{ranks.rank()}.json").write_text(json.dumps(ended))
    dist.destroy_process_group()
