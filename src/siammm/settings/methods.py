"""Other methods as settings of the same trainer, so that comparisons with SiamMM are like with like.

A method is an objective, which is all that changes in a comparison under one recipe, and a recipe, the optimisation of
its paper. ``siammm train --method NAME`` uses both, on top of the preset's network, images and number of epochs. Most
papers trained on ImageNet only, and their recipes go with the ``imagenet`` presets. Where a paper has one for small
images (SimSiam, ProPos), the small presets use it; otherwise they keep their own. Learning rates are per 256 images.

Losses here are sums over the two views, and the contrastive loss is multiplied by 2 tau. Where a paper scales them
differently, ``cluster_weight`` keeps the paper's ratio of the two, and a recipe for SGD divides the learning rate and
multiplies the weight decay by the same factor, so that an update is the paper's. LARS hardly depends on that scale.

Not included: the smaller additional crops of SwAV and DeepCluster v2 (both papers also report two crops only), separate
learning rates for the predictor (constant in SimSiam, tenfold in ProPos), a constant encoder momentum (PCL, ProPos on
small images), MoCo's shuffling of batches and its head without BatchNorm (PCL).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from siammm.settings.fields import setting_homes, value_of, with_settings
from siammm.settings.presets import PRESETS
from siammm.settings.training import MethodName, TrainConfig


@dataclass(frozen=True, kw_only=True)
class Method:
    """How a method differs from SiamMM."""

    paper: str
    objective: dict[str, Any] = field(default_factory=dict)
    """Losses, heads and clusters: what makes it this method."""
    large: dict[str, Any] = field(default_factory=dict)
    """Sizes in its objective for ImageNet, as in its paper."""
    small: dict[str, Any] = field(default_factory=dict)
    """Sizes in its objective for tens of thousands of images; numbers of clusters are in proportion to the images."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """The optimisation of its paper for ImageNet."""
    small_recipe: dict[str, Any] = field(default_factory=dict)
    """The optimisation of its paper for 32-pixel images; without one, the preset's own is used."""


# SwAV and DeepCluster v2 compare 128-dimensional embeddings with prototypes at a temperature of .1, without a predictor
# or a momentum encoder.
_PROTOTYPES: dict[str, Any] = {
    "instance_loss": "none", "embedding_dim": 128, "projector_layers": 2, "projector_norm": "none",
    "predictor_layers": 0, "momentum_encoder": False, "prototype_temperature": 0.1, "cluster_after": 0.0,
}  # fmt: skip
# What a preset tunes for SiamMM's own losses does not apply to other methods, nor do heads without layers.
_UNTUNED: dict[str, Any] = {
    "contrastive_temperature_end": None, "cluster_weight": 1.0, "projector_layers": 3, "predictor_layers": 2,
}  # fmt: skip
# k-means from scratch in each epoch, with hard assignment.
_K_MEANS: dict[str, Any] = {"n_neighbours": 1, "merge": "none", "centroids": "reinitialised"}

