"""A training on a GPU uses few threads of the CPU, except where the CPU has work of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from siammm.core.threads import MOST_THREADS, few_threads
from siammm.data.sources import open_source
from siammm.learn import bookkeeping, loop
from siammm.learn.probing import Probes
from tests.learn.small_runs import N_IMAGES, prepared, small_config, small_images


def test_a_training_uses_few_threads_except_for_probes_and_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The training is on the CPU here; only the threads are told of a GPU."""
    seen: dict[str, set[int]] = {}

    def watch(owner: object, name: str) -> None:
        plain = getattr(owner, name)

        def watched(*args: object, **more: object) -> object:
            seen.setdefault(name, set()).add(torch.get_num_threads())
            return plain(*args, **more)

        monkeypatch.setattr(owner, name, watched)

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(loop, "few_threads", lambda device: few_threads(torch.device("cuda")))
    for owner, name in (
        (loop.Training, "update"),
        (bookkeeping, "check_losses"),
        (Probes, "measured"),
        (loop, "finish"),
    ):
        watch(owner, name)
    source = open_source(small_images())
    source.labels = np.arange(N_IMAGES) % 4
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        prepared(small_config(epochs=1), source).run()
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
    assert seen == {"update": {MOST_THREADS}, "check_losses": {MOST_THREADS}, "measured": {4}, "finish": {4}}
