"""The clusters of a run in their file, and the check that they are of the same run as its other files."""

from __future__ import annotations

from pathlib import Path

from siammm.core.errors import InputError
from siammm.mixture.estimator import VonMisesFisherMixture
from siammm.runs import files
from siammm.runs.summary import Summary


def load_trained(path: Path, given: str, n_dimensions: int) -> VonMisesFisherMixture:
    """The clusters of a training, whose embeddings have ``n_dimensions``; ``given`` is the run's name."""
    mixture = VonMisesFisherMixture.load(path)
    _check_dimensions(mixture, given, n_dimensions)
    return mixture


def load_clustered(path: Path, given: str, clustering: Summary) -> VonMisesFisherMixture:
    """The clusters of ``siammm cluster``, which are of the kind and the number that its summary names."""
    if clustering.family != "von-mises-fisher":
        raise InputError(
            f"The clusters of {given} are of --family {clustering.family}, and this needs von Mises-Fisher clusters; "
            "cluster again with --family von-mises-fisher."
        )
    mixture = VonMisesFisherMixture.load(path)
    _check_dimensions(mixture, given, clustering.n_dimensions)
    if mixture.n_components_ != clustering.n_clusters:
        raise InputError(
            f"There are {mixture.n_components_} clusters in {given}, but {files.SUMMARY} has {clustering.n_clusters}; "
            "the files belong to different runs: copy the whole folder again."
        )
    return mixture


def _check_dimensions(mixture: VonMisesFisherMixture, given: str, expected: int) -> None:
    if mixture.n_features_in_ != expected:
        raise InputError(
            f"The clusters in {given} have {mixture.n_features_in_} dimensions, but its embeddings have {expected}; "
            "the files belong to different runs: copy the whole folder again."
        )
