"""Small configurations of SiamMM's peers."""

from __future__ import annotations

from typing import Any

from siammm.settings.fields import with_settings
from siammm.settings.methods import METHODS, with_method
from siammm.settings.training import MethodName, TrainConfig
from tests.learn.small_runs import SMALL

# What the presets leave open, or is too much for a few images.
SIZES: dict[str, dict[str, Any]] = {
    "swav": {"n_prototypes": 10, "queue_size": 12},
    "deepcluster-v2": {"n_components": 6, "more_components": (8,)},
    "pcl": {"n_components": 6, "more_components": (8,), "queue_size": 12, "cluster_after": 0.4},
    "propos": {"n_components": 4},
}
PEERS: list[MethodName] = [name for name in METHODS if name != "siammm"]


def small_method(name: MethodName, **settings: Any) -> TrainConfig:
    """The objective alone, on the small runs' network and optimiser."""
    left = {key: value for key, value in SMALL.items() if key not in {"n_components", *METHODS[name].objective}}
    config = with_method(with_settings(TrainConfig(), **left), name, recipe=False)
    return with_settings(config, **({"embedding_dim": 16, "hidden_dim": 32} | SIZES.get(name, {}) | settings))
