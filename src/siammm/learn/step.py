"""One update of the encoder: views, losses, gradients, optimiser, momentum encoder, bank.

The step never makes the host wait: its losses add up on the device, and a loss or gradient that is not finite makes
every update from then on leave the weights as they are, until the host looks (``Step.check``). On a GPU the whole step
is captured once as a CUDA graph and replayed, so that launching its kernels costs nothing.

Legend:  B images of a batch, D dimensions.
"""

from __future__ import annotations

import inspect
import os
import types
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from siammm.core.device import network_precision
from siammm.core.ranks import all_gather_batch, world_size
from siammm.data import randomness
from siammm.data.loader import Batch, Loader
from siammm.learn.bank import Bank
from siammm.learn.clustering import Clustering
from siammm.learn.cuda import triton_support
from siammm.learn.guard import CollapseError
from siammm.learn.networks import Predictions, SiameseNetwork
from siammm.learn.objective import Company, batch_loss
from siammm.learn.optim import along_cosine, momentum_at
from siammm.learn.queue import Queue
from siammm.settings.training import TrainConfig

# The operations on whole lists of tensors have no types.
_torch = cast(Any, torch)

_TOTALS = ("loss", "instance_loss", "cluster_loss", "gradient_norm", "steps")
# Steps before a capture, on a stream of their own: compilation and cuDNN's choices happen here.
_WARM_UP = 3