METHODS: dict[MethodName, Method] = {
    "siammm": Method(paper="the paper"),
    "byol": Method(
        paper="Grill et al., Bootstrap Your Own Latent, 2020; the recipe is that of 300 epochs",
        objective={"instance_loss": "cosine", "cluster_loss": "none", "projector_layers": 2, "projector_norm": "none"},
        recipe={"optimiser": "lars", "learning_rate": 0.3, "weight_decay": 1e-6, "encoder_momentum": 0.99},
    ),
    "simsiam": Method(
        paper="Chen and He, Exploring Simple Siamese Representation Learning, 2021",
        # The predictor's hidden layer is a bottleneck of a quarter of the embedding, whatever the preset's width.
        objective={
            "instance_loss": "simsiam", "cluster_loss": "none", "hidden_dim": 2048, "embedding_dim": 2048,
            "predictor_hidden_dim": 512,
        },
        small={"projector_layers": 2},
        # Rates of .05 and .03, decays of 1e-4 and 5e-4; the paper's loss is the mean over the views, half of ours.
        recipe={
            "optimiser": "sgd", "learning_rate": 0.05 / 2, "weight_decay": 1e-4 * 2, "batch_size": 512,
            "warmup_epochs": 0,
        },
        small_recipe={
            "optimiser": "sgd", "learning_rate": 0.03 / 2, "weight_decay": 5e-4 * 2, "batch_size": 512,
            "warmup_epochs": 0,
        },
    ),
    "moco-v3": Method(
        paper="Chen, Xie and He, An Empirical Study of Training Self-Supervised Vision Transformers, 2021: its ResNet",
        objective={
            "instance_loss": "contrastive", "cluster_loss": "none", "projector_layers": 2,
            "contrastive_temperature": 1.0,
        },
        # The rate is the presets' own: MoCo v3 has .6 for 100 epochs, .3 for 300, and none for 200.
        recipe={"optimiser": "lars", "weight_decay": 1e-6, "batch_size": 4096, "encoder_momentum": 0.99},
    ),
    "swav": Method(
        paper="Caron et al., Unsupervised Learning of Visual Features by Contrasting Cluster Assignments, 2020; "
        "batches of 256, a queue from epoch 15 of 400",
        objective={**_PROTOTYPES, "cluster_loss": "swapped", "queue_size": 3840, "queue_after": 0.0375},
        large={"hidden_dim": 2048, "n_prototypes": 3000},
        small={"n_prototypes": 1000},
        recipe={
            "optimiser": "lars", "learning_rate": 0.6, "weight_decay": 1e-6, "batch_size": 256, "warmup_epochs": 0,
        },
    ),
    "deepcluster-v2": Method(
        paper="Caron et al., 2020, the appendix on DeepCluster v2",
        objective={
            **_PROTOTYPES, **_K_MEANS, "cluster_loss": "nce-centroids", "concentration": "constant",
            "concentration_scale": 10.0, "em_steps": 10,
        },
        large={"hidden_dim": 2048, "n_components": 3000, "more_components": (3000, 3000)},
        small={"n_components": 1000, "more_components": (1000, 1000)},
        recipe={"optimiser": "lars", "learning_rate": 0.3, "weight_decay": 1e-6},
    ),
    "pcl": Method(
        paper="Li et al., Prototypical Contrastive Learning of Unsupervised Representations, 2021: its version 2",
        objective={
            **_K_MEANS, "instance_loss": "contrastive", "contrastive_temperature": 0.2,
            # The paper weighs both losses equally; our instance loss is multiplied by 2 tau.
            "cluster_loss": "nce-centroids", "cluster_weight": 0.4, "concentration": "proximity",
            "prototype_temperature": 0.2,
            "embedding_dim": 128, "projector_layers": 2, "projector_norm": "none", "predictor_layers": 0,
            "n_negatives": 16_000, "embeddings": "clean", "em_steps": 20, "cluster_after": 0.1,
        },
        large={
            "hidden_dim": 2048, "n_components": 25_000, "more_components": (50_000, 100_000), "queue_size": 16_000,
        },
        small={"n_components": 1000, "more_components": (2000, 4000), "queue_size": 4096},
        # A rate of .03 and a decay of 1e-4; 2 tau for each of two views makes our loss .8 of the paper's.
        recipe={
            "optimiser": "sgd", "learning_rate": 0.03 / 0.8, "weight_decay": 1e-4 * 0.8, "batch_size": 256,
            "encoder_momentum": 0.999, "warmup_epochs": 0,
        },
    ),
    "propos": Method(
        paper="Huang et al., Learning Representation for Clustering via Prototype Scattering and Positive Sampling, "
        "2022; needs the number of clusters",
        objective={
            # The paper weighs the mean over views by .1 and sums the instance loss; for our sum that is .05.
            **_K_MEANS, "instance_loss": "cosine", "cluster_loss": "scattering", "cluster_weight": 0.05,
            "prototype_temperature": 0.5, "projector_layers": 2, "projector_norm": "none", "predictor_noise": 0.001,
            "embeddings": "clean", "em_steps": 20, "cluster_after": 0.05,
        },
        large={"n_components": None},
        small={"hidden_dim": 4096},
        small_recipe={
            "optimiser": "sgd", "learning_rate": 0.05, "weight_decay": 5e-4, "batch_size": 256, "warmup_epochs": 50,
            "encoder_momentum": 0.996,
        },
    ),
}  # fmt: skip


def with_method(config: TrainConfig, name: MethodName, *, recipe: bool = True) -> TrainConfig:
    """A preset changed to this method; without ``recipe`` only the objective changes."""
    method, is_large = METHODS[name], config.preset.startswith("imagenet")
    settings = {} if name == "siammm" else _UNTUNED
    settings = settings | method.objective | (method.large if is_large else method.small)
    if recipe:
        settings |= method.recipe if is_large else method.small_recipe
    return with_settings(config, method=name, **settings)


def differing_settings(config: TrainConfig) -> dict[str, Any]:
    """The settings that differ from those of the preset and method, by name."""
    preset = with_method(PRESETS[config.preset], config.method)
    values = {name: (value_of(config, name), value_of(preset, name)) for name, home in setting_homes().items() if home}
    return {name: given for name, (given, usual) in values.items() if given != usual}
