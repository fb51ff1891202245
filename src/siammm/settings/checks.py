"""Checks of the settings of training."""

from __future__ import annotations

import math

from siammm.core.errors import InputError
from siammm.settings.fields import value_of
from siammm.settings.training import TrainConfig


def check_settings(config: TrainConfig) -> None:
    """Refuse settings that no run can have, before anything is read or written."""
    for name, least in _LEAST.items():
        value = value_of(config, name)
        if value is not None and not (isinstance(value, str) or (math.isfinite(value) and value >= least)):
            raise InputError(f"{_flag(name)} is {value}, but it must be at least {least:g}.")
    for name, (low, high) in _BETWEEN.items():
        value = value_of(config, name)
        if value is not None and not low <= value <= high:
            raise InputError(f"{_flag(name)} is {value}, but it must be from {low:g} to {high:g}.")
    objective, clustering, network = config.objective, config.clustering, config.network
    if objective.instance_loss == "none" and objective.cluster_loss == "none":
        raise InputError("--instance-loss and --cluster-loss are both none, so there is nothing to learn; give one.")
    if objective.instance_loss == "none" and clustering.cluster_after > 0:
        raise InputError(
            f"--cluster-after is {clustering.cluster_after}, but with --instance-loss none nothing is learned before; "
            "use 0."
        )
    if config.method == "propos" and clustering.n_components is None:
        raise InputError("--method propos must be told the number of clusters; give it with --n-components.")
    if objective.cluster_loss == "scattering" and clustering.merge != "none":
        raise InputError(
            f"--cluster-loss scattering compares all clusters of a batch, but --merge is {clustering.merge}; use none."
        )
    if objective.cluster_loss == "scattering" and clustering.n_components == 1:
        raise InputError("--cluster-loss scattering keeps clusters apart, but --n-components is 1; use at least 2.")
    if objective.cluster_loss == "swapped" and network.predictor_layers:
        raise InputError(
            f"--cluster-loss swapped predicts codes, not embeddings, but --predictor-layers is "
            f"{network.predictor_layers}; use 0, or --method swav."
        )
    if objective.cluster_loss == "scattering" and objective.instance_loss == "none" and network.predictor_layers:
        raise InputError(
            f"--cluster-loss scattering does not train the predictor, and --instance-loss is none, but "
            f"--predictor-layers is {network.predictor_layers}; use 0, or give an instance loss."
        )
    own_targets = objective.instance_loss == "simsiam" or not network.momentum_encoder
    if objective.instance_loss in ("cosine", "simsiam") and own_targets and not network.predictor_layers:
        raise InputError(
            "Without a predictor and a momentum encoder both views are the same encoder's, and all images become one "
            "point; use --predictor-layers 2."
        )
    if network.predictor_noise and not network.predictor_layers:
        raise InputError(
            f"--predictor-noise is {network.predictor_noise}, but --predictor-layers is 0, so nothing reads it; use 0."
        )
    if objective.contrastive_temperature_end is not None and objective.instance_loss != "contrastive":
        raise InputError(
            f"--contrastive-temperature-end is {objective.contrastive_temperature_end}, but --instance-loss "
            f"{objective.instance_loss} has no temperature; use None."
        )
    if objective.queue_size and objective.instance_loss != "contrastive" and objective.cluster_loss != "swapped":
        raise InputError(
            f"--queue-size is {objective.queue_size}, but only --instance-loss contrastive and --cluster-loss swapped "
            "use a queue; use 0."
        )
    if clustering.more_components and not objective.uses_mixture:
        raise InputError(
            f"--more-components asks for further clusterings, but --cluster-loss {objective.cluster_loss} has none; "
            "leave it out."
        )
    if any(k < 1 for k in clustering.more_components):
        raise InputError(f"--more-components is {min(clustering.more_components)}, but it must be at least 1.")


_LEAST = {
    "image_size": 4, "view_size": 4, "workers": 0, "max_pixels": 1, "embedding_dim": 2, "hidden_dim": 1,
    "projector_layers": 1, "predictor_layers": 0, "predictor_hidden_dim": 1, "predictor_noise": 0, "n_prototypes": 2,
    "prototype_temperature": 1e-6, "queue_size": 0, "cluster_weight": 0, "n_neighbours": 1, "temperature": 1e-6,
    "concentration_dims": 2, "concentration_scale": 1e-6, "n_negatives": 1, "contrastive_temperature": 1e-6,
    "contrastive_temperature_end": 1e-6,
    "n_components": 1, "n_init": 1, "em_steps": 1, "merge_floor": 1, "epochs": 1, "batch_size": 2, "accumulate": 1,
    "learning_rate": 0, "weight_decay": 0, "trust_coefficient": 1e-9, "warmup_epochs": 0, "probe_every": 1,
    "save_every": 0,
}  # fmt: skip
_BETWEEN = {
    "max_bad_images": (0.0, 1.0), "crop_scale": (0.01, 1.0), "merge_share": (1e-6, 1.0),
    "cluster_after": (0.0, 0.99), "queue_after": (0.0, 1.0), "momentum": (0.0, 0.9999),
    "encoder_momentum": (0.0, 1.0), "random_state": (0, 2**31 - 1), "merge_threshold": (-100.0, 100.0),
}  # fmt: skip


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
