"""Ranks of a training that are killed, or stand still."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from siammm.core.errors import LostRankError
from tests.distributed.launch import LOOPBACK, environment, free_port
from tests.faults import runs
from tests.nursery import ROOT, Command, Nursery


def test_ranks_that_stand_still_or_are_gone(nursery: Nursery, tmp_path: Path) -> None:
    """One that stands still for a moment is waited for; one that is gone is not, and the other says so."""
    path = tmp_path / "run"
    first, second = two_ranks(nursery, tmp_path)
    try:
        wait_for_epochs(first, path, 1)
        second.signal(signal.SIGSTOP)
        time.sleep(1)
        before = len(runs.metrics(path))
        time.sleep(2)
        assert len(runs.metrics(path)) == before
        assert first.is_running()
        second.signal(signal.SIGCONT)
        wait_for_epochs(first, path, before + 2)
        second.signal(signal.SIGKILL)
        assert first.wait(60) == LostRankError.exit_code, first.err
    finally:
        second.kill()
    assert "Another rank has ended" in runs.one_sentence(first.err)
    rest = nursery.start(["train", "--resume", "run", *runs.little_more(path)], cwd=tmp_path)
    assert rest.wait() == 0, rest.err


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_rank_that_goes_on_standing_still_is_lost(nursery: Nursery, tmp_path: Path, frozen: int) -> None:
    """The other one ends with a sentence, and the run can be resumed. The first rank keeps the store of both."""
    path = tmp_path / "run"
    ranks = two_ranks(nursery, tmp_path, SIAMMM_RANK_TIMEOUT="2")
    other = ranks[1 - frozen]
    try:
        wait_for_epochs(ranks[0], path, 1)
        ranks[frozen].signal(signal.SIGSTOP)
        assert other.wait(60) == LostRankError.exit_code, other.err
    finally:
        ranks[frozen].kill()
    who = "The process that all ranks connect to" if frozen == 0 else "Rank 1"
    assert runs.one_sentence(other.err) == f"siammm: {who} has not responded for 2 s, so this one stops."
    rest = nursery.start(["train", "--resume", "run", *runs.little_more(path)], cwd=tmp_path)
    assert rest.wait() == 0, rest.err


@pytest.mark.parametrize("limits", [("1", "1"), ("0", "1")])
def test_a_rank_that_only_waits_or_has_left_is_not_lost(
    nursery: Nursery, tmp_path: Path, limits: tuple[str, str]
) -> None:
    """As for a slow drive: its main thread does nothing for much longer than the limit. Later the other one does.

    The limit of the first rank is that of both: one that has none does not count.
    """
    body = (
        "time.sleep(3 * context.rank)",
        "total = torch.ones(())",
        "ranks.all_reduce_sum(total)",
        "time.sleep(3 * (1 - context.rank))",
        "print(int(total))",
    )
    both = started(nursery, tmp_path, body, limits)
    assert [one.wait(60) for one in both] == [0, 0], both[0].err + both[1].err
    assert [one.out for one in both] == ["2\n", "2\n"]


def test_a_rank_that_fails_and_hangs_on_leaving_is_lost(nursery: Nursery, tmp_path: Path) -> None:
    """Its connections stay open, as those of a GPU may."""
    body = (
        "if context.rank == 1:",
        "    context.__class__.__exit__ = lambda *_: time.sleep(60)",
        "    raise ValueError('broken')",
        "time.sleep(30)",
    )
    first, second = started(nursery, tmp_path, body, ("2", "2"))
    try:
        assert first.wait(60) == LostRankError.exit_code, first.err
        assert "Rank 1 has not responded" in first.err
    finally:
        second.kill()


@pytest.mark.slow
def test_torchrun_that_stands_still_does_not_end_its_ranks(tmp_path: Path) -> None:
    """It keeps the store, and is what Ctrl-Z in its terminal stops."""
    program = written(tmp_path, ("open(f'ready{context.rank}', 'w').close()", "time.sleep(8)"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    variables = {"SIAMMM_RANK_TIMEOUT": "1", "PYTHONPATH": str(ROOT / "src"), "GLOO_SOCKET_IFNAME": LOOPBACK}
    torchrun = subprocess.Popen(command, cwd=tmp_path, env=os.environ | variables)
    try:
        until = time.monotonic() + 120
        while not all((tmp_path / f"ready{rank}").exists() for rank in range(2)):
            assert time.monotonic() < until
            time.sleep(0.05)
        torchrun.send_signal(signal.SIGSTOP)
        time.sleep(4)
        torchrun.send_signal(signal.SIGCONT)
        assert torchrun.wait(60) == 0
    finally:
        torchrun.kill()


def test_a_limit_that_is_none(nursery: Nursery, tmp_path: Path) -> None:
    runs.new_images(tmp_path)
    arguments = ["train", "images", *runs.SETTINGS, "--epochs", "1"]
    command = nursery.start(arguments, cwd=tmp_path, environment={"SIAMMM_RANK_TIMEOUT": "soon"})
    assert command.refusal() == (
        "siammm: SIAMMM_RANK_TIMEOUT is 'soon', but it must be a number of seconds of at least 0.\n"
    )


def written(folder: Path, body: Sequence[str]) -> Path:
    """A program that does this while its ranks are watched."""
    program = folder / "program.py"
    program.write_text(
        "import time, torch\n"
        "from siammm.core import lost_ranks, processes, ranks\n"
        "with processes.setup('cpu') as context, lost_ranks.noticed(context):\n"
        + "".join(f"    {line}\n" for line in body)
    )
    return program


def started(nursery: Nursery, folder: Path, body: Sequence[str], limits: tuple[str, str]) -> list[Command]:
    """Two ranks of such a program, each with its own limit."""
    program, port = written(folder, body), free_port()
    return [
        nursery.start_program(
            program, [], cwd=folder, stdout=f"{rank}.out", stderr=f"{rank}.err",
            environment=environment(rank, 2, port) | {"SIAMMM_RANK_TIMEOUT": limit},
        )
        for rank, limit in enumerate(limits)
    ]  # fmt: skip


def two_ranks(nursery: Nursery, folder: Path, **variables: str) -> list[Command]:
    """A training by two processes that would go on for very long."""
    runs.new_images(folder)
    port = free_port()
    arguments = ["train", "images", *runs.SETTINGS, *runs.LONG, "--output", "run", "--save-every", "0"]
    return [
        nursery.start(
            arguments, cwd=folder, stdout=f"{rank}.out", stderr=f"{rank}.err",
            environment=environment(rank, 2, port) | {"COLUMNS": "300"} | variables,
        )
        for rank in range(2)
    ]  # fmt: skip


def wait_for_epochs(command: Command, path: Path, count: int) -> None:
    until = time.monotonic() + 120
    while not (path / "metrics.jsonl").exists() or len(runs.metrics(path)) < count:
        assert command.is_running(), command.err
        assert time.monotonic() < until
        time.sleep(0.02)
