"""What a step does beside its update, where no GPU is needed to see it."""

from __future__ import annotations

import warnings

import pytest

from siammm.learn.step import _without_advice


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
