"""The vote of the nearest on a GPU: as on the CPU, and fast."""

from __future__ import annotations

import time

import pytest
import torch

from siammm.metrics.knn import knn_accuracies, knn_predict
from tests.metrics.test_knn import classes

pytestmark = pytest.mark.gpu


def test_on_the_gpu_as_on_the_cpu() -> None:
    """The queries may stay on the CPU; the work is done where the bank is."""
    (bank, labels), (query, _) = classes(5000, d=64), classes(700, d=64, seed=1)
    expected = knn_predict(query, bank, labels)
    predicted = knn_predict(query, torch.tensor(bank).cuda(), labels)
    assert predicted.is_cuda
    assert torch.equal(predicted.cpu(), expected)
    loo = knn_predict(bank, torch.tensor(bank).cuda(), labels, leave_one_out=True)
    assert torch.equal(loo.cpu(), knn_predict(bank, bank, labels, leave_one_out=True))


def test_fifty_thousand_take_less_than_a_second_on_a_gpu() -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    bank, query = (torch.randn(n, 512, device="cuda", generator=generator) for n in (50_000, 10_000))
    labels = torch.randint(0, 10, (50_000,), device="cuda", generator=generator)
    seconds: list[float] = []
    for _ in range(2):  # the first loads kernels
        start = time.perf_counter()
        knn_accuracies(query, labels[:10_000], bank, labels)
        seconds.append(time.perf_counter() - start)
    assert seconds[1] < 1
