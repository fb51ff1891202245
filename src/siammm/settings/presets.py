"""Complete settings for the usual sizes of images; a preset is where ``siammm train`` starts from.

``imagenet-100`` and ``imagenet-200`` hold the paper's every number (section 5.1), but for one layer of BatchNorm
(``docs/decisions/0012``). The small presets keep its mixture, take the contrastive one of its instance losses, and let
clusters begin later (``docs/decisions/0026``), with the optimisation that its peers use at these sizes, or with Muon.
"""

from __future__ import annotations

import dataclasses
import math
import types
from dataclasses import replace
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from siammm.core.errors import InputError, StoredFileError
from siammm.settings.config import (
    ClusteringConfig,
    NetworkConfig,
    ObjectiveConfig,
    OptimisationConfig,
    PresetName,
    TrainConfig,
    ViewConfig,
    uses_mixture,
)

# The paper: ResNet-50, heads 4096 wide, LARS with decay 1e-6, batch 4096, rate .5 for 200 epochs and .6 for 100,
# 100,000 clusters, zeta -1.2, H 5, tau .02, alpha 1, concentrations in 150 principal directions; MoCo v3's momentum
# and warm-up.
_IMAGENET_200 = TrainConfig(
    preset="imagenet-200",
    views=ViewConfig(image_size=224, augmentation="224"),
    network=NetworkConfig(backbone="resnet50", hidden_dim=4096),
    objective=ObjectiveConfig(concentration="closed-form", concentration_dims=150),
    clustering=ClusteringConfig(n_components=100_000, merge="paper", merge_threshold=-1.2),
    optimisation=OptimisationConfig(
        epochs=200, batch_size=4096, learning_rate=0.5, weight_decay=1e-6, warmup_epochs=10, encoder_momentum=0.99
    ),
)

# Clusters of an encoder that knows nothing narrow its embeddings, and the cosine has nothing that widens them again.
_SMALL = TrainConfig(
    objective=ObjectiveConfig(instance_loss="contrastive", contrastive_temperature=0.2),
    clustering=ClusteringConfig(cluster_after=0.25),
)

# For a CPU. So few clusters are far apart: a soft assignment needs a higher temperature, and a sensible encoder first.
# The negatives of MoCo v3's loss keep images apart that so short a training would otherwise merge. Few images make few
# updates an epoch: small batches, and a momentum encoder that follows quickly.
_DEMO = TrainConfig(
    preset="demo",
    views=ViewConfig(augmentation="digits"),
    network=NetworkConfig(backbone="conv-small", hidden_dim=256, embedding_dim=64),
    objective=ObjectiveConfig(temperature=0.1, instance_loss="contrastive"),
    clustering=ClusteringConfig(cluster_after=0.5, merge_share=0.2),
    optimisation=OptimisationConfig(
        epochs=60,
        batch_size=64,
        learning_rate=0.3,
        optimiser="sgd",
        weight_decay=1e-4,
        warmup_epochs=2,
        encoder_momentum=0.97,
    ),
)

# What twelve minutes on an H200 hold, with what trials of 110 epochs on held-out images of CIFAR-10 found best
# (``docs/decisions/0030``): of these, half the weight of the clusters gained the most.
_CIFAR_FAST = TrainConfig(
    preset="cifar-fast",
    views=ViewConfig(image_size=32, view_size=24, augmentation="32"),
    objective=replace(_SMALL.objective, contrastive_temperature_end=1.0, cluster_weight=0.5),
    clustering=_SMALL.clustering,
    optimisation=OptimisationConfig(epochs=645, batch_size=512, optimiser="muon", learning_rate=6.0),
)

PRESETS: dict[PresetName, TrainConfig] = {
    "cifar": replace(_SMALL, preset="cifar"),
    "cifar-fast": _CIFAR_FAST,
    "tiny": replace(_SMALL, preset="tiny"),
    # Groups of so weak an encoder overlap, and merging would not stop before one or two: a few are left to look at.
    # Muon makes more of the few updates that a CPU does; so few want long steps, as shares of the weights.
    "laptop": replace(
        _DEMO,
        preset="laptop",
        views=ViewConfig(image_size=32, augmentation="32"),
        clustering=replace(_DEMO.clustering, merge_floor=8),
        optimisation=replace(_DEMO.optimisation, optimiser="muon", learning_rate=1.0, trust_coefficient=0.02),
    ),
    "demo": _DEMO,
    "imagenet-100": replace(
        _IMAGENET_200,
        preset="imagenet-100",
        optimisation=replace(_IMAGENET_200.optimisation, epochs=100, learning_rate=0.6),
    ),
    "imagenet-200": _IMAGENET_200,
}


def with_settings(config: TrainConfig, **settings: Any) -> TrainConfig:
    """A copy with these settings changed, each by its own word, whichever group it is in."""
    homes = setting_homes()
    changed: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        if name not in homes:
            raise InputError(f"{name!r} is no setting of training; the settings are {', '.join(homes)}.")
        if homes[name] is None:
            changed[name] = value
        else:
            groups.setdefault(str(homes[name]), {})[name] = value
    for group, values in groups.items():
        changed[group] = replace(getattr(config, group), **values)
    return replace(config, **changed)


def differing_settings(config: TrainConfig) -> dict[str, Any]:
    """The settings of training that are not those of the preset and method, each by its own word."""
    from siammm.settings.methods import with_method  # which is built on this module

    preset = with_method(PRESETS[config.preset], config.method)
    values = {name: (_value(config, name), _value(preset, name)) for name, home in setting_homes().items() if home}
    return {name: given for name, (given, usual) in values.items() if given != usual}


def check_settings(config: TrainConfig) -> None:
    """Refuse settings that no run can have, before anything is read or written."""
    for name, least in _LEAST.items():
        value = _value(config, name)
        if value is not None and not (isinstance(value, str) or (math.isfinite(value) and value >= least)):
            raise InputError(f"{_flag(name)} is {value}, but it must be at least {least:g}.")
    for name, (low, high) in _BETWEEN.items():
        value = _value(config, name)
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
    if clustering.more_components and not uses_mixture(objective):
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


def _value(config: TrainConfig, name: str) -> Any:
    home = setting_homes()[name]
    return getattr(config if home is None else getattr(config, home), name)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def setting_homes() -> dict[str, str | None]:
    """Every setting of training with the group it is in; None for those of the command itself."""
    homes: dict[str, str | None] = {}
    default = TrainConfig()
    for field in dataclasses.fields(TrainConfig):
        value = getattr(default, field.name)
        if dataclasses.is_dataclass(value):
            homes |= {inner.name: field.name for inner in dataclasses.fields(value)}
        else:
            homes[field.name] = None
    return homes


def as_plain(config: TrainConfig) -> dict[str, Any]:
    """The settings as JSON holds them."""
    return _plain(dataclasses.asdict(config))


def from_plain(stored: dict[str, Any], origin: Path) -> TrainConfig:
    """The settings that ``as_plain`` wrote, from the file ``origin``."""
    try:
        return _rebuilt(TrainConfig, stored)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoredFileError(f"{origin} does not hold the settings of a run ({error}); start the run anew.") from error


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return str(value) if isinstance(value, Path) else value


def _rebuilt(kind: Any, stored: dict[str, Any]) -> Any:
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, value in stored.items():
        hint = hints[name]
        if dataclasses.is_dataclass(hint):
            values[name] = _rebuilt(hint, value)
        else:
            value = tuple(value) if isinstance(value, list) else value  # JSON has no tuples, and no setting is a list
            values[name] = Path(value) if isinstance(value, str) and Path in _alternatives(hint) else value
    return kind(**values)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
