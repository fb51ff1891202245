"""The settings of every command: a field, its flag and its key in a saved run are the same word.

The text under a field is its help on the command line. Importing this is light, so that ``--help`` answers at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Cluster scikit-learn's handwritten digits without their labels, and show what was found. Takes seconds."""

    random_state: int = 0
    """Seed of everything random; the same seed finds the same clusters."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Find the clusters in a table of embeddings, and how many there are.

    Writes a folder with the cluster of every row (assignments.parquet), the model
    (mixture.safetensors) and summary.json.
    """

    embeddings: Positional[Path]
    """The table: a .npy, .npz, .parquet or .safetensors file, one row a sample."""

    output: Path | None = None
    """The folder to write; by default <name of the table>-clusters, here."""

    overwrite: bool = False
    """Replace an earlier result in the output folder, once the new one is complete."""

    key: str | None = None
    """The array or column with the embeddings; by default embeddings, features, vector or X, or the only candidate."""

    id_column: str | None = None
    """The array or column of ids, which are carried through; by default id, path or filename; "" reads none."""

    label_column: str | None = None
    """The array or column of labels, used only to score; by default label, y, target or class; "" reads none."""

    family: Literal["von-mises-fisher", "gaussian"] = "von-mises-fisher"
    """The kind of component: von-mises-fisher looks at directions alone, gaussian also at lengths."""

    n_components: int | None = None
    """Components to start from; by default 8 % of the rows, bounded. Without merging, the number of clusters."""

    n_neighbours: int = 5
    """Components that a sample may belong to in part, its nearest ones; 1 assigns every sample to one."""

    temperature: float = 0.02
    """How sharply a sample prefers the nearest of them; smaller is sharper."""

    assignment: Literal["nearest", "posterior"] = "nearest"
    """Weigh components by similarity and temperature, as the paper does, or by density, as textbook EM does."""

    size_weighting: bool = False
    """Prefer large components to small ones at the same distance."""

    merge: Literal["auto", "paper", "none"] = "auto"
    """Merge components: auto stops by itself and so finds their number, paper goes on to the floor, none keeps all."""

    merge_threshold: float = -1.2
    """With merge paper: how far below the mean, in deviations, the distance of a pair must be."""

    merge_floor: int = 1
    """Never merge to fewer components than this."""

    merge_share: float = 0.1
    """At most this share of the components disappears in one round of merging."""

    concentration: Literal["per-component", "closed-form", "shared"] | float = "per-component"
    """Von Mises-Fisher: a concentration for each component, the paper's formula for it, one for all, or this number."""

    concentration_dims: int | None = None
    """Von Mises-Fisher: measure concentrations in this many principal directions; by default in all dimensions."""

    small_sample_correction: bool | None = None
    """Von Mises-Fisher: remove the bias of components with few samples; by default unless assignment is posterior."""

    concentration_shrinkage: float | None = None
    """Von Mises-Fisher: samples of average spread added to every component; by default 1, or 0 with posterior."""

    covariance: Literal["spherical", "diag"] = "spherical"
    """Gaussian: one variance for each component, or one for each of its dimensions."""

    init: Literal["k-means++", "random"] | Path = "k-means++"
    """Where components start: spread out, at random samples, or from the mixture of an earlier result."""

    n_init: int = 1
    """Starts to try; the best is kept."""

    max_iter: int = 100
    """The most EM steps after merging."""

    tol: float = 1e-4
    """Stop when the mean log likelihood of a sample moves by less."""

    device: str = "auto"
    """Where to compute: auto, cpu, cuda, cuda:1, mps."""

    backend: Literal["auto", "torch", "low-precision", "triton"] = "auto"
    """How nearest components are searched; all give the same answer."""

    random_state: int = 0
    """Seed of everything random; the same seed finds the same clusters."""


def default_n_components(n_samples: int) -> int:
    """Components to start merging from when nobody said: more than there are clusters, but not many times more.

    The paper starts from 8 % of its samples. A table of a million does not need 80,000 to find a few hundred clusters,
    and pays for every one, so the start is bounded: by 1,000, or by 4 sqrt(n_samples) where that is more (4,500 at
    ImageNet's size), because larger tables tend to hold more clusters.
    """
    start = min(0.08 * n_samples, max(1000.0, 4 * math.sqrt(n_samples)))
    return min(n_samples, max(2, round(start)))
