"""Algorithm 1: train an encoder and a mixture together.

Read ``Training.run``, ``update`` and ``_optimiser_step``: that is all of it, in plain torch. On a GPU
``cuda/update.py`` compiles ``update`` and captures it as a CUDA graph. Everything that a run consists of is an
attribute of ``Training`` and goes into its checkpoints (``state.py``), so that a run that was stopped continues, on a
CPU bit for bit: order and augmentation depend on the seed, the epoch and the image alone.

Legend:  N images, B images of a batch, D dimensions; E encoder, E_m momentum encoder, g predictor.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from siammm.core import ranks
from siammm.core.device import network_precision
from siammm.core.errors import ZeroRowWarning
from siammm.data import randomness
from siammm.data.loader import Batch, Loader, ReaderError
from siammm.data.sources import Source
from siammm.learn import build, guard, state
from siammm.learn.bank import Bank, shard
from siammm.learn.cuda import update as cuda
from siammm.learn.encode import encode
from siammm.learn.finish import Trained, finish
from siammm.learn.grouping import Grouping
from siammm.learn.guard import CollapseError, Health
from siammm.learn.networks import Predictions
from siammm.learn.objective import Stage, batch_loss, draw_negatives
from siammm.learn.observers import Listener, Recorder, Silent
from siammm.learn.probing import Probes
from siammm.learn.schedule import Schedule
from siammm.learn.start import Start, check_opened
from siammm.learn.tally import Tally
from siammm.mixture.samples import Samples
from siammm.settings.training import TrainConfig

# The operations on whole lists of tensors have no types.
_torch = cast(Any, torch)

# On a GPU the host looks at the losses this often; on a CPU, after every update.
_STEPS_BETWEEN_CHECKS = 50
# Images of a batch that a message names.
_NAMED = 3


class Interrupted(Exception):  # noqa: N818 - a request, not an error
    """The user or the system asked to stop; everything is saved, if there was anything to save."""

    def __init__(self, *, began: bool = True) -> None:
        super().__init__()
        self.began = began


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
        self._saved_at = time.monotonic()
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
        if self.epoch == 0 and self.step_in_epoch == 0:
            self.fill_bank()
        while self.epoch < self.config.optimisation.epochs:
            started, first_step = time.monotonic(), self.step_in_epoch
            batches = self._batches(self.batches_of_rank(self.epoch)[first_step:], started)
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
                self._between_updates(started)
            self.check_losses()
            if self.clustering_active:
                # Merge: join centroids that are close, by Eq. 11, or that the test of merge="auto" finds to be one.
                for clustering in self.clusterings:
                    clustering.merge(self.samples(), self.group_directions)
            self._end_of_epoch(time.monotonic() - started, self.steps_per_epoch - first_step)
        return self.finish()

    def step(self, batch: Batch, number: int, stage: Stage) -> None:
        """Do update ``number`` of the run; on a GPU through ``AcceleratedUpdate``, which captures ``update``."""
        self.schedule.set(number)
        config = self.config
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
        for part in _in_parts(batch, parts):
            # x_1, x_2 = aug(x), aug(x)
            x_1, x_2 = self.pieces.views(part, config.run.random_state, self.schedule.epoch)
            if self.device.type == "cuda":
                x_1, x_2 = (x.to(memory_format=torch.channels_last) for x in (x_1, x_2))
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
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
            self._store_in_bank(part.position_B, v_1m, v_2m, queued=True)
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

    def _store_in_bank(self, position_B: Tensor, v_1m: Tensor, v_2m: Tensor, *, queued: bool = False) -> None:
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
        return self._split(order[: self.steps_per_epoch * self.batch_size])

    def _split(self, order: Tensor) -> list[Tensor]:
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

    @torch.no_grad()
    def fill_bank(self) -> None:
        """Embed two views of every image before the first update.

        By the statistics of each batch: the running ones of a new network mean nothing yet.
        """
        never = self.config.optimisation.epochs  # order and views of an epoch that is never trained
        # Shuffled, because a folder comes class by class; the last batch is filled up with images from the start.
        every = randomness.permutation(self.config.run.random_state, never, self.loader.n_images)
        every = torch.cat([every, every[: -len(every) % self.batch_size]])
        encoder = self.network.momentum_encoder or self.network.encoder
        with _frozen_statistics(self.network):
            batches = self._split(every)
            for done, batch in enumerate(self.loader.batches(never, batches), 1):
                for part in _in_parts(batch, self.config.optimisation.accumulate):
                    x_1, x_2 = self.loader.views(part, self.config.run.random_state, never)
                    with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
                        # Not by calling it: this is done once, which does not pay for compiling.
                        v_1m, v_2m = encoder.forward(x_1), encoder.forward(x_2)
                    self._store_in_bank(part.position_B, v_1m, v_2m)
                self.listener.embedded(done, len(batches))
                if self._any_rank(self.stop_requested()):
                    raise Interrupted(began=False)

    # -- checks and checkpoints ---------------------------------------------------------------------------------------

    def _batches(self, positions: Sequence[Tensor], started: float) -> Iterator[Batch]:
        """The batches of an epoch; if they cannot be read any longer, what was learned is saved."""
        try:
            yield from self.loader.batches(self.epoch, positions)
        except ReaderError:
            # All ranks save together, and the others know nothing of this.
            if self.epoch + self.step_in_epoch and not ranks.active():
                self._save_within_epoch(started)
            raise

    def _save_within_epoch(self, started: float) -> None:
        seconds, self.seconds = self.seconds, self.seconds + time.monotonic() - started
        self.save()
        self.seconds = seconds

    def _between_updates(self, started: float) -> None:
        """Is the loss still finite, is it time to save, does anybody want us to stop?"""
        if self.device.type == "cuda" and self.step_in_epoch % _STEPS_BETWEEN_CHECKS:
            return
        self.check_losses()
        stop, due = self._any_rank(self.stop_requested()), self._any_rank(self._save_is_due())
        if (stop or due) and self.step_in_epoch < self.steps_per_epoch:
            self._save_within_epoch(started)
            if stop:
                raise Interrupted

    def check_losses(self) -> None:
        """Stop if a loss or gradient was not finite: no weight has changed since."""
        update = self.tally.failed_update()
        if update is None:
            return
        order = randomness.permutation(self.config.run.random_state, self.epoch, self.loader.n_images)
        batch = order[(update - 1) * self.batch_size : update * self.batch_size]
        names = [self.loader.source.identifier(int(self.loader.sample_N[i])) for i in batch[:_NAMED].tolist()]
        raise CollapseError(
            f"The loss or its gradient is no longer finite in update {update:,} of epoch {self.epoch + 1} "
            f"({len(batch)} images: {', '.join(names)} ...), so training stopped before the weights changed; start "
            "again with a lower --learning-rate, or with --precision fp32."
        )

    def _end_of_epoch(self, seconds: float, n_updates: int) -> None:
        """Measure, save, go on to the next epoch; or stop, if the encoder has collapsed."""
        means = self.tally.means()
        if not self.clustering_active and self.config.objective.cluster_loss != "swapped":
            del means["cluster_loss"]
        health = Health.of(self.samples(), self.clustering.components)
        self.seconds += seconds
        self.epoch, self.step_in_epoch = self.epoch + 1, 0
        rate = n_updates * self.batch_size / max(seconds, 1e-9)
        row = {"epoch": self.epoch, **means, **health.as_metrics(), "seconds": seconds, "images_per_second": rate}
        if self.clustering.components is not None:
            row |= {"n_clusters": self.clustering.n_components, "log_likelihood": self.log_likelihood}
        if self.grouping is not None:
            row |= {"n_groups": self.grouping.n_groups}
        if self.probes.is_due(self.epoch):
            row |= self.probes.measured(self.network, self.clustering, self.samples, autocast=self.autocast)
        self.metrics.append(row)
        if self.recorder is not None:
            self.recorder.add_metrics(row)
        self.listener.finished_epoch(row)
        problem = guard.diagnose(health, self.loader.n_images)
        if problem is not None:
            raise CollapseError(problem)
        stop, over = self._any_rank(self.stop_requested()), self.epoch == self.config.optimisation.epochs
        if stop or self._any_rank(self._save_is_due()) or over:
            self.save()
        if stop and not over:
            raise Interrupted

    def finish(self) -> Trained:
        """Settle the mixture on the embeddings of the images without augmentation."""
        return finish(self)

    def save(self) -> None:
        """Write a checkpoint, unless something in it is not finite."""
        self._saved_at = time.monotonic()
        state.save(self)

    def close(self) -> None:
        """Stop the worker processes."""
        self.loader.close()
        self.probes.close()

    def _save_is_due(self) -> bool:
        return self.recorder is not None and time.monotonic() - self._saved_at > 60 * self.config.run.save_every

    def _any_rank(self, wish: bool) -> bool:
        """Whether any rank wishes it: all must do it together."""
        return any(ranks.all_gather_counts(int(wish), self.device))


def _in_parts(batch: Batch, parts: int) -> Iterator[Batch]:
    if parts == 1:
        yield batch
        return
    crops = [None] * parts if batch.crops is None else zip(*(c.chunk(parts) for c in batch.crops), strict=True)
    for position_B, crop in zip(batch.position_B.chunk(parts), crops, strict=True):
        yield Batch(position_B, crop)


@contextlib.contextmanager
def _frozen_statistics(network: nn.Module) -> Iterator[None]:
    """Normalise by each batch, and leave no trace of it in the running statistics."""
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    try:
        yield
    finally:
        for name, buffer in network.named_buffers():
            buffer.copy_(buffers[name])
