"""What commands show on a terminal while they work: the bar, the count and the time left, however narrow it is."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.data.image_sets import example_images, write_folder
from tests.nursery import Nursery
from tests.terminal import Terminal

WIDTHS = (60, 80, 120)
BAR, COUNT, LEFT = r"[━╸╺]{4,}", r"\d[\d,]*/\d[\d,]*", r"\d:\d\d:\d\d left$"


def drawn(terminal: Terminal, what: str) -> list[str]:
    """All lines of one bar. Each fits the terminal and has a bar, a count and the time left, if only as dashes."""
    lines = [line for line in terminal.lines if re.match(rf". {what} ", line)]
    assert lines, terminal.lines
    for line in lines:
        assert len(line) <= terminal.columns, line
        assert re.search(rf"{BAR} +{COUNT} .*(\d:\d\d:\d\d|-:--:--) left$", line), line
    return lines


@pytest.mark.parametrize("columns", WIDTHS)
def test_training(columns: int, nursery: Nursery, tmp_path: Path) -> None:
    made = example_images(48, size=(8, 8), n_classes=4)
    np.savez(tmp_path / "x.npz", images=made.images, labels=made.labels)
    settings = ["--preset", "demo", "--epochs", "6", "--batch-size", "8", "--device", "cpu"]
    clusters = ["--cluster-after", "0", "--n-components", "12", "--merge", "none"]
    with Terminal(columns) as terminal:
        command = nursery.start(["train", "x.npz", *settings, *clusters], cwd=tmp_path, **terminal.streams)
        assert command.wait() == 0
    epochs, steps = drawn(terminal, "epochs"), drawn(terminal, "this epoch")
    assert any(re.search(LEFT, line) for line in epochs if " 0/6 " in line), "already in the first epoch"
    assert all(re.search(LEFT, line) for line in epochs if " 0/6 " not in line)
    assert re.search(r" 6/6 .* 0:00:00 left$", epochs[-1])
    assert any(re.search(LEFT, line) for line in steps)
    measured = [line for line in terminal.lines if line.startswith("  loss ")]
    for line in measured:
        assert len(line) <= columns
        assert ("K 12" in line, "kNN" in line, "instance" in line) == (True, True, columns == 120), line
    assert len(measured) > 5


def test_encoding_images(nursery: Nursery, tmp_path: Path) -> None:
    """Before the first batch is done, the count and the bar show that it works; then the time left is known."""
    photos = write_folder(tmp_path, example_images(70, size=(40, 40), n_classes=2))
    with Terminal(60) as terminal:
        words = ["cluster", str(photos), "--encoder", "lite", "--output", "found", "--device", "cpu"]
        assert nursery.start(words, cwd=tmp_path, **terminal.streams).wait() == 0
    lines = drawn(terminal, "images")
    assert any(re.search(LEFT, line) for line in lines if re.search(r" (32|64)/70 ", line))
    assert all(len(line) <= 60 for line in terminal.lines)
    assert any("opening the encoder" in line for line in terminal.lines)
    with Terminal(60) as terminal:
        words = ["embed", "lite", "--data", str(photos), "--device", "cpu"]
        assert nursery.start(words, cwd=tmp_path, **terminal.streams).wait() == 0
    assert any(re.search(LEFT, line) for line in drawn(terminal, "images"))
    assert "/" not in terminal.lines[-1], "what comes last has no end that is known"
