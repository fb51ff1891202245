"""The accelerated twin of ``Training.update``: the same update, compiled, fused and captured as a CUDA graph.

- Views, loss and networks are compiled by ``torch.compile`` (setting ``compile``).
- Both views go through the networks in one batch, BatchNorm by fused kernels (setting ``fused``), also on several GPUs.
- The momentum encoder follows the online one by one kernel; on one GPU it runs beside it, on a second stream.
- On one GPU the whole update is captured once and replayed, so that launching its kernels costs nothing.
"""

from __future__ import annotations

import os
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from siammm.core.ranks import world_size
from siammm.data.loader import Batch
from siammm.learn.cuda import triton_support
from siammm.learn.cuda.fused import fuse
from siammm.learn.cuda.update_kernels import FollowKernel
from siammm.learn.networks import SiameseNetwork
from siammm.learn.objective import Stage
from siammm.settings.training import TrainConfig

Update = Callable[[Batch, Stage, Sequence[Tensor | None] | None], None]

# Updates before a capture, on a stream of their own: compilation and cuDNN's choices happen here.
_WARM_UP = 3


@dataclass
class Pieces:
    """The parts of an update that have an accelerated form."""

    views: Callable[..., Any]
    """Two views of a batch: ``Loader.views``."""
    loss: Callable[..., Any]
    """The loss of a batch: ``batch_loss``."""
    encode: Callable[..., Any] | None = None
    """Predictions and targets of two views, in place of ``Training.encode``."""


def available_for(config: TrainConfig, device: torch.device) -> bool:
    """Whether to accelerate training: on a GPU, and wherever ``compile`` or ``fused`` asks for it."""
    return device.type == "cuda" or bool(config.optimisation.compile or config.optimisation.fused)


