"""Complete settings for the usual sizes of images; a preset is where ``siammm train`` starts from.

``imagenet-100`` and ``imagenet-200`` hold the paper's every number (section 5.1), but for one layer of BatchNorm
(``docs/decisions/0012``). The small presets keep its mixture, take the contrastive one of its instance losses, and let
clusters begin later (``docs/decisions/0026``), with the optimisation that its peers use at these sizes, or with Muon.
"""

from __future__ import annotations

from dataclasses import replace

from siammm.settings.training import (
    ClusteringConfig,
    NetworkConfig,
    ObjectiveConfig,
    OptimisationConfig,
    PresetName,
    TrainConfig,
    ViewConfig,
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
