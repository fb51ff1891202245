"""Learn image representations without labels, and find the clusters in them and their number.

The packages are layers, and each imports only those before it: core; settings; mixture and data, which import core
alone; metrics, which imports core and mixture; learn; runs; evaluate, audit, report, export and bench, which do
not import each other; embedding, estimator, commands, cli. ``tests/test_layers.py`` holds the order.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from siammm.core.version import __version__

if TYPE_CHECKING:
    from siammm import audit, losses, metrics
    from siammm.embedding import embed
    from siammm.estimator import SiamMM
    from siammm.mixture.estimator import GaussianMixture, VonMisesFisherMixture

__all__ = ["GaussianMixture", "SiamMM", "VonMisesFisherMixture", "__version__", "audit", "embed", "losses", "metrics"]

# Names are imported when they are first used, so that `siammm --help` does not wait for torch.
_HOMES = {
    "GaussianMixture": "siammm.mixture.estimator",
    "SiamMM": "siammm.estimator",
    "VonMisesFisherMixture": "siammm.mixture.estimator",
    "embed": "siammm.embedding",
}


def __getattr__(name: str) -> object:
    if name in ("audit", "losses", "metrics"):
        return import_module(f"siammm.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'siammm' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
