"""The accelerated twin of the update, where no GPU is needed to see it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from siammm.learn.cuda import update
from siammm.learn.cuda.update import _without_advice
from tests.learn.small_runs import STEPS, check_same_run, prepared, run_through, small_config


@pytest.mark.parametrize(
    "advice",
    [
        "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled. Consider ...",
        "The AccumulateGrad node's stream does not match the stream of the node that produced the incoming gradient.",
    ],
)
def test_torchs_advice_is_kept_from_the_user(advice: str) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with _without_advice():
            warnings.warn(advice, UserWarning, stacklevel=1)
            warnings.warn("something else", UserWarning, stacklevel=1)
        warnings.warn(advice, UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in seen] == ["something else", advice]


def test_the_first_update_of_each_kind_is_kept_quiet_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet: list[int] = []

    @contextmanager
    def counted() -> Iterator[None]:
        quiet.append(training.step_in_epoch + training.epoch * STEPS)
        yield

    monkeypatch.setattr(update, "_without_advice", counted)
    training = prepared(small_config(epochs=4, cluster_after=0.5, fused=True))
    run_through(training)
    assert quiet == [0, 2 * STEPS], "without clusters, and with them"


def test_a_cpu_runs_the_plain_update_unless_asked_otherwise() -> None:
    assert prepared(small_config()).accelerated is None
    for settings in ({"fused": True}, {"compile": True}):
        assert prepared(small_config(**settings)).accelerated is not None


SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "lars in parts": {"optimiser": "lars", "accumulate": 2},
    "muon with a queue": {"optimiser": "muon", "instance_loss": "contrastive", "queue_size": 12},
    "drawn negatives": {"cluster_loss": "nce-centroids", "n_negatives": 4},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_twin_without_its_devices_is_the_plain_update(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither fused nor compiled nor captured, the twin changes no bit: it wraps the update and replaces pieces."""
    config = small_config(**SETTINGS[name])
    plain = run_through(prepared(config))
    monkeypatch.setattr(update, "available_for", lambda config, device: True)
    twin = run_through(prepared(config))
    assert plain.accelerated is None
    assert twin.accelerated is not None
    check_same_run(twin, plain)
