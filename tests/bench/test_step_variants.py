"""Changes of the step that benchmarks try compute what the step computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks import step_variants

from siammm.learn.cuda import addresses, update
from tests.learn.small_runs import check_same_bits, everything, prepared, run_through, small_config

pytestmark = pytest.mark.usefixtures("one_thread")


def trained(names: list[str], **settings: Any) -> dict[str, torch.Tensor]:
    # One step is compared: after it two roundings drift apart.
    settings = {"epochs": 1, "batch_size": 32, "learning_rate": 0.1, "optimiser": "lars"} | settings
    training = prepared(small_config(**(settings | step_variants.settings(names))))
    step_variants.apply(training, names)
    return everything(run_through(training))


def check_close(names: list[str], **settings: Any) -> None:
    found, expected = trained(names, **settings), trained(["not-fused"], **settings)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value.is_floating_point() and "clustering" not in name:
            torch.testing.assert_close(
                found[name], value, atol=1e-4, rtol=1e-3, msg=lambda text, n=name: f"{n}: {text}"
            )


def test_both_views_in_one_batch_are_as_each_by_itself() -> None:
    check_close(["paired"])


def test_a_stem_with_channels_of_zeros_is_as_without() -> None:
    check_close(["pad-stem", "not-fused"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_loss_that_is_not_compiled_is_the_same() -> None:
    check_close(["plain-loss", "not-fused"], compile=True)


def test_variants_that_change_nothing_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "supports", addresses.supports)
    monkeypatch.setattr(update, "_convolutions_tried", update._convolutions_tried)
    names = ["untried-convolutions", "one-after-another", "grouped-updates", "not-fused"]
    check_same_bits(trained(names), trained(["not-fused"]))


def test_a_variant_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="no variant"):
        step_variants.apply(prepared(small_config()), ["faster"])
