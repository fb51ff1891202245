"""Start the processes of a distributed test. Real gloo, on this machine."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from tests.nursery import Nursery

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def run_ranks(nursery: Nursery, worker: str | Path, folder: Path, world: int, *, timeout: float) -> None:
    """Run a script, found from here, with ``folder`` as its argument, in so many processes as torchrun would start."""
    port = free_port()
    program = Path(__file__).parent / worker
    running = [
        nursery.start_program(
            program, [str(folder)], cwd=folder, stdout=f"rank{rank}.out", stderr=f"rank{rank}.err",
            environment=environment(rank, world, port),
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        codes = [rank.wait(timeout) for rank in running]
    finally:
        for rank in running:
            rank.kill()
    said = "\n".join(rank.out + rank.err for rank in running)
    assert codes == [0] * world, said
    assert "UserWarning" not in said, said


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun sets."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": LOOPBACK,
    }  # fmt: skip
