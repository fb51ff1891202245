"""The work of ``siammm cluster``: fit a mixture to a table of embeddings, look for groups, describe every sample."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning

from siammm.cluster.shards import labelled_rows, outlier_scores, refused_together
from siammm.core import ranks
from siammm.core.errors import InputError, ZeroRowWarning
from siammm.core.progress import Bar
from siammm.core.text import counted
from siammm.data.embedding_table import EmbeddingTable
from siammm.metrics.clustering import ClusteringScores, clustering_scores
from siammm.mixture.estimator import GaussianMixture, VonMisesFisherMixture
from siammm.mixture.group_rule import Groups, of_these_components
from siammm.mixture.groups import check_number
from siammm.mixture.numbering import number_by_size
from siammm.mixture.seeding import default_n_components
from siammm.mixture.shard import Shard
from siammm.settings.commands import ClusterConfig

# Where clusters must be finer than groups: so many for each, of at least so many samples on average.
_PARTS, _SAMPLES_PER_PART = 8, 20
_LEAST_IMAGES = 2
# Rows, as many as a pass takes at a time.
_DESCRIBED_AT_ONCE = 2**21


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """Everything that was found, before it is written or shown: of this rank's rows, unless it says otherwise."""

    table: EmbeddingTable
    mixture: Any
    clusters: np.ndarray
    probability: np.ndarray
    outlier_score: np.ndarray
    groups: Groups
    group_labels: np.ndarray
    group_probability: np.ndarray
    n_start: int
    n_merged: int | None
    """The clusters that merging ended with, where these were fewer than the groups and were replaced by finer ones."""
    sizes: np.ndarray
    """How many of all ranks' rows each cluster has."""
    group_sizes: np.ndarray
    """How many of all ranks' rows each group has."""
    labelled: tuple[np.ndarray, np.ndarray, np.ndarray] | None
    """The labels, clusters and groups of all ranks' rows, in any order; None without labels."""
    scores: ClusteringScores | None
    """Of all ranks' rows; only the rank that writes has them."""
    group_scores: ClusteringScores | None
    seconds: dict[str, float]


