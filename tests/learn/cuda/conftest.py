"""What the tests of the accelerated update share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions that repeat themselves, in full precision: else two runs of the same step drift apart by more than a
    wrong one might, since cuDNN tries its convolutions before a capture and takes others than without."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
