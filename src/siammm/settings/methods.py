"""SiamMM's peers as settings of the same trainer, so that a comparison is one of like with like.

A method is an objective, which is all that a comparison under one recipe changes, and a recipe, the optimisation of its
paper. ``siammm train --method NAME`` takes both, on top of the preset's network, images and length. Most papers trained
on ImageNet alone, and their recipes go with the ``imagenet`` presets; rates are for 256 images. Where a paper has one
for small images (SimSiam, ProPos), the small presets take it; else they keep their own.

Losses here are sums over the two views, and the contrastive one is multiplied by 2 tau. Where a paper's is another
multiple, ``cluster_weight`` keeps its ratio of the two losses; and a recipe for SGD divides the rate by the same factor
that it multiplies the decay with, so that an update is the paper's. LARS sees little of the size of a loss.

What is not here: SwAV's and DeepCluster v2's smaller additional crops (both papers also report two crops alone), rates
of the predictor's own (constant in SimSiam, tenfold in ProPos), momentum encoders of constant momentum (PCL, ProPos on
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
    """Sizes of its objective for ImageNet, as in its paper."""
    small: dict[str, Any] = field(default_factory=dict)
    """Sizes of its objective for tens of thousands of images; the same share of the images where these are clusters."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """The optimisation of its paper, for ImageNet."""
    small_recipe: dict[str, Any] = field(default_factory=dict)
    """The optimisation of its paper for images of 32 pixels; where it has none, the preset's own stands."""


# SwAV and DeepCluster v2 compare embeddings of 128 dimensions with prototypes, at a temperature of .1, without a
# predictor or a momentum encoder.
_PROTOTYPES: dict[str, Any] = {
    "instance_loss": "none",
    "embedding_dim": 128,
    "projector_layers": 2,
    "projector_norm": "none",
    "predictor_layers": 0,
    "momentum_encoder": False,
    "prototype_temperature": 0.1,
    "cluster_after": 0.0,
}
# What a preset tunes for SiamMM's own losses is none of a peer's.
_UNTUNED: dict[str, Any] = {"contrastive_temperature_end": None, "cluster_weight": 1.0}
# Clusters by k-means, anew in each epoch: every image in one of them.
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
        # The predictor's hidden layer is its bottleneck, a quarter of the embedding, whatever the preset's width.
        objective={
            "instance_loss": "simsiam", "cluster_loss": "none", "hidden_dim": 2048, "embedding_dim": 2048,
            "predictor_hidden_dim": 512,
        },
        small={"projector_layers": 2},
        # Rates of .05 and .03, decays of 1e-4 and 5e-4; but the paper's loss is the mean over the views, half of ours.
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
        # The rate is the presets' own: .6 for 100 epochs is MoCo v3's; for 200 it has none, and .3 for 300.
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
            # Both losses count alike in the paper; ours of the instances comes with 2 tau.
            "cluster_loss": "nce-centroids", "cluster_weight": 0.4, "concentration": "proximity",
            "prototype_temperature": 0.2,
            "embedding_dim": 128, "projector_layers": 2, "projector_norm": "none", "predictor_layers": 0,
            "n_negatives": 16_000, "embeddings": "clean", "em_steps": 20, "cluster_after": 0.1,
        },
        large={
            "hidden_dim": 2048, "n_components": 25_000, "more_components": (50_000, 100_000), "queue_size": 16_000,
        },
        small={"n_components": 1000, "more_components": (2000, 4000), "queue_size": 4096},
        # A rate of .03 and a decay of 1e-4; but 2 tau for each of two views makes our loss .8 of the paper's.
        recipe={
            "optimiser": "sgd", "learning_rate": 0.03 / 0.8, "weight_decay": 1e-4 * 0.8, "batch_size": 256,
            "encoder_momentum": 0.999, "warmup_epochs": 0,
        },
    ),
    "propos": Method(
        paper="Huang et al., Learning Representation for Clustering via Prototype Scattering and Positive Sampling, "
        "2022; it is told the number of clusters",
        objective={
            # A weight of .1 for the mean over the views, beside an instance loss that is the sum, is .05 for the sum.
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
    """A preset turned into one for this method; without ``recipe`` only its objective changes."""
    method, is_large = METHODS[name], config.preset.startswith("imagenet")
    settings = {} if name == "siammm" else _UNTUNED
    settings = settings | method.objective | (method.large if is_large else method.small)
    if recipe:
        settings |= method.recipe if is_large else method.small_recipe
    return with_settings(config, method=name, **settings)


def differing_settings(config: TrainConfig) -> dict[str, Any]:
    """The settings of training that are not those of the preset and method, each by its own word."""
    preset = with_method(PRESETS[config.preset], config.method)
    values = {name: (value_of(config, name), value_of(preset, name)) for name, home in setting_homes().items() if home}
    return {name: given for name, (given, usual) in values.items() if given != usual}
