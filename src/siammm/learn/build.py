"""The parts of a run, as the settings ask for them; ``loop.py`` puts a run together from these."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel

from siammm.core import ranks
from siammm.core.checks import check_at_least
from siammm.core.errors import InputError
from siammm.data.loader import Loader, open_loader
from siammm.data.sources import Source
from siammm.data.view_settings import Channels, ViewSettings, preset_for, views
from siammm.learn.backbones import build_backbone
from siammm.learn.batchnorm import synchronised
from siammm.learn.clustering import Clustering
from siammm.learn.networks import Encoder, SiameseNetwork, predictor, projector
from siammm.learn.optim import build_optimiser
from siammm.learn.queue import Queue
from siammm.learn.start import Start, start_from
from siammm.settings.training import TrainConfig


def initial_clusters(n_images: int) -> int:
    """Clusters that training starts from when nobody said: the paper's 100,000 of 1.28 million images, 8 %."""
    return max(2, min(round(0.08 * n_images), n_images // 4))


def build_network(config: TrainConfig, image_size: int) -> SiameseNetwork:
    """The networks that the settings describe, with weights from torch's own generator."""
    network, objective = config.network, config.objective
    hidden, dim = network.hidden_dim, network.embedding_dim
    backbone = build_backbone(network.backbone, image_size=image_size, zero_init_residual=network.zero_init_residual)
    features = int(cast(Any, backbone).num_features)
    head = projector(features, hidden, dim, network.projector_layers, last_norm=network.projector_norm)
    guess = None
    if network.predictor_layers:
        inner = network.predictor_hidden_dim or hidden
        guess = predictor(dim, inner, network.predictor_layers, last_norm=network.predictor_norm)
    momentum = network.momentum_encoder and objective.instance_loss != "simsiam"
    n_prototypes = objective.n_prototypes if objective.cluster_loss == "swapped" else 0
    return SiameseNetwork(Encoder(backbone, head), guess, momentum=momentum, n_prototypes=n_prototypes)


def image_size(config: TrainConfig, source: Source) -> int:
    """Pixels of an image's side, as the network sees it: as asked, or its own up to 96."""
    if config.views.image_size is not None:
        return config.views.image_size
    shape = source.uniform_shape()
    return min(shape) if shape is not None and max(shape) <= 96 else 224


def new_network(config: TrainConfig, image_size: int, view_size: int, start: Start | None = None) -> SiameseNetwork:
    """The networks with weights by the seed, or those that the backbone is to start from.

    Refuses views of another size for networks that are made for one size.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.run.random_state)
        network = build_network(config, image_size)
    if start is not None:
        start_from(network, start)
    if view_size == image_size:
        return network
    body = network.encoder.backbone
    training = body.training
    try:
        with torch.no_grad():
            body.eval()(torch.zeros(1, 3, view_size, view_size))
    except (AssertionError, RuntimeError, ValueError) as error:
        raise InputError(
            f"--view-size is {view_size}, but {config.network.backbone} for images of {image_size} pixels does not "
            "take such views; use None, or choose another size or backbone."
        ) from error
    finally:
        body.train(training)
    return network


def placed(network: SiameseNetwork, device: torch.device) -> SiameseNetwork:
    """The network on its device, ready to train; with several processes, BatchNorm over all of them."""
    network = network.to(device)
    if device.type == "cuda":
        network = network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    if ranks.world_size() > 1:
        network = cast(SiameseNetwork, synchronised(network))
    return network.train()


def data_parallel(network: SiameseNetwork, device: torch.device) -> Any:
    """The network, its gradients averaged over the ranks where there are several."""
    if ranks.world_size() == 1:
        return network
    # Buffers are each rank's copy of the same synchronised statistics; torch 2.15 renamed the switch.
    names = inspect.signature(DistributedDataParallel).parameters
    switch = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    settings: dict[str, Any] = {switch: False, "device_ids": [device.index] if device.type == "cuda" else None}
    return DistributedDataParallel(network, **settings)


def open_images(
    config: TrainConfig, source: Source, views: tuple[ViewSettings, ViewSettings], device: torch.device, **more: Any
) -> Loader:
    """A loader for images, read as the settings say."""
    more |= {"kind": config.reading.loader, "workers": config.reading.workers, "limit": config.reading.max_bad_images}
    return open_loader(source, views, device, image_cache=config.run.image_cache, **more)


def check_same_images(n_images: int, device: torch.device) -> None:
    """Refuse processes that can read different numbers of images."""
    counts = ranks.all_gather_counts(n_images, device)
    if len(set(counts)) > 1:
        raise InputError(
            f"The processes can read different numbers of images ({', '.join(map(str, counts))}); give all of them "
            "the same files."
        )


def optimiser(
    config: TrainConfig, network: SiameseNetwork, learning_rate: torch.Tensor, *, fused: bool
) -> torch.optim.Optimizer:
    """The optimiser of the online encoder and its heads, which reads its rate from a tensor."""
    asked, body = config.optimisation, network.encoder.backbone
    settings = {name: getattr(asked, name) for name in ("weight_decay", "momentum", "trust_coefficient")}
    made = build_optimiser(asked.optimiser, network, lr=asked.learning_rate, turned=body, fused=fused, **settings)
    for group in made.param_groups:
        group["lr"] = learning_rate
    return made


def clusterings(config: TrainConfig, n_images: int, device: torch.device) -> list[Clustering]:
    """The clusterings that train together, each with a seed of its own."""
    first, more = config.clustering.n_components, config.clustering.more_components
    for flag, k in [("--n-components", first), *(("--more-components", k) for k in more)]:
        if k is not None and not 1 <= k <= n_images:
            raise InputError(f"{flag} is {k:,}, but it must be from 1 to the number of images, {n_images:,}.")
    sizes = [initial_clusters(n_images) if first is None else first, *more]
    dim, seed = config.network.embedding_dim, config.run.random_state
    return [
        Clustering(k, n_images, dim, device, objective=config.objective, settings=config.clustering, seed=seed + number)
        for number, k in enumerate(sizes)
    ]


def new_queue(config: TrainConfig, network: SiameseNetwork, device: torch.device) -> Queue | None:
    """The queue of earlier embeddings, where the loss has one."""
    objective = config.objective
    if not objective.queue_size:
        return None
    # Random directions are fair negatives, but codes are balanced over images alone.
    seed = config.run.random_state if network.prototypes is None else None
    starts_at = int(objective.queue_after * config.optimisation.epochs)
    return Queue(objective.queue_size, network.encoder.embedding_dim, device, seed=seed, starts_at=starts_at)


def clean_view(
    config: TrainConfig, source: Source, normalisation: tuple[Channels, Channels] | None = None
) -> ViewSettings:
    """How an image is shown to the network without augmentation."""
    return views(image_size(config, source), config.views.augmentation)[0].normalised_by(normalisation)


def training_views(
    config: TrainConfig, image_size: int, normalisation: tuple[Channels, Channels] | None = None
) -> tuple[ViewSettings, ViewSettings]:
    """The settings of the two views: from the preset, or from the size of the images."""
    preset = config.views.augmentation
    preset = preset_for(image_size) if preset == "auto" else preset
    if config.views.view_size is not None:
        check_at_least("view_size", config.views.view_size, 4)
        image_size = config.views.view_size
    first, second = views(image_size, preset)
    if config.views.crop_scale is not None:
        scale = (config.views.crop_scale, 1.0)
        first, second = (dataclasses.replace(view, scale=scale) for view in (first, second))
    return first.normalised_by(normalisation), second.normalised_by(normalisation)


def batch_size(config: TrainConfig, n_images: int) -> int:
    """Images of one update, over all ranks: as asked, or as many as there are, in equal parts."""
    parts = config.optimisation.accumulate * ranks.world_size()
    if n_images < 2:
        raise InputError(
            f"There {'is 1 image' if n_images == 1 else 'are no images'} that can be read, but training compares "
            "images with each other and needs at least 2."
        )
    most = min(config.optimisation.batch_size, n_images)
    if most // parts < 2:
        raise InputError(
            f"A batch of {most} images in {parts} parts has fewer than 2 images a part, but BatchNorm needs at least "
            "2; raise --batch-size, or lower --accumulate or the number of processes."
        )
    return most // parts * parts


def check_queue(config: TrainConfig, n_images: int) -> None:
    """Refuse a queue that would hold an image beside itself."""
    size = config.objective.queue_size
    if config.objective.instance_loss == "contrastive" and size >= n_images:
        raise InputError(
            f"--queue-size is {size:,}, but there are {n_images:,} images, so that each would be its own negative; use "
            "a small part of that."
        )
