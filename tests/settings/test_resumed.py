"""Which settings a resumed run keeps, and which it refuses."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from siammm.core.errors import InputError
from siammm.settings.fields import with_settings
from siammm.settings.stored import resumed
from siammm.settings.training import TrainConfig


def test_the_first_command_goes_on_after_settings_that_followed_from_a_change() -> None:
    stored = with_settings(TrainConfig(), epochs=400, cluster_after=0.125, n_components=50)
    first = with_settings(TrainConfig(), epochs=400)
    given = dataclasses.replace(first, resume=Path("run"), resume_if_exists=True)
    kept, _ = resumed(given, stored, was_changed=True)
    assert (kept.clustering.cluster_after, kept.clustering.n_components) == (0.125, 50)
    with pytest.raises(InputError, match="--cluster-after cannot be changed"):
        resumed(given, stored)
