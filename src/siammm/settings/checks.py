"""Checks of settings: those of training, and what the settings of all commands share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from siammm.core.errors import InputError
from siammm.settings.fields import value_of
from siammm.settings.training import DataConfig, TrainConfig

_LEAST = {
    "image_size": 4, "view_size": 4, "workers": 0, "max_pixels": 1, "embedding_dim": 2, "hidden_dim": 1,
    "projector_layers": 1, "predictor_layers": 0, "predictor_hidden_dim": 1, "predictor_noise": 0, "n_prototypes": 2,
    "prototype_temperature": 1e-6, "queue_size": 0, "cluster_weight": 0, "n_neighbours": 1, "temperature": 1e-6,
    "concentration_dims": 2, "concentration_scale": 1e-6, "n_negatives": 1, "contrastive_temperature": 1e-6,
    "contrastive_temperature_end": 1e-6, "n_components": 1, "n_groups": 2, "n_init": 1, "em_steps": 1, "merge_floor": 1,
    "epochs": 1, "batch_size": 2, "accumulate": 1, "learning_rate": 0, "weight_decay": 0, "trust_coefficient": 1e-9,
    "warmup_epochs": 0, "probe_every": 1, "save_every": 0, "group_weight": 0,
}  # fmt: skip
_BETWEEN = {
    "max_bad_images": (0.0, 1.0), "crop_scale": (0.01, 1.0), "merge_share": (1e-6, 1.0),
    "cluster_after": (0.0, 0.99), "group_after": (0.0, 1.0), "queue_after": (0.0, 1.0), "momentum": (0.0, 0.9999),
    "encoder_momentum": (0.0, 1.0), "random_state": (0, 2**31 - 1), "merge_threshold": (-100.0, 100.0),
}  # fmt: skip
# Nobody means more, and beyond it numbers no longer fit where they are kept.
_MOST = {int: 2**31 - 1, float: 1e30}
_MOST_PIXELS = 2**40
_LARGEST_SEED = 2**32 - 1


def check_settings(config: TrainConfig) -> None:
    """Refuse settings that cannot be trained with, before anything is read or written."""
    for name, least in _LEAST.items():
        value = value_of(config, name)
        if value is not None and not (isinstance(value, str) or least <= value < math.inf):
            raise InputError(f"{_flag(name)} is {value}, but it must be at least {least:g}.")
        most = _MOST_PIXELS if name == "max_pixels" else _MOST.get(type(value))
        if isinstance(value, int | float) and most is not None and value > most:
            raise InputError(f"{_flag(name)} is {value}, but it must be at most {most}.")
    for name, (low, high) in _BETWEEN.items():
        value = value_of(config, name)
        if value is not None and not low <= value <= high:
            raise InputError(f"{_flag(name)} is {value}, but it must be from {low:g} to {high:g}.")
    for message in _contradictions(config):
        raise InputError(message)


def check_shared(config: Any) -> None:
    """Refuse settings of any command that nobody can mean: how images are read, random seeds, endless numbers."""
    if isinstance(getattr(config, "reading", None), DataConfig):
        check_settings(replace(TrainConfig(), reading=config.reading))
    for name in ("random_state", "seeds"):
        value = getattr(config, name, ())
        for seed in value if isinstance(value, tuple) else (value,):
            if not 0 <= seed <= _LARGEST_SEED:
                raise InputError(f"{_flag(name)} is {seed}, but it must be from 0 to {_LARGEST_SEED}.")
    for name, value in vars(config).items():
        for number in value if isinstance(value, tuple) else (value,):
            if type(number) is int and name not in ("random_state", "seeds") and number > _MOST[int]:
                raise InputError(f"{_flag(name)} is {number}, but it must be at most {_MOST[int]}.")


def _contradictions(config: TrainConfig) -> Iterator[str]:
    """What is wrong with settings that contradict each other, and what to do about it."""
    objective, clustering, network = config.objective, config.clustering, config.network
    instance, cluster, layers = objective.instance_loss, objective.cluster_loss, network.predictor_layers
    has_momentum_encoder = network.momentum_encoder and instance != "simsiam"
    fewest = min(clustering.more_components, default=1)
    if instance == "none" and cluster == "none":
        yield "--instance-loss and --cluster-loss are both none, so there is nothing to learn; use one of them."
    if instance == "none" and clustering.cluster_after > 0:
        why = "with --instance-loss none nothing is learned before"
        yield f"--cluster-after is {clustering.cluster_after}, but {why}; use 0."
    if clustering.group_after < 1 and not objective.uses_mixture:
        why = f"--cluster-loss {cluster} fits no mixture"
        yield f"--group-after is {clustering.group_after}, but {why}; use 1, or --cluster-loss mle."
    if clustering.n_groups is not None and not objective.uses_mixture:
        yield f"--n-groups is {clustering.n_groups}, but --cluster-loss {cluster} fits no mixture; leave it out."
    if clustering.n_groups is not None and clustering.group_after < 1:
        given, after = clustering.n_groups, clustering.group_after
        yield f"--n-groups is {given}, but with --group-after {after} the number is found; leave one of them out."
    if clustering.group_after < clustering.cluster_after:
        given, after = clustering.group_after, clustering.cluster_after
        yield f"--group-after is {given}, but clusters begin at --cluster-after {after}; use at least {after}."
    if config.method == "propos" and clustering.n_components is None:
        yield "--method propos needs the number of clusters; set it with --n-components."
    if cluster == "scattering" and clustering.merge != "none":
        why = "--cluster-loss scattering needs a fixed number of clusters"
        yield f"{why}, but --merge is {clustering.merge}; use none."
    if cluster == "scattering" and clustering.n_components == 1:
        yield "--cluster-loss scattering pushes clusters apart, but --n-components is 1; use at least 2."
    if cluster == "swapped" and layers > 0:
        why = "--cluster-loss swapped has no predictor"
        yield f"{why}, but --predictor-layers is {layers}; use 0, or --method swav."
    if cluster == "scattering" and instance == "none" and layers > 0:
        why = "--cluster-loss scattering does not train the predictor and --instance-loss is none"
        yield f"{why}, but --predictor-layers is {layers}; use 0, or set an instance loss."
    if instance in ("cosine", "simsiam") and not has_momentum_encoder and not layers:
        why = "Without a predictor or a momentum encoder the embeddings collapse to one point"
        yield f"{why}; use --predictor-layers 2."
    if network.predictor_noise > 0 and not layers:
        why = "--predictor-layers is 0, so it has no effect"
        yield f"--predictor-noise is {network.predictor_noise}, but {why}; use 0."
    if objective.contrastive_temperature_end is not None and instance != "contrastive":
        given, why = objective.contrastive_temperature_end, f"--instance-loss {instance} has no temperature"
        yield f"--contrastive-temperature-end is {given}, but {why}; use None."
    if objective.queue_size > 0 and instance != "contrastive" and cluster != "swapped":
        why = "only --instance-loss contrastive and --cluster-loss swapped use a queue"
        yield f"--queue-size is {objective.queue_size}, but {why}; use 0."
    if clustering.more_components and not objective.uses_mixture:
        yield f"--more-components is set, but --cluster-loss {cluster} fits no mixture; leave it out."
    if fewest < 1:
        yield f"--more-components is {fewest}, but it must be at least 1."


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
