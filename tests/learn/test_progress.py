"""What is shown of training: a line an epoch where there is no terminal, bars where there is one."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from siammm.learn import progress
from siammm.learn.progress import TrainingProgress, metrics_line
from tests.learn.small_runs import prepared, run_through, small_config

ROW: dict[str, Any] = {
    "epoch": 3, "loss": 1.23456, "instance_loss": 2.0, "cluster_loss": -0.5, "gradient_norm": 9.0, "n_clusters": 4021,
    "images_per_second": 12345.6, "knn": 0.8765, "ami": 0.5,
}  # fmt: skip


def test_a_row_in_a_line() -> None:
    expected = "loss 1.235  instance 2.000  clusters -0.500  K 4,021  kNN 87.6%  AMI 0.500  12,346 images/s"
    assert metrics_line(ROW) == expected
    assert metrics_line({"epoch": 1, "loss": 1.0}) == "loss 1.000"
    assert metrics_line({}) == ""


def shown(*, terminal: bool) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=200, highlight=False)
    with TrainingProgress(console=console) as listener:
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
    assert [line.split(":")[0] for line in shown(terminal=False).splitlines()] == [
        "epoch 1 of 3", "epoch 2 of 3", "epoch 3 of 3",
    ]  # fmt: skip


def test_on_a_terminal_there_are_bars() -> None:
    text = shown(terminal=True)
    for part in ("reading images", "epochs", "this epoch", "loss"):
        assert part in text
