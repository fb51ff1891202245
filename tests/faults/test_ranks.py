"""Ranks of a training that are killed, or stand still."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from siammm.core.errors import LostRankError
from tests.distributed.launch import environment, free_port
from tests.faults import runs
from tests.nursery import Command, Nursery


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


def test_a_rank_that_only_waits_or_has_left_is_not_lost(nursery: Nursery, tmp_path: Path) -> None:
    """As for a slow drive: its main thread does nothing for much longer than the limit. Later the other one does."""
    program = tmp_path / "slow.py"
    program.write_text(
        "import time, torch\n"
        "from siammm.core import lost_ranks, processes, ranks\n"
        "with processes.setup('cpu') as context:\n"
        "    with lost_ranks.noticed(context):\n"
        "        time.sleep(3 * context.rank)\n"
        "        total = torch.ones(())\n"
        "        ranks.all_reduce_sum(total)\n"
        "        time.sleep(3 * (1 - context.rank))\n"
        "print(int(total))\n"
    )
    port = free_port()
    both = [
        nursery.start_program(
            program, [], cwd=tmp_path, stdout=f"{rank}.out", stderr=f"{rank}.err",
            environment=environment(rank, 2, port) | {"SIAMMM_RANK_TIMEOUT": "1"},
        )
        for rank in range(2)
    ]  # fmt: skip
    assert [one.wait(60) for one in both] == [0, 0], both[0].err + both[1].err
    assert [one.out for one in both] == ["2\n", "2\n"]


def test_a_limit_that_is_none(nursery: Nursery, tmp_path: Path) -> None:
    runs.new_images(tmp_path)
    arguments = ["train", "images", *runs.SETTINGS, "--epochs", "1"]
    command = nursery.start(arguments, cwd=tmp_path, environment={"SIAMMM_RANK_TIMEOUT": "soon"})
    assert command.refusal() == (
        "siammm: SIAMMM_RANK_TIMEOUT is 'soon', but it must be a number of seconds of at least 0.\n"
    )


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
