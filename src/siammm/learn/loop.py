"""Algorithm 1: train an encoder and a mixture together.

Read ``Training.run``, ``train_epoch``, ``update`` and ``_optimiser_step``: that is all of it, in plain torch. The
gradient step is ``update``; on a GPU ``cuda/update.py`` compiles it and captures it as a CUDA graph. Checkpoints,
requests to stop and metrics are in ``bookkeeping.py``.

Everything that a run consists of is an attribute of ``Training`` and goes into its checkpoints (``state.py``), so that
a run that was stopped continues, on a CPU bit for bit: order and augmentation depend on the seed, the epoch and the
image alone.

Legend:  N images, B images of a batch, D dimensions; E encoder, E_m momentum encoder, g predictor.
"""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from siammm.core import ranks
from siammm.core.device import network_precision
from siammm.core.errors import ZeroRowWarning
from siammm.core.threads import all_threads, few_threads
from siammm.data import randomness
from siammm.data.loader import Batch, Loader
from siammm.data.sources import Source
from siammm.learn import bookkeeping, build, state
from siammm.learn.bank import Bank, shard
from siammm.learn.cuda import update as cuda
from siammm.learn.encode import encode
from siammm.learn.filling import fill_bank
from siammm.learn.finish import Trained, finish
from siammm.learn.grouping import Grouping
from siammm.learn.networks import Predictions
from siammm.learn.objective import Stage, batch_loss, draw_negatives
from siammm.learn.observers import Listener, Recorder, Silent
from siammm.learn.probing import Probes
from siammm.learn.schedule import Schedule
from siammm.learn.start import Start, check_opened
from siammm.learn.tally import Tally
from siammm.mixture.groups import check_number
from siammm.mixture.samples import Samples
from siammm.settings.training import TrainConfig

# The operations on whole lists of tensors have no types.
_torch = cast(Any, torch)


