"""Changes of the step that benchmarks try compute what the step computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks import flat_update, step_variants

from tests.learn.small_runs import check_same_bits, everything, prepared, run_through, small_config

pytestmark = pytest.mark.usefixtures("one_thread")


# One update of all images, without the clusters that a rounding may move.
UPDATES: dict[str, Any] = {"epochs": 1, "batch_size": 32, "warmup_epochs": 0, "cluster_loss": "none", "fused": False}


def trained(names: list[str], **settings: Any) -> dict[str, torch.Tensor]:
    # One step is compared: after it two roundings drift apart.
    settings = {"epochs": 1, "batch_size": 32, "learning_rate": 0.1, "optimiser": "lars"} | settings
    training = prepared(small_config(**(settings | step_variants.settings(names))))
    step_variants.apply(training, names)
    return everything(run_through(training))


def check_close(names: list[str]) -> None:
    found, expected = trained(names), trained(["not-fused"])
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value.is_floating_point() and "clustering" not in name:
            torch.testing.assert_close(
                found[name], value, atol=1e-4, rtol=1e-3, msg=lambda text, n=name: f"{n}: {text}"
            )


def test_both_views_in_one_batch_are_as_each_by_itself() -> None:
    check_close(["paired"])


def test_the_momentum_encoder_follows_by_one_operation_as_by_three() -> None:
    check_close(["lerp", "not-fused"])


def test_a_stem_with_channels_of_zeros_is_as_without() -> None:
    check_close(["pad-stem", "not-fused"])


def test_an_update_on_one_flat_buffer_is_as_on_each_parameter() -> None:
    found, expected = (
        prepared(small_config(**(UPDATES | {"optimiser": "lars", "learning_rate": 0.5}))) for _ in range(2)
    )
    flat_update.flatten(found, compiled=False)
    found, expected = everything(run_through(found)), everything(run_through(expected))
    for name, value in expected.items():
        if name.startswith(("network", "optimiser")) and value.is_floating_point():
            torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-4, msg=name)


def test_a_flat_update_that_is_called_off_changes_nothing() -> None:
    training = prepared(small_config(**(UPDATES | {"optimiser": "lars"})))
    flat = flat_update.flatten(training, compiled=False)
    before = [buffer.clone() for buffer in (flat.p_BX, flat.b_BX, flat.q_BX)]
    flat.g_BX.fill_(float("nan"))
    training.optimiser.found_inf = torch.ones(())  # pyright: ignore[reportAttributeAccessIssue]
    flat(torch.tensor(0.5, dtype=torch.float64))
    for old, new in zip(before, (flat.p_BX, flat.b_BX, flat.q_BX), strict=True):
        assert torch.equal(old, new)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize(
    "names",
    [["compile-update", "not-fused"], ["flat-update", "not-fused"], ["compile-loss", "not-fused"]],
    ids=lambda n: n[0],
)
def test_what_is_compiled_computes_the_same(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from siammm.learn import step

    monkeypatch.setattr(step, "batch_loss", step.batch_loss)  # put back what the variant replaces
    check_close(names)


def test_a_variant_that_changes_nothing_changes_no_bit() -> None:
    check_same_bits(trained(["cudnn-benchmark", "not-fused"]), trained(["not-fused"]))


def test_a_variant_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="no variant"):
        step_variants.apply(prepared(small_config()), ["faster"])
