"""``SiamMM``: images in, an encoder and clusters out, with scikit-learn's interface."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self, cast

import numpy as np
from huggingface_hub import ModelHubMixin
from sklearn.base import BaseEstimator, ClusterMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from siammm.core import processes
from siammm.core.errors import InputError, StoredFileError
from siammm.core.files import unwritable
from siammm.data.loader import open_loader
from siammm.data.sources import Source, open_source
from siammm.data.view_settings import ViewSettings
from siammm.export import encoder, hub
from siammm.learn.encode import Output, encode
from siammm.learn.loop import Training
from siammm.learn.networks import SiameseNetwork
from siammm.learn.observers import Silent
from siammm.learn.progress import TrainingProgress
from siammm.learn.start import NO_WEIGHTS
from siammm.mixture.estimator import VonMisesFisherMixture
from siammm.mixture.group_rule import Groups
from siammm.runs import files
from siammm.runs.network_file import save_network
from siammm.runs.run import Run
from siammm.runs.starting_weights import PRESET, open_start, settings_of
from siammm.runs.writer import run_lock
from siammm.settings.checks import check_settings
from siammm.settings.fields import value_of, with_settings
from siammm.settings.methods import differing_settings
from siammm.settings.presets import PRESETS
from siammm.settings.training import PresetName, TrainConfig

Images = Any
"""An array of uint8 images (N, H, W, 3), a path, or a source: whatever ``siammm train`` takes."""

# Settings of training that are parameters of the estimator.
_DIRECT = ("epochs", "batch_size", "backbone", "weights", "image_size", "n_components", "merge")


class SiamMM(ClusterMixin, TransformerMixin, BaseEstimator, ModelHubMixin):
    """Learn an encoder and the clusters of images, and how many there are, without labels.

    Parameters
    ----------
    preset : {"auto", "cifar", "cifar-fast", "tiny", "photos", "laptop", "demo", "imagenet-100", "imagenet-200"},
            default="auto"
        The settings to start from; "auto" chooses by the size of the images, or "photos" if ``weights`` are given.
    epochs, batch_size, backbone, image_size, n_components : optional
        As in ``siammm train``; None is the preset's.
    weights : str or None, default=None
        Weights that the backbone starts from, as in ``siammm train``: "lite", "timm:MODEL", a run; "none" for random
        ones. None is the preset's. Unless they are given, ``backbone`` and, for a run, ``image_size`` are theirs.
    merge : {"auto", "paper", "none"} or None, default=None
        How clusters merge; None is the preset's.
    settings : mapping, optional
        Any other setting of ``siammm train`` by its name, such as ``{"instance_loss": "contrastive"}``.
    device : str, default="auto"
        Where to compute.
    random_state : int, default=0
        Seed of everything random.
    progress : bool, default=False
        Show progress on standard error.

    Attributes
    ----------
    n_clusters_ : int
        How many clusters were found.
    labels_ : array of shape (n_images,)
        The cluster of every image that ``fit`` was given; -1 for those that could not be read.
    n_groups_ : int
        How many kinds of images there are: groups of clusters, or the clusters if no other groups were found.
    group_labels_ : array of shape (n_images,)
        The group of every image that ``fit`` was given; -1 for those that could not be read.
    groups_ : Groups
        The groups: ``groups_.is_found`` says whether they are others than the clusters.
    mixture_ : VonMisesFisherMixture
        The clusters, in the space of the embeddings.
    network_ : SiameseNetwork
        The trained networks.
    metrics_ : list of dict
        What was measured in each epoch.

    Examples
    --------
    >>> from siammm import SiamMM
    >>> model = SiamMM(preset="demo", epochs=1).fit("digits")
    >>> model.transform("digits").shape
    (1797, 256)
    """

    n_clusters_: int
    labels_: np.ndarray
    n_groups_: int
    group_labels_: np.ndarray
    groups_: Groups
    mixture_: VonMisesFisherMixture
    network_: SiameseNetwork
    metrics_: list[dict[str, Any]]
    config_: TrainConfig

    def __init__(
        self,
        *,
        preset: PresetName | Literal["auto"] = "auto",
        epochs: int | None = None,
        batch_size: int | None = None,
        backbone: str | None = None,
        weights: str | None = None,
        image_size: int | None = None,
        n_components: int | None = None,
        merge: Literal["auto", "paper", "none"] | None = None,
        settings: Mapping[str, Any] | None = None,
        device: str = "auto",
        random_state: int = 0,
        progress: bool = False,
    ) -> None:
        self.preset, self.epochs, self.batch_size, self.backbone = preset, epochs, batch_size, backbone
        self.weights, self.settings = weights, settings
        self.image_size, self.n_components, self.merge = image_size, n_components, merge
        self.device, self.random_state, self.progress = device, random_state, progress

    def fit(self, X: Images, y: object = None) -> Self:
        """Train on images; labels are ignored.

        Parameters
        ----------
        X : array of uint8 of shape (n_images, height, width, 3), path, or source
        y : ignored
        """
        source = open_source(X)
        config = self._config(source)
        if config.objective.cluster_loss == "none":
            raise InputError("cluster_loss is none, but SiamMM finds clusters; use siammm train for the encoder alone.")
        check_settings(config)
        with contextlib.ExitStack() as stack:
            device = stack.enter_context(processes.setup(self.device)).device
            start = open_start(config, source)
            listener = stack.enter_context(TrainingProgress()) if self.progress else Silent()
            training = Training(config, source, device, listener=listener, start=start)
            stack.callback(training.close)
            trained = training.run()
        assert trained.mixture is not None
        assert trained.clusters is not None
        self.config_, self.network_, self.mixture_ = config, trained.network.eval(), trained.mixture
        self.metrics_, self._view = trained.metrics, trained.clean_view
        self._know_groups()
        read_N = training.loader.sample_N.numpy()
        self.labels_, self.group_labels_ = (np.full(len(source), -1, dtype=np.int64) for _ in range(2))
        self.labels_[read_N], self.group_labels_[read_N] = trained.clusters, trained.group_labels
        return self

    def transform(self, X: Images) -> np.ndarray:
        """The backbone's features, of unit length, shape (n_images, n_features): for whatever comes next."""
        return self._encoded(X, "features")

    def embed(self, X: Images) -> np.ndarray:
        """The embeddings that are clustered, of unit length, shape (n_images, embedding_dim)."""
        return self._encoded(X, "embeddings")

    def predict(self, X: Images) -> np.ndarray:
        """The cluster of every image."""
        embeddings = self.embed(X)
        return self.mixture_.predict(embeddings)

    def predict_proba(self, X: Images) -> Any:
        """The soft assignment of each image to the clusters, a sparse matrix as in ``VonMisesFisherMixture``."""
        embeddings = self.embed(X)
        return self.mixture_.predict_proba(embeddings)

    def predict_group(self, X: Images) -> np.ndarray:
        """The group of every image; its cluster, if no groups were found."""
        self._check_groups()
        return self.mixture_.predict_group(self.embed(X))

    def predict_group_proba(self, X: Images) -> np.ndarray:
        """The probability of each group for every image, shape (n_images, n_groups_); rows sum to 1."""
        self._check_groups()
        return self.mixture_.predict_group_proba(self.embed(X))

    def score_samples(self, X: Images) -> np.ndarray:
        """The log density of every image under the mixture; low is unusual."""
        embeddings = self.embed(X)
        return self.mixture_.score_samples(embeddings)

    def save(self, path: str | Path) -> None:
        """Write the networks, and the mixture with its groups, into a folder; ``load`` and ``siammm`` read it."""
        check_is_fitted(self, "mixture_")
        folder = Path(path)
        try:
            with run_lock(folder, remedy="choose another path"):
                save_network(folder / files.ENCODER, self.network_, self.config_, self._view)
                self.mixture_.save(folder / files.MIXTURE)
        except OSError as error:
            raise unwritable(folder, error, "choose another path") from error

    @classmethod
    def load(cls, path: str | Path, *, device: str = "auto") -> Self:
        """Read what ``save``, ``save_pretrained``, ``siammm train`` or ``siammm export`` wrote into a folder.

        From a run folder, ``labels_`` and ``group_labels_`` are those of ``assignments.parquet``: of the images that
        could be read. Without this table, or if it is damaged, the model has neither. What an earlier version wrote
        may be without groups; the model then has no ``n_groups_`` and ``groups_``.
        """
        with processes.setup(device) as context:
            run = Run.open(path, device=context.device)
            config = run.config
            given = {name: value_of(config, name) for name in (*_DIRECT, "preset", "random_state")}
            given |= {"image_size": run.view.size, "settings": differing_settings(config), "device": device}
            model = cls(**given)
            model.config_, model.mixture_, model.network_, model._view = config, run.mixture, run.network, run.view
            if run.has_assignments:
                with contextlib.suppress(StoredFileError):  # the model is whole without the table
                    model.labels_ = run.cluster_N
                    if run.looked_for_groups:
                        model.group_labels_ = run.group_N
        model.metrics_ = run.metrics
        model._know_groups()
        return model

    # -- the hub ------------------------------------------------------------------------------------------------------

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> str | None:
        """Write a folder that ``from_pretrained`` and ``timm.create_model`` read, with a model card.

        A card that was edited is kept. ``kwargs`` are those of huggingface_hub's ``ModelHubMixin``.
        """
        check_is_fitted(self, "mixture_")
        folder = Path(save_directory)
        encoder.refuse_run_folder(folder)  # the mixin removes config.json first
        try:
            return super().save_pretrained(folder, **kwargs)
        except OSError as error:
            raise unwritable(folder, error, "choose another path") from error

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, *, device: str = "auto", **kwargs: Any) -> Self:
        """Read what ``save_pretrained`` or ``siammm export`` wrote: a folder, or a repository of the hub (USER/NAME).

        ``device`` is where to compute; the other arguments are those of huggingface_hub's ``ModelHubMixin``:
        ``revision``, ``cache_dir``, ``force_download``, ``local_files_only`` and ``token``.
        """
        # Not by the mixin, which takes config.json for arguments; here that is timm's.
        return cls.load(hub.fetch(str(pretrained_model_name_or_path), **kwargs), device=device)

    def _save_pretrained(self, save_directory: Path) -> None:
        labels = getattr(self, "labels_", None)
        n_images = None if labels is None else len(labels)
        run = Run.of("this model", self.network_, self.config_, self._view, self.mixture_, n_images)
        encoder.write_encoder(save_directory, run, card=encoder.kept_card(save_directory))

    # -- parts --------------------------------------------------------------------------------------------------------

    _view: ViewSettings

    def _know_groups(self) -> None:
        """Set what the mixture knows of clusters and groups."""
        self.n_clusters_ = int(self.mixture_.n_components_)
        if self.mixture_.groups_ is not None:
            self.groups_, self.n_groups_ = self.mixture_.groups_, self.mixture_.groups_.n_groups

    def _check_groups(self) -> None:
        check_is_fitted(self, "mixture_")
        if self.mixture_.groups_ is None:
            raise InputError(
                "This model was saved without groups, by an earlier version; find them with "
                "model.mixture_.groups(model.embed(images)), or train again."
            )

    def _config(self, source: Source) -> TrainConfig:
        chosen = {name: getattr(self, name) for name in _DIRECT}
        settings = {name: value for name, value in chosen.items() if value is not None} | dict(self.settings or {})
        weights = str(settings.get("weights", NO_WEIGHTS))
        settings = settings_of(weights) | settings
        preset = self.preset
        if preset == "auto":
            preset = preset_for(source) if weights == NO_WEIGHTS else PRESET
        if preset not in PRESETS:
            raise InputError(f"preset is {preset!r}, but it must be one of auto, {', '.join(PRESETS)}.")
        settings |= {"data": source.name, "device": self.device, "random_state": self.random_state}
        return with_settings(PRESETS[cast(PresetName, preset)], **settings)

    def _encoded(self, X: Images, output: Output) -> np.ndarray:
        check_is_fitted(self, "mixture_")
        device = next(self.network_.parameters()).device
        # All images must be readable: a row that is missing would shift all others.
        loader = open_loader(open_source(X), (self._view, self._view), device, seed=0, limit=0.0)
        try:
            return encode(self.network_, loader, output).cpu().numpy()
        finally:
            loader.close()


def preset_for(source: Source) -> PresetName:
    """The preset that suits the size of a source's images."""
    shape = source.uniform_shape()
    side = 224 if shape is None else max(shape)
    return "demo" if side <= 16 else "cifar" if side <= 40 else "tiny"
