"""The audit of labels on a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from siammm.audit import audit, plant_errors
from tests.audit.test_suspects import classes

pytestmark = pytest.mark.gpu


def test_the_gpu_says_what_the_cpu_says() -> None:
    X, y = classes()
    given = plant_errors(y, 0.1, seed=1)[0]
    found, again = (audit(X, given, device=device) for device in ("cpu", "cuda"))
    np.testing.assert_allclose(again.probability_N, found.probability_N, atol=1e-2)
