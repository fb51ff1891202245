"""Start the processes of a distributed test. Real gloo, on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def run_ranks(worker: str, folder: Path, world: int, *, timeout: float) -> None:
    """Run a script of this folder, with ``folder`` as its argument, in so many processes as torchrun would start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(Path(__file__).with_name(worker)), str(folder)]
    logs = [(folder / f"rank{rank}.log").open("w+") for rank in range(world)]
    running = [
        subprocess.Popen(command, env=_environment(rank, world, port), stdout=log, stderr=subprocess.STDOUT)
        for rank, log in enumerate(logs)
    ]
    try:
        for process in running:
            process.wait(timeout=timeout)
    finally:
        for process in running:
            process.kill()
            process.wait()
    texts = []
    for log in logs:
        with log:
            log.seek(0)
            texts.append(log.read())
    assert [process.returncode for process in running] == [0] * world, "\n".join(texts)


def _environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun sets."""
    return os.environ | {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": LOOPBACK, "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
    }  # fmt: skip
