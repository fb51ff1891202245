"""What is shown of training: a line an epoch where there is no terminal, bars where there is one."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from siammm.core import progress as core_progress
from siammm.core.text import rough_duration
from siammm.learn import progress
from siammm.learn.progress import TrainingProgress, metrics_line
from tests.learn.small_runs import STEPS, prepared, run_through, small_config

ROW: dict[str, Any] = {
    "epoch": 3, "loss": 1.23456, "instance_loss": 2.0, "cluster_loss": -0.5, "gradient_norm": 9.0, "n_clusters": 4021,
    "images_per_second": 12345.6, "knn": 0.8765, "ami": 0.5,
}  # fmt: skip


def test_a_row_in_a_line() -> None:
    expected = "loss 1.235  instance 2.000  clusters -0.500  K 4,021  kNN 87.6%  AMI 0.500  12,346 images/s"
    assert metrics_line(ROW) == expected
    assert metrics_line({"epoch": 1, "loss": 1.0}) == "loss 1.000"
    assert metrics_line({}) == ""


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (200, metrics_line(ROW)),
        (60, "loss 1.235  K 4,021  kNN 87.6%  AMI 0.500  12,346 images/s"),
        (30, "loss 1.235  K 4,021  kNN 87.6%"),
        (12, "loss 1.235"),
        (3, ""),
    ],
)
def test_a_narrow_line_keeps_what_matters_most(width: int, line: str) -> None:
    assert metrics_line(ROW, width=width) == line
    assert len(line) <= width


def shown(*, terminal: bool, advice: str = "") -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=200, highlight=False)
    with TrainingProgress(console=console, advice=advice) as listener:
        listener.reading(16, 32)
        listener.reading(32, 32)
        run_through(prepared(small_config(epochs=3), listener=listener))
    return stream.getvalue()


def test_without_a_terminal_the_last_epoch_is_printed() -> None:
    lines = shown(terminal=False).splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("epoch 3 of 3: loss ")


def test_without_a_terminal_long_epochs_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", -1.0)
    lines = shown(terminal=False).splitlines()
    assert [line.split(":")[0] for line in lines] == ["epoch 1 of 3", "epoch 2 of 3", "epoch 3 of 3"]
    assert [line.endswith("left") for line in lines] == [True, True, False]
    assert re.search(r"images/s  about \d+ seconds? left$", lines[1])


@pytest.mark.parametrize("terminal", [False, True])
def test_advice_comes_once_and_before_the_first_update(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the batches that are embedded first; where training is short, it never comes."""
    assert "Do something else" not in shown(terminal=terminal, advice="Do something else.")
    monkeypatch.setattr(progress, "_LONG", -1.0)
    text = shown(terminal=terminal, advice="Do something else.")
    assert len(re.findall(r"At this pace the training takes about \d+ seconds?\. Do something else\.", text)) == 1
    assert text.index("Do something else") < text.index("loss ")
    assert "At this pace" not in shown(terminal=terminal)


@pytest.mark.parametrize(("seconds", "batches"), [(30.0, 1), (4.0, 3)])
def test_slow_batches_are_enough_for_an_estimate(seconds: float, batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    for module in (core_progress, progress):
        monkeypatch.setattr(module, "time", clock)
    stream = io.StringIO()
    listener = TrainingProgress(console=Console(file=stream, width=100), advice="Stop.")
    listener.began(prepared(small_config(epochs=1000)))
    for done in range(1, batches + 1):
        assert stream.getvalue() == ""
        clock.now += seconds
        listener.embedded(done, 50)
    hours = (50 - batches + 4 * 1000 * STEPS) * seconds / 3600
    assert stream.getvalue() == f"At this pace the training takes about {rough_duration(3600 * hours)}. Stop.\n"


def test_what_is_done_once_is_no_part_of_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first embeddings, at 100 s a batch, do not count for the updates, at 1 s each."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(core_progress, "time", clock)
    listener = TrainingProgress(console=Console(file=io.StringIO(), width=100))
    training = prepared(small_config(epochs=3))
    listener.began(training)
    for done in range(1, STEPS + 1):
        clock.now += 100
        listener.embedded(done, STEPS)
    left = listener.tasks[0].fields["left"]
    assert left() is None
    clock.now += 1
    listener.stepped(0, 1, STEPS)
    assert left() == 3 * STEPS - 1, "after one update"
    clock.now += STEPS - 1
    listener.stepped(0, STEPS, STEPS)
    clock.now += 8  # EM and merging are part of an epoch
    listener.finished_epoch({"epoch": 1, "loss": 1.0})
    assert left() == pytest.approx(2 * (STEPS + 8))


def test_the_estimate_is_near_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said after three batches of the first embeddings, and what the updates then take."""
    monkeypatch.setattr(progress, "_LONG", -1.0)
    monkeypatch.setattr(progress, "rough_duration", lambda seconds: f"[{seconds}]")
    stream = io.StringIO()
    with TrainingProgress(console=Console(file=stream, width=200), advice="Stop.") as listener:
        training = run_through(prepared(small_config(epochs=5, cluster_after=1.0), listener=listener))
    estimate = float(stream.getvalue().split("[")[1].split("]")[0])
    assert 0.1 < estimate / sum(row["seconds"] for row in training.metrics) < 10


def test_on_a_terminal_there_are_bars() -> None:
    text = shown(terminal=True)
    for part in ("reading images", "epochs", "this epoch", "loss"):
        assert part in text
