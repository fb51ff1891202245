"""The guard: its two measures have known values, and every collapse is named with a remedy."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from siammm.core.errors import SiamMMError
from siammm.learn import guard
from siammm.learn.guard import CollapseError, Health
from siammm.mixture.samples import Samples


def spread(rows: Tensor) -> tuple[float, float]:
    return guard.spread(Samples(rows, device=torch.device("cpu"), unit=False))


def directions(n: int, d: int) -> Tensor:
    return normalize(torch.randn(n, d, generator=torch.Generator().manual_seed(0)), dim=1)


@pytest.mark.parametrize("d", [2, 16, 256])
def test_directions_spread_evenly_have_a_deviation_of_1_and_every_rank(d: int) -> None:
    rank, deviation = spread(directions(20_000, d))
    assert deviation == pytest.approx(1, abs=0.01)
    assert rank == pytest.approx(d, rel=0.02)


@pytest.mark.parametrize("kept", [1, 3, 8])
def test_the_rank_counts_the_directions_in_which_embeddings_vary(kept: int) -> None:
    rows = torch.zeros(5000, 32)
    rows[:, :kept] = directions(5000, kept) if kept > 1 else torch.tensor([1.0, -1.0]).repeat(2500)[:, None]
    assert spread(rows)[0] == pytest.approx(kept, rel=0.02)


@pytest.mark.parametrize("row", [[1.0] + [0.0] * 15, [0.25] * 16, [0.0] * 16], ids=["axis", "diagonal", "zeros"])
def test_equal_rows_have_no_deviation(row: list[float]) -> None:
    rank, deviation = spread(torch.tensor(row).repeat(1000, 1))
    assert deviation < guard.LEAST_DEVIATION
    assert 0 <= rank <= 16


def test_the_measures_do_not_depend_on_the_order_of_rows_nor_on_the_axes() -> None:
    rows = directions(500, 8) * torch.linspace(0.1, 1, 8)
    turn = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))[0]
    for other in (rows.flip(0), rows @ turn):
        assert spread(other) == pytest.approx(spread(rows), rel=1e-4)


def test_a_golden_rank() -> None:
    """Eigenvalues of 3/4 and 1/4: exp of their entropy is 4 / 3^(3/4)."""
    covariance = torch.diag(torch.tensor([3.0, 1.0, 0.0], dtype=torch.float64))
    assert guard.effective_rank(covariance) == pytest.approx(4 / 3**0.75)
    assert guard.effective_rank(torch.eye(7, dtype=torch.float64)) == pytest.approx(7)
    assert guard.effective_rank(torch.zeros(3, 3, dtype=torch.float64)) == 0


def test_all_is_well() -> None:
    assert guard.diagnose(Health(effective_rank=20.0, deviation=0.7), 1000) is None
    assert guard.diagnose(Health(effective_rank=guard.LEAST_RANK, deviation=guard.LEAST_DEVIATION), 1000) is None


@pytest.mark.parametrize(
    ("rank", "deviation", "says"),
    [
        (20.0, 0.001, "all 1,000 images have nearly the same embedding"),
        (0.0, 0.0, "nearly the same embedding"),
        (1.2, 0.2, "along one line"),
        (math.nan, 0.9, "not finite"),
        (9.0, math.inf, "not finite"),
    ],
)
def test_what_is_wrong_is_named_with_a_remedy(rank: float, deviation: float, says: str) -> None:
    problem = guard.diagnose(Health(effective_rank=rank, deviation=deviation), 1000)
    assert problem is not None
    assert says in problem
    assert "--learning-rate" in problem
    assert problem.endswith(".")
    assert ". " not in problem  # one sentence


def test_two_images_are_always_on_one_line() -> None:
    health = Health(effective_rank=1.0, deviation=0.2)
    assert guard.diagnose(health, 2) is None
    assert guard.diagnose(health, 3) is not None


def test_only_what_was_measured_is_reported() -> None:
    assert Health(effective_rank=2.0, deviation=0.5).as_metrics() == {"effective_rank": 2.0, "deviation": 0.5}
    full = Health(effective_rank=2.0, deviation=0.5, occupied=3, least_concentration=1.0, largest_concentration=9.0)
    assert list(full.as_metrics()) == [
        "effective_rank", "deviation", "occupied", "least_concentration", "largest_concentration",
    ]  # fmt: skip


def test_a_collapse_is_something_the_user_can_do_something_about() -> None:
    assert issubclass(CollapseError, SiamMMError)


def test_two_groups_are_no_collapse() -> None:
    """Images of two kinds end at opposite directions, which is one line."""
    assert guard.diagnose(Health(effective_rank=1.05, deviation=0.99), 1000) is None