class Training:
    """One run: its networks, bank and mixture, and where in the schedule it is."""

    def __init__(
        self,
        config: TrainConfig,
        source: Source,
        device: torch.device,
        *,
        recorder: Recorder | None = None,
        listener: Listener | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
        start: Start | None = None,
        resume_from: tuple[dict[str, Tensor], dict[str, Any]] | None = None,
        carry_over: bool = False,
    ) -> None:
        """``start``: the weights that the settings ask to start from.

        ``resume_from``: a checkpoint; with ``carry_over`` its run goes on although the images have changed.
        """
        self.config, self.device, self.recorder, self.stop_requested = config, device, recorder, stop_requested
        self.listener: Listener = listener or Silent()
        if resume_from is None:
            check_opened(config, start)
        normalisation = state.normalisation(resume_from) if start is None else start.normalisation
        self.clean_view = build.clean_view(config, source, normalisation)
        """How an image is read without augmentation."""
        self.views = build.training_views(config, self.clean_view.size, normalisation)
        network = build.new_network(config, self.clean_view.size, self.views[0].size, start)
        # Reading may take long: what can be refused has been by now.
        self.loader: Loader = build.open_images(
            config,
            source,
            self.views,
            device,
            seed=config.run.random_state,
            image_size=self.clean_view.size,
            known_bad=None if resume_from is None or carry_over else dict(resume_from[1]["set_aside"]),
            progress=self.listener.reading,
        )
        n = self.loader.n_images
        build.check_same_images(n, device)
        if config.clustering.n_groups is not None:
            check_number(config.clustering.n_groups, n, name="--n-groups")
        self.batch_size = build.batch_size(config, n)
        build.check_queue(config, n)
        self.steps_per_epoch = n // self.batch_size
        self.network = build.placed(network, device)
        dim, accelerates = config.network.embedding_dim, cuda.available_for(config, device)
        self.bank = Bank(n, dim, device, rank=ranks.rank(), world_size=ranks.world_size())
        self.queue = build.new_queue(config, self.network, device)
        # Only the first is saved; the others are trained beside it.
        self.clusterings = build.clusterings(config, n, device)
        self.clustering = self.clusterings[0]
        self.grouping: Grouping | None = None
        """The groups, once they have been looked for and found."""
        self.schedule = Schedule(config, self.steps_per_epoch, self.batch_size, device)
        self.optimiser = build.optimiser(config, self.network, self.schedule.learning_rate, fused=accelerates)
        self.tally = Tally(device)
        self.autocast = network_precision(device, config.optimisation.precision) == "bf16"
        """Whether the networks compute in bf16."""
        self.pieces = cuda.Pieces(views=self.loader.views, loss=batch_loss)
        self.accelerated: cuda.AcceleratedUpdate | None = None
        if accelerates:
            starts = [clustering.n_start for clustering in self.clusterings]
            self.accelerated = cuda.AcceleratedUpdate(self.pieces, config, self.network, starts, device)
        self.online: Any = build.data_parallel(self.network, device)
        self.probes = Probes(config, self.loader, self.clean_view, device)
        self.epoch, self.step_in_epoch, self.seconds = 0, 0, 0.0
        self.log_likelihood = math.nan
        self.metrics: list[dict[str, Any]] = []
        self.saved_at = time.monotonic()
        self._clustered: tuple[int, Samples] | None = None
        if resume_from is not None:
            state.restore(self, *resume_from, carry_over=carry_over)
        if carry_over:
            self.save()  # before the run is said to be of these images: they and the checkpoint belong together
        if self.recorder is not None:
            self.recorder.begin(self.loader.set_aside)

    # -- Algorithm 1 --------------------------------------------------------------------------------------------------

    def run(self) -> Trained:
        """Train from where the run is to its end."""
        self.listener.began(self)
        with few_threads(self.device), randomness.torch_as_it_was(self.device):
            if self.epoch == 0 and self.step_in_epoch == 0:
                fill_bank(self)
            while self.epoch < self.config.optimisation.epochs:
                self.train_epoch()
        return self.finish()

    def train_epoch(self) -> None:
        """The E step and the M step, an update for each batch, and a round of merging."""
        started, first_step = time.monotonic(), self.step_in_epoch
        batches = bookkeeping.readable_batches(self, self.batches_of_rank(self.epoch)[first_step:], started)
        # Before anything changes: if it cannot be read, the run is saved as it is. None where all updates are done.
        first_batch = next(batches, None)
        if self.clustering_active and first_step == 0:
            # E step: assign the images to the centroids of the last epoch. M step: directions and concentrations.
            self.log_likelihood, *_ = [c.expectation_and_maximisation(self.samples()) for c in self.clusterings]
            self._group()
        if first_step == 0:
            self.tally.reset()
        self._clustered = None  # its memory is needed for the updates
        for batch in itertools.chain([] if first_batch is None else [first_batch], batches):
            number = self.epoch * self.steps_per_epoch + self.step_in_epoch
            self.step(batch, number, self.stage)
            self.step_in_epoch += 1
            self.listener.stepped(self.epoch, self.step_in_epoch, self.steps_per_epoch)
            bookkeeping.between_updates(self, started)
        bookkeeping.check_losses(self)
        if self.clustering_active:
            # Merge: join centroids that are close, by Eq. 11, or that the test of merge="auto" finds to be one.
            for clustering in self.clusterings:
                clustering.merge(self.samples(), self.group_directions)
        bookkeeping.end_of_epoch(self, time.monotonic() - started, self.steps_per_epoch - first_step)

    def step(self, batch: Batch, number: int, stage: Stage) -> None:
        """Do update ``number`` of the run; on a GPU through ``AcceleratedUpdate``, which captures ``update``."""
        self.schedule.set(number)
        config = self.config
        randomness.seed_torch(config.run.random_state, number, ranks.rank(), self.device)
        negatives = draw_negatives(config.objective, self.clusterings, config.run.random_state, number, self.device)
        if self.accelerated is None:
            self.update(batch, stage, negatives)
        else:
            self.accelerated(self.update, batch, stage, negatives)

    def update(self, batch: Batch, stage: Stage, negatives: Sequence[Tensor | None] | None) -> None:
        """One update of E, g and E_m. Never waits for the device, so that it can be captured.

        ``stage``: what counts in the loss. ``negatives``: for each clustering, the centroids that
        nce-centroids contrasts with, None for all.
        """
        config, parts = self.config, self.config.optimisation.accumulate
        self.optimiser.zero_grad()
        losses = torch.zeros_like(self.tally.totals[:3])
        for number, part in enumerate(batch.parts(parts), start=1):
            if ranks.world_size() > 1:
                # DDP averages the gradients of all parts over the ranks at once, while those of the last are computed.
                self.online.require_backward_grad_sync = number == parts
            # x_1, x_2 = aug(x), aug(x)
            x_1, x_2 = self.pieces.views(part, config.run.random_state, self.schedule.epoch)
            if self.device.type == "cuda":
                x_1, x_2 = (x.to(memory_format=torch.channels_last) for x in (x_1, x_2))
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
                # A GPU may put faster ones in place of the pieces: views, networks and loss (``cuda/update.py``).
                encode_views, noise = self.pieces.encode or self.encode, self._noise(part.position_B)
                predictions, (v_1m, v_2m) = encode_views(x_1, x_2, noise)
            # The loss of Eq. 13, given mu and kappa of the clusters that the images were assigned to.
            loss = self.pieces.loss(
                config.objective,
                predictions,
                (v_1m.float(), v_2m.float()),
                part.position_B,
                self.clusterings,
                clustered=stage >= Stage.CLUSTERS,
                grouping=self.grouping if stage == Stage.GROUPS else None,
                negatives=negatives,
                queued=None if self.queue is None else self.queue.read(self.network, self.schedule.epoch),
                temperature=self.schedule.temperature,
            )
            (loss.total / parts).backward()
            self.store_in_bank(part.position_B, v_1m, v_2m, queued=True)
            losses += torch.stack([loss.total, loss.instance, loss.cluster]).detach().to(losses) / parts
        self._optimiser_step(losses)

    def encode(
        self, x_1: Tensor, x_2: Tensor, noise: tuple[Tensor, Tensor] | None
    ) -> tuple[Predictions, tuple[Tensor, Tensor]]:
        """v_1, v_2 = g(E(x_1)), g(E(x_2)) with gradients, and v_1m, v_2m = E_m(x_1), E_m(x_2) without."""
        predictions = self.online(x_1, x_2, noise)
        return predictions, self.network.targets(x_1, x_2, predictions.z_1, predictions.z_2)

    @torch.no_grad()
    def _optimiser_step(self, losses: Tensor) -> None:
        """The optimiser's step of E and g, then the momentum step of E_m; neither, if anything is not finite."""
        if self.network.prototypes is not None and self.network.prototypes.weight.grad is not None:
            # The encoder finds its feet first: prototypes do not move for an epoch, as in SwAV.
            self.network.prototypes.weight.grad.mul_(self.schedule.epoch >= 1)
        gradients = [p.grad for group in self.optimiser.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(_torch._foreach_norm(gradients)))
        failed = (~torch.isfinite(norm + losses[0])).to(self.tally.failed)
        if ranks.world_size() > 1:
            dist.all_reduce(failed, dist.ReduceOp.MAX)
            dist.all_reduce(losses)
            losses = losses / ranks.world_size()
        self.tally.note(failed)
        self.optimiser.found_inf = self.tally.failed  # pyright: ignore[reportAttributeAccessIssue] - as torch's own scaler does
        self.optimiser.step()
        self.network.normalise_prototypes()
        momentum = self.schedule.momentum
        self.network.update_momentum(torch.where(self.tally.failed > 0, torch.ones_like(momentum), momentum))
        self.tally.add(losses, norm)

    def store_in_bank(self, position_B: Tensor, v_1m: Tensor, v_2m: Tensor, *, queued: bool = False) -> None:
        """Keep the momentum embeddings of a batch, of all ranks, for the next E step."""
        position_B, v_1m, v_2m = (ranks.all_gather_batch(rows) for rows in (position_B, v_1m.float(), v_2m.float()))
        self.bank.update(position_B, v_1m, v_2m)
        if queued and self.queue is not None:
            self.queue.push(v_1m, v_2m)

    def _noise(self, position_B: Tensor) -> tuple[Tensor, Tensor] | None:
        """Normal noise for what the predictor reads of each view; like the views, by seed, epoch and image."""
        deviation, dim = self.config.network.predictor_noise, self.network.encoder.embedding_dim
        if not deviation:
            return None
        first, second = (
            randomness.normals(self.config.run.random_state, self.schedule.epoch, position_B, stream, dim) * deviation
            for stream in randomness.NOISE_STREAMS
        )
        return first, second

    def _group(self) -> None:
        """Look for groups when it is time, and do their E and M step from then on."""
        clustering, epochs = self.config.clustering, self.config.optimisation.epochs
        begins = int(clustering.group_after * epochs)
        if clustering.group_after < 1 and self.epoch == begins:
            embedding_ND = ranks.all_gather_rows(self.clean_embeddings(), self.device)
            with all_threads():
                self.grouping = Grouping.found(embedding_ND, self.device, seed=self.config.run.random_state)
        if self.grouping is not None:
            progress = (self.epoch - begins) / max(1, epochs - begins)
            self.grouping.expectation_and_maximisation(self.samples(), progress=progress)

    @property
    def group_directions(self) -> Tensor | None:
        """The mean direction of each group, once there are groups."""
        return None if self.grouping is None else self.grouping.mu_GD

    @property
    def stage(self) -> Stage:
        """What counts in the loss of this epoch."""
        if self.grouping is not None:
            return Stage.GROUPS
        return Stage.CLUSTERS if self.clustering_active else Stage.INSTANCES

    @property
    def clustering_active(self) -> bool:
        """Whether the mixture's clusters are part of this epoch."""
        return self.config.objective.uses_mixture and self.epoch >= self.first_clustered

    @property
    def first_clustered(self) -> int:
        """The first epoch in which the clusters count."""
        return int(self.config.clustering.cluster_after * self.config.optimisation.epochs)

    def batches_of_rank(self, epoch: int) -> list[Tensor]:
        """The images of each update of an epoch, this rank's part; a rest that fills no batch is left out."""
        order = randomness.permutation(self.config.run.random_state, epoch, self.loader.n_images)
        return self.split(order[: self.steps_per_epoch * self.batch_size])

    def split(self, order: Tensor) -> list[Tensor]:
        """An order of images as batches, this rank's part of each."""
        first, last = shard(self.batch_size, ranks.rank(), ranks.world_size())
        return [group[first:last] for group in order.split(self.batch_size)]

    # -- embeddings ---------------------------------------------------------------------------------------------------

    def samples(self) -> Samples:
        """What is clustered: the bank, or a clean pass over the images. This rank's shard, joined with the others.

        Between the last update of an epoch and the first of the next nothing changes, so they are computed once.
        """
        updates = self.epoch * self.steps_per_epoch + self.step_in_epoch
        if self._clustered is None or self._clustered[0] != updates:
            self._clustered = None  # the old ones go before the new ones come
            if self.config.clustering.embeddings == "clean" and updates:
                # In the precision of the updates, as in the bank; float32 is several times slower on a GPU.
                embedding_ND = self.clean_embeddings(autocast=self.autocast)
            else:
                self.bank.check()
                embedding_ND = self.bank.embeddings()
            self._clustered = (updates, self.joined(embedding_ND))
        return self._clustered[1]

    def joined(self, embedding_ND: Tensor) -> Samples:
        """This rank's embeddings as samples of the joint mixture."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ZeroRowWarning)  # rows without a direction are for the guard to judge
            samples = Samples(embedding_ND, device=self.device, unit=True, name="the bank")
        samples.join_ranks()
        return samples

    def clean_embeddings(self, *, autocast: bool = False) -> Tensor:
        """Unit embeddings of this rank's images without augmentation, by the encoder that fills the bank."""
        first, last = self.bank.first, self.bank.last
        return encode(self.network, self.loader, "embeddings", first=first, last=last, autocast=autocast)

    def finish(self) -> Trained:
        """Settle the mixture on the embeddings of the images without augmentation."""
        return finish(self)

    def save(self) -> None:
        """Write a checkpoint, unless something in it is not finite."""
        self.saved_at = time.monotonic()
        state.save(self)

    def close(self) -> None:
        """Stop the worker processes."""
        self.loader.close()
        self.probes.close()
