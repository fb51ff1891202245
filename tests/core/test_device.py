"""The number format that ``auto`` takes."""

from __future__ import annotations

import pytest
import torch

from siammm.core.device import has_bf16, network_precision


def test_a_gpu_that_only_imitates_bf16_does_not_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch says so of every GPU unless it is told not to count imitations.
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert not has_bf16(torch.device("cuda"))
    assert network_precision(torch.device("cuda")) == "fp32"
    assert network_precision(torch.device("cuda"), "bf16") == "bf16"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert has_bf16(torch.device("cuda"))
    assert network_precision(torch.device("cuda")) == "bf16"
    assert network_precision(torch.device("cuda"), "fp32") == "fp32"
    assert not has_bf16(torch.device("cpu"))
