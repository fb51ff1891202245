"""The bank: every image's two embeddings, in shards that together hold all."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from siammm.core.errors import InputError
from siammm.learn.bank import Bank, shard

CPU = torch.device("cpu")


def views(n: int, d: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=generator), 5 * torch.randn(n, d, generator=generator)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("n", [0, 1, 7, 100])
def test_shards_cover_every_image_once_and_are_alike_in_size(n: int, world: int) -> None:
    bounds = [shard(n, rank, world) for rank in range(world)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == n
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
    sizes = [last - first for first, last in bounds]
    assert max(sizes) - min(sizes) <= 1


def test_the_bank_keeps_unit_rows() -> None:
    bank = Bank(10, 4, CPU)
    v_1, v_2 = views(10)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(1))
    for part in order.split(3):
        bank.update(part, v_1[part], v_2[part])
    torch.testing.assert_close(bank.view_2ND[0, :-1], normalize(v_1, dim=1))
    torch.testing.assert_close(bank.view_2ND[1, :-1], normalize(v_2, dim=1))
    expected = normalize(normalize(v_1, dim=1) + normalize(v_2, dim=1), dim=1)
    torch.testing.assert_close(bank.embeddings(), expected)


def test_only_the_images_of_a_batch_change() -> None:
    bank = Bank(6, 4, CPU)
    bank.update(torch.arange(6), *views(6))
    before = bank.view_2ND.clone()
    bank.update(torch.tensor([4, 1]), *views(2, seed=1))
    changed = (bank.view_2ND != before).any(dim=2)[:, :-1]
    assert changed.tolist() == [[False, True, False, False, True, False]] * 2


@pytest.mark.parametrize("world", [2, 3])
def test_the_shards_together_hold_what_one_bank_holds(world: int) -> None:
    whole = Bank(11, 4, CPU)
    parts = [Bank(11, 4, CPU, rank=rank, world_size=world) for rank in range(world)]
    for seed, batch in enumerate(torch.randperm(11, generator=torch.Generator().manual_seed(2)).split(4)):
        rows = views(len(batch), seed=seed)
        for bank in (whole, *parts):
            bank.update(batch, *rows)
    assert torch.equal(torch.cat([part.embeddings() for part in parts]), whole.embeddings())
    assert sum(part.n_rows for part in parts) == 11


def test_half_precision_is_kept_in_single() -> None:
    bank = Bank(3, 4, CPU)
    v_1, v_2 = views(3)
    bank.update(torch.arange(3), v_1.bfloat16(), v_2.bfloat16())
    assert bank.view_2ND.dtype == torch.float32
    lengths = bank.view_2ND[:, :-1].norm(dim=2)
    torch.testing.assert_close(lengths, torch.ones_like(lengths))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_none_are_refused(value: float) -> None:
    bank = Bank(3, 4, CPU)
    bank.update(torch.arange(3), *views(3))
    bank.check()
    bank.view_2ND[1, 2, 0] = value
    with pytest.raises(InputError, match="NaN or infinity; lower --learning-rate"):
        bank.check()


def test_opposite_views_have_no_direction() -> None:
    bank = Bank(1, 2, CPU)
    bank.update(torch.tensor([0]), torch.tensor([[1.0, 0.0]]), torch.tensor([[-1.0, 0.0]]))
    assert bank.embeddings().tolist() == [[0.0, 0.0]]