class Step:
    """The state of an update besides the networks: its inputs at fixed addresses, sums of its losses, its graph."""

    def __init__(
        self,
        config: TrainConfig,
        network: SiameseNetwork,
        optimiser: torch.optim.Optimizer,
        loader: Loader,
        bank: Bank,
        clusterings: Sequence[Clustering],
        device: torch.device,
    ) -> None:
        self.config, self.network, self.optimiser = config, network, optimiser
        self.loader, self.bank, self.clusterings, self.device = loader, bank, clusterings, device
        objective = config.objective
        self.queue: Queue | None = None
        if objective.queue_size:
            # Random directions are fair negatives, but codes are balanced over images alone.
            seed = config.run.random_state if network.prototypes is None else None
            self.queue = Queue(objective.queue_size, network.encoder.embedding_dim, device, seed=seed)
        self._queue_from = int(objective.queue_after * config.optimisation.epochs)
        self._epoch = torch.zeros((), dtype=torch.int64, device=device)
        self._rate = torch.zeros((), device=device)
        self._momentum = torch.zeros((), dtype=_widest(device), device=device)
        changes = objective.contrastive_temperature_end is not None
        self._temperature = torch.zeros((), device=device) if changes else None
        self._failed = torch.zeros((), device=device)
        self.totals = torch.zeros(len(_TOTALS), dtype=_widest(device), device=device)
        for group in optimiser.param_groups:
            group["lr"] = self._rate
        self.autocast = network_precision(device, config.optimisation.precision) == "bf16"
        """Whether the networks compute in bf16."""
        compiled = config.optimisation.compile
        self._compiled = device.type == "cuda" if compiled is None else compiled
        if self._compiled:
            _keep_compiled()
        self._views: Any = freshly_compiled(loader.views) if self._compiled else loader.views
        fuses = config.optimisation.fused
        if fuses is None:
            fuses = device.type == "cuda" and world_size() == 1 and triton_support.available()
        if not (fuses and network.fuse()) and self._compiled:
            # Each part by itself: compiled once, it serves both views, and takes half as long as the two in one piece.
            for part in (network.encoder, network.predictor, network.momentum_encoder):
                if part is not None:
                    part.compile(dynamic=False)
        self._online: Any = _parallel(network, device)
        # The graph of a step depends on whether clusters count yet. Contrasting with a changing K, or with centroids
        # that are drawn for each step, cannot be captured.
        changing = objective.cluster_loss == "nce-centroids" and (
            config.clustering.merge != "none" or max(c.n_start for c in clusterings) > objective.n_negatives
        )
        self._captures = device.type == "cuda" and world_size() == 1 and not changing
        # The loss is a hundred operations on a few thousand numbers: compiled, a dozen kernels. Not where its sizes
        # change from epoch to epoch, which would be compiled anew, nor where ranks talk within it.
        compiles_loss = self._compiled and world_size() == 1 and not changing
        self._loss: Any = freshly_compiled(batch_loss) if compiles_loss else batch_loss
        # Where the momentum encoder works beside the online one: what either leaves idle, the other uses.
        self._beside: torch.cuda.Stream | None = None
        if self._captures and network.momentum_encoder is not None:
            self._beside = torch.cuda.Stream(device)
        self._graphs: dict[bool, tuple[torch.cuda.CUDAGraph, Batch]] = {}
        self._warm: dict[bool, int] = {}

    def __call__(self, batch: Batch, *, epoch: int, number: int, total: int, rate: float, clustered: bool) -> None:
        """Do one update, which is ``number`` of the ``total`` of the run."""
        self._epoch.fill_(epoch)
        self._rate.fill_(rate)
        self._momentum.fill_(momentum_at(number, total, self.config.optimisation.encoder_momentum))
        start, end = self.config.objective.contrastive_temperature, self.config.objective.contrastive_temperature_end
        if self._temperature is not None and end is not None:
            self._temperature.fill_(along_cosine(number, total, start, end))
        if not self._captures:
            self._update_uncaptured(batch, clustered, self._negatives(number))
        elif clustered in self._graphs:
            graph, inputs = self._graphs[clustered]
            _copy(batch, inputs)
            graph.replay()
        else:
            self._warmed_up(batch, clustered)

    @torch.no_grad()
    def embed(self, batch: Batch, epoch: int) -> None:
        """Leave the embeddings of a batch in the bank, and learn nothing: in the parts and precision of a step."""
        encoder = self.network.momentum_encoder or self.network.encoder
        for part in _parts(batch, self.config.optimisation.accumulate):
            x_1, x_2 = self.loader.views(part, self.config.run.random_state, epoch)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
                # Not by calling it: this is done once, which does not pay for compiling.
                target_1, target_2 = encoder.forward(x_1), encoder.forward(x_2)
            self._remember(part.position_B, target_1, target_2)

    def check(self) -> None:
        """Stop if a loss or gradient was not finite: no weight has changed since. Waits for the device."""
        if float(self._failed) > 0:
            raise CollapseError(
                "The loss or its gradient is no longer finite, so training stopped before the weights changed; start "
                "again with a lower --learning-rate, or with --precision fp32."
            )

    def means(self) -> dict[str, float]:
        """The means since the last call of ``reset``. Waits for the device."""
        *totals, steps = self.totals.tolist()
        return {name: total / max(1.0, steps) for name, total in zip(_TOTALS, totals, strict=False)}

    def reset(self) -> None:
        """Begin new means."""
        self.totals.zero_()

    # -- the update ---------------------------------------------------------------------------------------------------

    def _update(self, batch: Batch, clustered: bool, negatives: Sequence[Tensor | None] | None = None) -> None:
        parts = self.config.optimisation.accumulate
        self.optimiser.zero_grad()
        sums = torch.zeros_like(self.totals[:3])
        for part in _parts(batch, parts):
            x_1, x_2 = self._views(part, self.config.run.random_state, self._epoch)
            if self.device.type == "cuda":
                x_1, x_2 = (x.to(memory_format=torch.channels_last) for x in (x_1, x_2))
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
                predictions, (target_1, target_2) = self._embedded(x_1, x_2, self._noise(part.position_B))
            loss = self._loss(
                self.config.objective,
                predictions,
                (target_1.float(), target_2.float()),
                part.position_B,
                self.clusterings,
                clustered=clustered,
                negatives=negatives,
                company=self._company(),
                temperature=self._temperature,
            )
            (loss.total / parts).backward()
            self._remember(part.position_B, target_1, target_2, queued=True)
            sums += torch.stack([loss.total, loss.instance, loss.cluster]).detach().to(sums) / parts
        self._apply(sums)

    def _embedded(
        self, x_1: Tensor, x_2: Tensor, noise: tuple[Tensor, Tensor] | None
    ) -> tuple[Predictions, tuple[Tensor, Tensor]]:
        """The predictions of two views, and what they are compared with."""
        if self._beside is None:
            predictions = self._online(x_1, x_2, noise)
            return predictions, self.network.targets(x_1, x_2, predictions.z_1, predictions.z_2)
        here = torch.cuda.current_stream()
        self._beside.wait_stream(here)
        with torch.cuda.stream(self._beside):
            targets = self.network.followed(x_1, x_2)
        predictions = self._online(x_1, x_2, noise)
        # Each stream waits for the other before it goes on, so that no memory is used again too early.
        here.wait_stream(self._beside)
        return predictions, targets

    def _remember(self, position_B: Tensor, target_1: Tensor, target_2: Tensor, *, queued: bool = False) -> None:
        position_B, target_1, target_2 = (
            all_gather_batch(rows) for rows in (position_B, target_1.float(), target_2.float())
        )
        self.bank.update(position_B, target_1, target_2)
        if queued and self.queue is not None:
            self.queue.push(target_1, target_2)

    @torch.no_grad()
    def _company(self) -> Company | None:
        """The queue, as the loss wants it."""
        if self.queue is None:
            return None
        if self.network.prototypes is None:
            return Company(self.queue.view_2QD)
        first, second = (self.network.scored(rows) for rows in self.queue.view_2QD)
        counts = (self._epoch >= self._queue_from) & self.queue.is_full
        return Company(self.queue.view_2QD, (first, second), counts.float())

    def _noise(self, position_B: Tensor) -> tuple[Tensor, Tensor] | None:
        """Normal numbers for what the predictor reads of each view; like the views, by seed, epoch and image."""
        deviation, dim = self.config.network.predictor_noise, self.network.encoder.embedding_dim
        if not deviation:
            return None
        first, second = (
            randomness.normals(self.config.run.random_state, self._epoch, position_B, stream, dim) * deviation
            for stream in randomness.NOISE_STREAMS
        )
        return first, second

    @torch.no_grad()
    def _apply(self, sums: Tensor) -> None:
        """Change the weights, unless something is not finite."""
        if self.network.prototypes is not None and self.network.prototypes.weight.grad is not None:
            # The encoder finds its feet first: prototypes stand still for an epoch, as in SwAV.
            self.network.prototypes.weight.grad.mul_(self._epoch >= 1)
        gradients = [p.grad for group in self.optimiser.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(_torch._foreach_norm(gradients)))
        failed = (~torch.isfinite(norm + sums[0])).to(self._failed)
        if world_size() > 1:
            dist.all_reduce(failed, dist.ReduceOp.MAX)
            dist.all_reduce(sums)
            sums = sums / world_size()
        torch.maximum(self._failed, failed, out=self._failed)
        self.optimiser.found_inf = self._failed  # pyright: ignore[reportAttributeAccessIssue] - as torch's own scaler does
        self.optimiser.step()
        self.network.normalise_prototypes()
        self.network.update_momentum(torch.where(self._failed > 0, torch.ones_like(self._momentum), self._momentum))
        self.totals += torch.cat([sums, norm.to(sums)[None], torch.ones_like(sums[:1])])

    def _negatives(self, number: int) -> list[Tensor | None] | None:
        """The centroids of each clustering to contrast with in this step, where they are drawn."""
        if self.config.objective.cluster_loss != "nce-centroids":
            return None
        wanted = self.config.objective.n_negatives
        generator = torch.Generator().manual_seed(self.config.run.random_state * 1_000_003 + number)
        return [
            torch.randint(k, (wanted,), generator=generator).to(self.device) if k > wanted else None
            for k in (clustering.n_components for clustering in self.clusterings)
        ]

    # -- capture ------------------------------------------------------------------------------------------------------

    def _warmed_up(self, batch: Batch, clustered: bool) -> None:
        """Run a few real steps on a side stream, then capture the one that all others replay."""
        with _convolutions_tried(), _without_advice():
            self._warm_up_or_capture(batch, clustered)

    def _update_uncaptured(self, batch: Batch, clustered: bool, negatives: Sequence[Tensor | None] | None) -> None:
        """An update where nothing is captured; the first of its kind may be compiled."""
        first = clustered not in self._warm
        with _without_advice() if first else nullcontext():
            self._update(batch, clustered, negatives)
        self._warm[clustered] = 1

    def _warm_up_or_capture(self, batch: Batch, clustered: bool) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._update(batch, clustered)
        torch.cuda.current_stream().wait_stream(stream)
        self._warm[clustered] = self._warm.get(clustered, 0) + 1
        if self._warm[clustered] < _WARM_UP:
            return
        self._graphs.clear()  # once clusters count, they go on counting: the memory of the other graph is free
        inputs = Batch(batch.position_B.clone(), None if batch.crops is None else tuple(c.clone() for c in batch.crops))  # pyright: ignore[reportArgumentType]
        graph = torch.cuda.CUDAGraph()
        # What is captured is not run: the weights are those after the step above.
        # Only this thread is watched: another may be pinning memory for the next batch, which is no part of it.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._update(inputs, clustered)
        self._graphs[clustered] = (graph, inputs)


