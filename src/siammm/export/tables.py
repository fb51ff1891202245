"""What a finished run gives as tables: its images as it clustered them, and its clusters.

Legend:  N images, K clusters, P pairs of cluster and label.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from siammm.mixture.estimator import VonMisesFisherMixture
from siammm.runs.image_table import ImageTable, vectors
from siammm.runs.run import Run


def run_table(run: Run) -> ImageTable:
    """What a run of ``siammm cluster`` knows of its images or rows, with their embeddings of unit length."""
    stored = run.assignments
    kept = {name: stored.column(name).combine_chunks() for name in stored.column_names}
    others = {name: column for name, column in kept.items() if name not in ("id", "embedding")}
    columns = {"id": pa.array(run.ids, pa.string())} | others
    return ImageTable(rows=run.embeddings, columns=columns)


def clusters_table(mixture: VonMisesFisherMixture, table: ImageTable) -> pa.Table:
    """One row per cluster: how many of the images it has, its parameters, and what its images are mostly labelled.

    If the mixture knows groups, also the group that most images of each cluster were in when they were found.
    """
    k = len(mixture.weights_)
    cluster_N = table.columns["cluster"].to_numpy()
    columns: dict[str, Any] = {
        "cluster": pa.array(np.arange(k), pa.int32()),
        **({} if mixture.groups_ is None else {"group": pa.array(mixture.groups_.label_K, pa.int32())}),
        "size": pa.array(np.bincount(cluster_N, minlength=k), pa.int64()),
        "weight": pa.array(np.asarray(mixture.weights_, dtype=np.float64)),
        "concentration": pa.array(np.asarray(mixture.concentrations_, dtype=np.float64)),
        "mean_direction": vectors(np.asarray(mixture.mean_directions_)),
    }
    if "label" in table.columns:
        columns["majority_label"], columns["purity"] = _majorities(cluster_N, table.columns["label"], k)
    return pa.table(columns)


def _majorities(cluster_N: np.ndarray, label_N: pa.Array, k: int) -> tuple[pa.Array, pa.Array]:
    """The commonest label of each cluster, the first of equals, and its share; null for a cluster without images."""
    encoded = label_N.dictionary_encode()
    names, code_N = encoded.dictionary, encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    cluster_N, code_N = cluster_N[code_N >= 0], code_N[code_N >= 0]
    # One number for each pair of cluster and label that occurs: all pairs may be too many.
    pair_P, count_P = np.unique(cluster_N.astype(np.int64) * len(names) + code_N, return_counts=True)
    best: dict[int, tuple[int, int]] = {}
    total_K = np.bincount(cluster_N, minlength=k)
    for pair, count in zip(pair_P.tolist(), count_P.tolist(), strict=True):
        cluster, code = divmod(pair, len(names))
        if cluster not in best or count > best[cluster][0]:
            best[cluster] = (count, code)
    chosen = pa.array([best[c][1] if c in best else None for c in range(k)], pa.int64())
    shares = [best[c][0] / int(total_K[c]) if c in best else None for c in range(k)]
    return names.take(chosen), pa.array(shares, pa.float64())