def find_clusters(table: EmbeddingTable, config: ClusterConfig, seconds: dict[str, float]) -> Found:
    """Fit the mixture and describe every sample; ``seconds`` is told how long each step took."""
    X, n_total = table.embeddings, table.n_samples
    with refused_together():
        mixture = _mixture(config, n_total, X.shape[1])
        _check_n_groups(config, n_total)
    with timed(seconds, "fit"):
        _fit(mixture, table)
    groups, n_merged, n_start = Groups.none(int(mixture.n_components_)), None, mixture.n_components
    looks = config.merge == "auto" or config.n_groups is not None  # a number of clusters is not questioned
    if looks:
        with timed(seconds, "group"):
            with _told("looking for groups"):
                groups = mixture.groups(X, n_groups=config.n_groups, together=True)
            has_clusters = groups.n_groups if config.n_groups is None else len(np.unique(groups.label_K))
            if config.merge != "none" and groups.n_groups > min(mixture.n_components_, has_clusters):
                # Clusters that overlap were merged across groups: take finer ones, so that each is in one group.
                n_merged, n = int(mixture.n_components_), max(groups.n_groups, n_total // _SAMPLES_PER_PART)
                finer = {"merge": None, "init": "k-means++", "n_components": min(_PARTS * groups.n_groups, n)}
                mixture = mixture.set_params(**finer)
                _fit(mixture, table)
    k = int(mixture.n_components_)
    sizes = Shard.of(len(X), together=True).summed(np.bincount(mixture.labels_, minlength=k))
    if n_merged is not None or not isinstance(
        config.init, Path
    ):  # clusters that went on from others keep their numbers
        sizes = sizes[number_by_size(mixture, sizes)]
    clusters = np.ascontiguousarray(mixture.labels_)
    # A few more passes over the samples, with the fitted components.
    with timed(seconds, "describe"), _told("describing every sample"):
        if looks:
            keeps_all = config.n_groups is not None
            groups = of_these_components(groups, X, clusters, k, together=True, keeps_all=keeps_all)
        mixture.groups_ = groups  # to be saved with it
        with refused_together():
            probability, log_density = _described(mixture, X, clusters)
            group_labels, group_probability = groups.assign(X, clusters, probability)
        of_groups = np.bincount(group_labels, minlength=groups.n_groups)
        group_sizes = Shard.of(len(X), together=True).summed(of_groups)
        unusual = outlier_scores(log_density)
    labelled, scores, group_scores = None, None, None
    if table.labels is not None:
        with timed(seconds, "score"):
            labels, *found = labelled_rows(table.labels, clusters, group_labels)
            labelled = (labels, found[0], found[1])
            with refused_together():
                if ranks.is_writer():
                    scores = clustering_scores(labels, found[0])
                    group_scores = clustering_scores(labels, found[1]) if groups.is_found else None
    return Found(
        table=table,
        mixture=mixture,
        clusters=clusters,
        probability=probability,
        outlier_score=unusual,
        groups=groups,
        group_labels=group_labels,
        group_probability=group_probability,
        n_merged=n_merged,
        n_start=n_start,
        sizes=sizes,
        group_sizes=group_sizes,
        labelled=labelled,
        scores=scores,
        group_scores=group_scores,
        seconds={step: round(value, 3) for step, value in seconds.items()},
    )


def _described(mixture: Any, X: np.ndarray, clusters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The share of its cluster in each row, and its log density; many rows at a time, for each has several shares."""
    probability, log_density = [], []
    for start in range(0, max(1, len(X)), _DESCRIBED_AT_ONCE):
        part, cluster = (values[start : start + _DESCRIBED_AT_ONCE] for values in (X, clusters))
        share = mixture.predict_proba(part)[np.arange(len(part)), cluster] if len(part) else []  # a rank without rows
        probability.append(np.asarray(share, dtype=np.float32).ravel())
        log_density.append(np.asarray(mixture.score_samples(part)))
    return np.concatenate(probability), np.concatenate(log_density)


def _fit(mixture: Any, table: EmbeddingTable) -> None:
    """Fit, and report failures in terms of the command's flags and of the whole table."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # ``show`` says it in a sentence
            # The estimator accepts rows of zeros; in a file of embeddings they are a mistake.
            warnings.simplefilter("error", ZeroRowWarning)
            mixture.fit(table.embeddings)
    except ZeroRowWarning as error:
        text = str(error).replace("use GaussianMixture", "use --family gaussian")
        raise InputError(_of_the_table(text, table)) from error
    except InputError as error:
        raise InputError(_of_the_table(str(error), table)) from error
    except torch.OutOfMemoryError as error:
        raise InputError("The GPU does not have enough memory; use fewer components or --device cpu.") from error


def _of_the_table(text: str, table: EmbeddingTable) -> str:
    """What is wrong, with the number of a row in the whole table, and with flags in place of parameters."""
    return in_flags(re.sub(r"\b([Rr]ow) (\d+)", lambda match: f"{match[1]} {int(match[2]) + table.first_row}", text))


def in_flags(text: str) -> str:
    """A sentence of the estimator with the flags of this command in place of its parameters."""
    names = "|".join(name for name in VonMisesFisherMixture().get_params() | GaussianMixture().get_params())
    flag = re.sub(rf"\b({names})(?=(=| is | or |, |\.$))", lambda match: "--" + match[1].replace("_", "-"), text)
    return re.sub(r"(--[a-z-]+)=", r"\1 ", flag).replace("n_samples=", "the number of rows, ")


def check_before_encoding(config: ClusterConfig, n_images: int) -> None:
    """Refuse what can be refused before an encoder is opened and the images are encoded."""
    if n_images < _LEAST_IMAGES:
        raise InputError(
            f"{config.data} holds {counted(n_images, 'image')}, but clusters need {_LEAST_IMAGES} or more; give a "
            "folder with more images."
        )
    mixture = _mixture(config, n_images, None)
    try:
        mixture.check_parameters()
    except InputError as error:
        raise InputError(in_flags(str(error))) from error
    _check_n_groups(config, n_images)
    if mixture.n_components > n_images and not isinstance(config.init, Path):
        raise InputError(
            f"--n-components is {mixture.n_components:,}, but {config.data} holds {n_images:,} images; use at most "
            "as many as there are images."
        )


def _check_n_groups(config: ClusterConfig, n_samples: int) -> None:
    """Refuse a number of groups that there cannot be."""
    if config.n_groups is None:
        return
    check_number(config.n_groups, n_samples, name="--n-groups")
    if config.merge == "none" and config.n_components is not None and config.n_components < config.n_groups:
        raise InputError(
            f"--n-groups is {config.n_groups:,}, but --merge none keeps {config.n_components:,} clusters; leave "
            "--merge out, or raise --n-components."
        )


def _mixture(config: ClusterConfig, n_samples: int, n_dimensions: int | None) -> Any:
    """The estimator that the settings describe; the number of columns may not be known yet."""
    vmf = config.family == "von-mises-fisher"
    if vmf and n_dimensions == 1:
        raise InputError("The embeddings have 1 column, but a direction needs at least 2; use --family gaussian.")
    kind: Any = VonMisesFisherMixture if vmf else GaussianMixture
    # The settings have the names of the estimator's parameters; a few have other values in a command.
    settings = {name: getattr(config, name) for name in kind().get_params() if hasattr(config, name)}
    settings["merge"] = None if config.merge == "none" else config.merge
    settings["progress"] = sys.stderr.isatty()
    if isinstance(config.init, Path):
        start = kind.load(config.init)
        if n_dimensions not in (None, start.n_features_in_):
            raise InputError(
                f"The mixture {config.init} has {start.n_features_in_} dimensions, but the embeddings have "
                f"{n_dimensions}; use a mixture of the same embeddings."
            )
        if config.n_components not in (None, start.n_components_):
            what = f"--n-components is {config.n_components}, but the mixture {config.init} has {start.n_components_}"
            raise InputError(f"{what}; leave out one of the two.")
        settings |= {"init": start, "n_components": start.n_components_}
    elif config.n_components is None:
        if config.merge == "none":
            raise InputError("With --merge none the number of clusters is needed; add --n-components.")
        settings["n_components"] = default_n_components(n_samples)
    return kind(**settings)


def spread_of_components(mixture: Any) -> np.ndarray:
    """One number per component: its concentration, or its variance averaged over dimensions."""
    if hasattr(mixture, "concentrations_"):
        return np.asarray(mixture.concentrations_, dtype=float)
    variances = np.asarray(mixture.variances_, dtype=float)
    return variances if variances.ndim == 1 else variances.mean(axis=1)


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Say on a terminal what is being done."""
    with Bar(enabled=sys.stderr.isatty() and ranks.is_writer()) as bar:
        bar.show(what)
        yield


@contextlib.contextmanager
def timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    """Note how long a step took."""
    start = time.perf_counter()
    yield
    seconds[step] = time.perf_counter() - start