@contextmanager
def _convolutions_tried() -> Iterator[None]:
    """Let cuDNN try its convolutions and keep the fastest: every step has the same sizes, a captured one keeps them.

    Only here: elsewhere sizes vary, and trying would take longer than it saves. Not where the user asked for
    convolutions that repeat themselves.
    """
    cudnn: Any = torch.backends.cudnn  # only partly typed
    before = cudnn.benchmark
    cudnn.benchmark = before or not (cudnn.deterministic or torch.are_deterministic_algorithms_enabled())
    try:
        yield
    finally:
        cudnn.benchmark = before


@contextmanager
def _without_advice() -> Iterator[None]:
    """Keep to ourselves what torch advises while it compiles and captures: its user can do nothing about it.

    That products in float32 could be rounded: those of the loss are small, and exact on purpose. That gradients arrive
    on another stream than the weights were made on: a step that is captured always runs on one of its own.
    """
    with warnings.catch_warnings():
        for message in ("TensorFloat32 tensor cores", "The AccumulateGrad node's stream does not match"):
            warnings.filterwarnings("ignore", message, UserWarning)
        yield


def freshly_compiled(function: Any) -> Any:
    """The function or method, to be compiled for the sizes it meets, with code of its own.

    torch counts how often code was compiled anew and gives up after eight times, for good: as many runs of different
    sizes in one process would be enough.
    """
    plain = getattr(function, "__func__", function)
    own = types.FunctionType(plain.__code__.replace(), plain.__globals__, plain.__name__, closure=plain.__closure__)
    own.__defaults__, own.__kwdefaults__ = plain.__defaults__, plain.__kwdefaults__
    bound = types.MethodType(own, function.__self__) if hasattr(function, "__self__") else own
    return torch.compile(bound, dynamic=False)


