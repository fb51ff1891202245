"""A program that reads images with worker processes, and is told of its own children by a handler of its own.

Prints what happened, as JSON: whether it heard of its own child and of the worker that was killed while nothing waited
for it, and what the next batch then said.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

from siammm.core.errors import SiamMMError
from siammm.data.loader import open_loader
from siammm.data.sources import open_source
from siammm.data.view_settings import views


def children() -> list[int]:
    pid = os.getpid()
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def waited(heard: list[int], count: int) -> bool:
    until = time.monotonic() + 20
    while len(heard) < count and time.monotonic() < until:
        time.sleep(0.01)
    return len(heard) >= count


def main() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGCHLD, lambda number, _: heard.append(number))
    source = open_source(sys.argv[1])
    loader = open_loader(source, views(8), torch.device("cpu"), kind="streaming", seed=0, workers=1)
    batches = loader.batches(0, [torch.arange(4)] * 50)
    next(batches)
    (worker,) = children()
    own = os.fork()
    if own == 0:
        os._exit(0)
    found: dict[str, object] = {"own": waited(heard, 1)}
    os.waitpid(own, 0)
    os.kill(worker, signal.SIGKILL)
    found["worker"] = waited(heard, 2)
    try:
        next(batches)
    except SiamMMError as error:
        found["said"] = str(error)
    own = os.fork()
    if own == 0:
        os._exit(0)
    found["afterwards"] = waited(heard, 3)
    os.waitpid(own, 0)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
