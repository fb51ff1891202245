"""What the tests of the commands share."""

from __future__ import annotations

import pytest

from siammm.cli import main

TINY = [
    "--backbone", "conv-small", "--hidden-dim", "32", "--embedding-dim", "16", "--epochs", "2", "--batch-size", "12",
    "--optimiser", "sgd", "--learning-rate", "0.1", "--warmup-epochs", "1", "--n-components", "10",
    "--merge", "paper", "--merge-threshold", "0", "--device", "cpu", "--no-tensorboard",
]  # fmt: skip
"""Settings of a training that takes a moment."""


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str], *, silent: bool = True) -> str:
    """The sentence with which a command refuses its arguments; if ``silent``, it prints nothing before that."""
    capsys.readouterr()
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == "" or not silent
    assert printed.err.startswith("siammm: ")
    assert printed.err.count("\n") == 1
    assert printed.err.endswith("\n")
    assert "Traceback" not in printed.err
    return printed.err
