"""What a step does beside its update, where no GPU is needed to see it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from siammm.learn import step
from siammm.learn.step import _without_advice
from tests.learn.small_runs import STEPS, prepared, run_through, small_config


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

    monkeypatch.setattr(step, "_without_advice", counted)
    training = prepared(small_config(epochs=4, cluster_after=0.5))
    run_through(training)
    assert quiet == [0, 2 * STEPS], "without clusters, and with them"