class AcceleratedUpdate:
    """Accelerates the pieces of an update and the network, and runs updates, captured where that is possible."""

    def __init__(
        self, pieces: Pieces, config: TrainConfig, network: SiameseNetwork, starts: Sequence[int], device: torch.device
    ) -> None:
        """``starts``: the number of components that each clustering starts from."""
        self._network, optimisation, objective = network, config.optimisation, config.objective
        self.compiled = device.type == "cuda" if optimisation.compile is None else optimisation.compile
        if self.compiled:
            _keep_compiled()
            pieces.views = freshly_compiled(pieces.views)
        fuses = optimisation.fused
        if fuses is None:
            fuses = device.type == "cuda" and triton_support.available()
        if not (fuses and fuse(network)) and self.compiled:
            # Each part by itself: compiled once, it serves both views, and takes half as long as the two in one piece.
            for part in (network.encoder, network.predictor, network.momentum_encoder):
                if part is not None:
                    part.compile(dynamic=False)
        network.follow = FollowKernel()
        # Contrasting with a changing K, or with centroids that are drawn for each update, cannot be captured.
        changing = objective.cluster_loss == "nce-centroids" and (
            config.clustering.merge != "none" or max(starts) > objective.n_negatives
        )
        self.captures = device.type == "cuda" and world_size() == 1 and not changing
        # The loss is a hundred operations on a few thousand numbers: compiled, a dozen kernels. Not where its sizes
        # change from epoch to epoch, which would be compiled anew, nor where ranks communicate within it.
        if self.compiled and world_size() == 1 and not changing:
            pieces.loss = freshly_compiled(pieces.loss)
        self.side_stream: torch.cuda.Stream | None = None
        if self.captures and network.momentum_encoder is not None:
            self.side_stream = torch.cuda.Stream(device)
            pieces.encode = self._encode_side_by_side
        # The graph of an update depends on what counts in its loss.
        self.graphs: dict[Stage, tuple[torch.cuda.CUDAGraph, Batch]] = {}
        self._warm: dict[Stage, int] = {}

    def __call__(self, update: Update, batch: Batch, stage: Stage, negatives: Sequence[Tensor | None] | None) -> None:
        """Do one update by ``Training.update``, which is an argument so that a training does not refer to itself."""
        if not self.captures:
            first = stage not in self._warm  # which may be compiled
            with _without_advice() if first else nullcontext():
                update(batch, stage, negatives)
            self._warm[stage] = 1
        elif stage in self.graphs:
            graph, inputs = self.graphs[stage]
            _copy(batch, inputs)
            graph.replay()
        else:
            with _convolutions_tried(), _without_advice():
                self._warm_up_or_capture(update, batch, stage)

    def _encode_side_by_side(self, x_1: Tensor, x_2: Tensor, noise: tuple[Tensor, Tensor] | None) -> Any:
        """``Training.encode`` with the two encoders on two streams: what either leaves idle, the other uses."""
        if self.side_stream is None:
            predictions = self._network(x_1, x_2, noise)
            return predictions, self._network.targets(x_1, x_2, predictions.z_1, predictions.z_2)
        here = torch.cuda.current_stream()
        self.side_stream.wait_stream(here)
        with torch.cuda.stream(self.side_stream):
            targets = self._network.followed(x_1, x_2)
        predictions = self._network(x_1, x_2, noise)
        # Each stream waits for the other before it continues, so that no memory is reused too early.
        here.wait_stream(self.side_stream)
        return predictions, targets

    def _warm_up_or_capture(self, update: Update, batch: Batch, stage: Stage) -> None:
        """Run a few real updates on a side stream, then capture the one that all others replay."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            update(batch, stage, None)
        torch.cuda.current_stream().wait_stream(stream)
        self._warm[stage] = self._warm.get(stage, 0) + 1
        if self._warm[stage] < _WARM_UP:
            return
        self.graphs.clear()  # a stage that is over does not come back: the memory of its graph is free
        inputs = Batch(batch.position_B.clone(), None if batch.crops is None else tuple(c.clone() for c in batch.crops))  # pyright: ignore[reportArgumentType]
        graph = torch.cuda.CUDAGraph()
        # What is captured is not run: the weights are those after the update above.
        # Only this thread is watched: another may be pinning memory for the next batch, which is no part of it.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            update(inputs, stage, None)
        self.graphs[stage] = (graph, inputs)


@contextmanager
def _convolutions_tried() -> Iterator[None]:
    """Let cuDNN try its convolutions and keep the fastest, unless the user asked for deterministic ones.

    Only for an update that is captured: elsewhere sizes vary, and trying would take longer than it saves.
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
    """Suppress torch's advice to round products (those of the loss are exact on purpose) and about streams."""
    with warnings.catch_warnings():
        for message in ("TensorFloat32 tensor cores", "The AccumulateGrad node's stream does not match"):
            warnings.filterwarnings("ignore", message, UserWarning)
        yield


def freshly_compiled(function: Any) -> Any:
    """The function or method, compiled for the sizes it meets, with a code object of its own.

    torch counts how often a code object was compiled anew and gives up after eight times, for good: as many runs of
    different sizes in one process would be enough.
    """
    plain = getattr(function, "__func__", function)
    own = types.FunctionType(plain.__code__.replace(), plain.__globals__, plain.__name__, closure=plain.__closure__)
    own.__defaults__, own.__kwdefaults__ = plain.__defaults__, plain.__kwdefaults__
    bound = types.MethodType(own, function.__self__) if hasattr(function, "__self__") else own
    return torch.compile(bound, dynamic=False)


def _keep_compiled() -> None:
    """Have torch keep what it compiles in the user's cache: its default is a folder that a restart empties."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "siammm" / "inductor"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))


def _copy(batch: Batch, inputs: Batch) -> None:
    inputs.position_B.copy_(batch.position_B, non_blocking=True)
    if batch.crops is not None and inputs.crops is not None:
        for source, target in zip(batch.crops, inputs.crops, strict=True):
            target.copy_(source, non_blocking=True)
