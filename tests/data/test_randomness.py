"""Randomness: numbers that hang on their coordinates alone, are evenly spread, and never change between versions."""

import numpy as np
import pytest
import torch
from scipy import stats

from siammm.data.randomness import permutation, uniforms

WORD = 2**64
GOLDEN = 0x9E3779B97F4A7C15


def plain_mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % WORD
    return z ^ (z >> 31)


def plain_uniform(seed: int, epoch: int, index: int, stream: int, slot: int) -> float:
    """One number in Python's integers."""
    state = plain_mix(plain_mix((seed + GOLDEN) % WORD) ^ (stream + 2))
    state = plain_mix(plain_mix(state ^ epoch) ^ index)
    return (plain_mix(state ^ plain_mix(slot + 1)) >> 40) / 2**24


@pytest.mark.parametrize("seed", [0, 1, 2**31, -5, 2**70 + 3])
def test_equals_the_same_hash_in_python_integers(seed: int):
    index = torch.tensor([0, 1, 7, 1_281_166, 2**40])
    got = uniforms(seed, 3, index, 1, 4)
    expected = [[plain_uniform(seed, 3, int(i), 1, slot) for slot in range(4)] for i in index]
    np.testing.assert_array_equal(got.numpy(), np.array(expected, dtype=np.float32))


def test_shape_type_and_range():
    u = uniforms(0, 0, torch.arange(10_000), 0, 30)
    assert u.shape == (10_000, 30)
    assert u.dtype == torch.float32
    assert u.min() >= 0.0
    assert u.max() < 1.0
    assert uniforms(0, 0, torch.arange(0), 0, 30).shape == (0, 30)


def test_an_epoch_in_a_tensor_is_the_same_epoch():
    index = torch.arange(100)
    for epoch in (0, 1, 99, 2**33):
        assert torch.equal(uniforms(5, torch.tensor(epoch), index, 0, 8), uniforms(5, epoch, index, 0, 8))


def test_a_sample_draws_the_same_in_any_batch_and_for_any_count():
    index = torch.arange(1000)
    whole = uniforms(2, 4, index, 1, 12)
    shuffled = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(uniforms(2, 4, shuffled, 1, 12), whole[shuffled])
    assert torch.equal(uniforms(2, 4, index[17:18], 1, 5), whole[17:18, :5])


def test_every_coordinate_matters():
    index = torch.arange(2000)
    tables = [
        uniforms(0, 0, index, 0, 8),
        uniforms(1, 0, index, 0, 8),
        uniforms(0, 1, index, 0, 8),
        uniforms(0, 0, index + 2000, 0, 8),
        uniforms(0, 0, index, 1, 8),
    ]
    together = torch.stack(tables).reshape(len(tables), -1).double()
    correlation = torch.corrcoef(together) - torch.eye(len(tables))
    assert correlation.abs().max() < 5 / np.sqrt(together.shape[1])


def test_numbers_are_uniform_and_independent_along_every_coordinate():
    index = torch.arange(4096)
    u = torch.stack([uniforms(9, epoch, index, 0, 6) for epoch in range(6)]).double()
    assert stats.kstest(u.flatten().numpy(), "uniform").pvalue > 1e-3
    for along in range(3):
        one, other = u.narrow(along, 0, u.shape[along] - 1), u.narrow(along, 1, u.shape[along] - 1)
        correlation = np.corrcoef(one.flatten().numpy(), other.flatten().numpy())[0, 1]
        assert abs(correlation) < 5 / np.sqrt(one.numel())
        # Pairs fill the unit square evenly.
        counts = np.histogram2d(one.flatten().numpy(), other.flatten().numpy(), bins=16)[0]
        assert stats.chisquare(counts.ravel()).pvalue > 1e-3


def test_golden_numbers():
    # A resumed run must draw what the run it continues would have drawn.
    assert uniforms(0, 0, torch.tensor([0, 1]), 0, 3).tolist() == [
        [0.3461821675300598, 0.9434872269630432, 0.6908223628997803],
        [0.5136789083480835, 0.5569107532501221, 0.41654032468795776],
    ]
    assert permutation(0, 0, 8).tolist() == [1, 4, 0, 3, 2, 5, 6, 7]


@pytest.mark.parametrize("n", [0, 1, 2, 1000])
def test_an_order_holds_every_sample_once(n: int):
    order = permutation(3, 1, n)
    assert order.dtype == torch.int64
    assert torch.equal(order.sort().values, torch.arange(n))


def test_orders_differ_between_epochs_and_seeds():
    orders = [permutation(seed, epoch, 500).tolist() for seed in range(3) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 9
    assert permutation(1, 2, 500).tolist() == permutation(1, 2, 500).tolist()


def test_every_place_in_the_order_is_equally_likely():
    places = torch.stack([permutation(0, epoch, 6) for epoch in range(6000)])
    counts = torch.stack([(places == sample).sum(dim=0) for sample in range(6)])
    assert stats.chisquare(counts.numpy().ravel()).pvalue > 1e-3
