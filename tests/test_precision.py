"""The number format that ``auto`` takes."""

from __future__ import annotations

import pytest
import torch

from siammm.precision import has_bf16


def test_a_gpu_that_only_imitates_bf16_does_not_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch says so of every GPU unless it is told not to count imitations.
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert not has_bf16(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert has_bf16(torch.device("cuda"))
    assert not has_bf16(torch.device("cpu"))