def _keep_compiled() -> None:
    """Have torch keep what it compiles with the user's caches: by default it is in a folder that a restart empties."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "siammm" / "inductor"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))


def _parallel(network: SiameseNetwork, device: torch.device) -> Any:
    """The network, its gradients averaged over the ranks where there are several."""
    if world_size() == 1:
        return network
    from torch.nn.parallel import DistributedDataParallel

    own = [device.index] if device.type == "cuda" else None
    # Buffers are each rank's copy of the same synchronised statistics; torch 2.15 renamed the switch.
    names = inspect.signature(DistributedDataParallel).parameters
    switch = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    settings: dict[str, Any] = {switch: False}
    return DistributedDataParallel(network, device_ids=own, **settings)


def _parts(batch: Batch, parts: int) -> Iterator[Batch]:
    if parts == 1:
        yield batch
        return
    crops = [None] * parts if batch.crops is None else zip(*(c.chunk(parts) for c in batch.crops), strict=True)
    for position_B, crop in zip(batch.position_B.chunk(parts), crops, strict=True):
        yield Batch(position_B, crop)


def _copy(batch: Batch, inputs: Batch) -> None:
    inputs.position_B.copy_(batch.position_B, non_blocking=True)
    if batch.crops is not None and inputs.crops is not None:
        for source, target in zip(batch.crops, inputs.crops, strict=True):
            target.copy_(source, non_blocking=True)


def _widest(device: torch.device) -> torch.dtype:
    """float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64
