"""Algorithm 1: train an encoder and a mixture together.

Read ``Training.run`` first: E step and M step from the last epoch's centroids, an epoch of updates, merge. All that a
run consists of is in ``Training``, and all of it goes into a checkpoint, so that a run that was stopped goes on (on a
CPU, with the same build, bit for bit): orders and augmentations depend on the seed, the epoch and the image alone.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from siammm.core import ranks
from siammm.core.errors import InputError, ZeroRowWarning
from siammm.data import randomness
from siammm.data.loader import Loader, open_loader
from siammm.data.sources import Source
from siammm.data.view_settings import ViewSettings, views
from siammm.learn import build, checkpoint, guard
from siammm.learn.bank import Bank, shard
from siammm.learn.batchnorm import synchronised
from siammm.learn.clustering import Clustering
from siammm.learn.encode import encode
from siammm.learn.guard import CollapseError, Health
from siammm.learn.networks import SiameseNetwork
from siammm.learn.observers import Listener, Recorder, Silent
from siammm.learn.optim import build_optimiser, learning_rate
from siammm.learn.probing import Probes
from siammm.learn.step import Step
from siammm.metrics.clustering import clustering_scores
from siammm.metrics.outliers import outlier_score
from siammm.mixture.estimator import VonMisesFisherMixture
from siammm.mixture.groups import Groups
from siammm.mixture.groups import found as find_groups
from siammm.mixture.samples import Samples
from siammm.settings.training import TrainConfig

# On a GPU the host looks at the losses this often; on a CPU, after every step.
_STEPS_BETWEEN_CHECKS = 50


class Interrupted(Exception):  # noqa: N818 - a wish, not an error
    """The user or the system asked to stop; everything is saved, if there was anything to save."""

    def __init__(self, *, began: bool = True) -> None:
        super().__init__()
        self.began = began


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Everything that a run leaves. What describes clusters is None for a run without them."""

    network: SiameseNetwork
    config: TrainConfig
    clean_view: ViewSettings
    """How an image is read without augmentation."""
    ids: list[str]
    """The images, in the order of all rows below."""
    label_values: Sequence[Any] | None
    """Their labels, by name where the labels have names; None if the images have no labels."""
    embeddings: np.ndarray
    """Embeddings of the images without augmentation, of unit length."""
    mixture: VonMisesFisherMixture | None = None
    clusters: np.ndarray | None = None
    """The cluster of each image."""
    probability: np.ndarray | None = None
    """Its share in that cluster."""
    outlier_score: np.ndarray | None = None
    groups: Groups | None = None
    """Which clusters belong together."""
    merge_nodes: list[int] | None = None
    """The node of each cluster in the tree of merges."""
    metrics: list[dict[str, Any]]
    """What was measured, one row per epoch."""


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
        resume_from: tuple[dict[str, Tensor], dict[str, Any]] | None = None,
    ) -> None:
        self.config, self.device, self.recorder = config, device, recorder
        self.listener: Listener = listener or Silent()
        self.stop_requested = stop_requested
        self.clean_view = views(build.image_size(config, source), config.views.augmentation)[0]
        """How an image is read without augmentation."""
        self.views = build.training_views(config, self.clean_view.size)
        seed = config.run.random_state
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network = build.build_network(config, self.clean_view.size)
        if self.views[0].size != self.clean_view.size:
            build.check_takes_sizes(self.network, config.network.backbone, self.views[0].size, self.clean_view.size)
        # Reading may take long: what can be refused has been by now.
        self.loader: Loader = open_loader(
            source,
            self.views,
            device,
            kind=config.reading.loader,
            seed=seed,
            image_size=self.clean_view.size,
            workers=config.reading.workers,
            limit=config.reading.max_bad_images,
            known_bad=None if resume_from is None else dict(resume_from[1]["set_aside"]),
            image_cache=config.run.image_cache,
            progress=self.listener.reading,
        )
        n = self.loader.n_images
        counts = ranks.all_gather_counts(n, device)
        if len(set(counts)) > 1:
            raise InputError(
                f"The processes can read different numbers of images ({', '.join(map(str, counts))}); give all of them "
                "the same files."
            )
        self.batch_size = build.batch_size(config, n)
        build.check_queue(config, n)
        self.steps_per_epoch = n // self.batch_size
        self.total_steps = self.steps_per_epoch * config.optimisation.epochs
        self.network = self.network.to(device)
        if device.type == "cuda":
            self.network = self.network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        if ranks.world_size() > 1:
            self.network = cast(SiameseNetwork, synchronised(self.network))
        self.network.train()
        rank, world = ranks.rank(), ranks.world_size()
        self.bank = Bank(n, config.network.embedding_dim, device, rank=rank, world_size=world)
        # The first is what a run leaves; the others only train with it.
        self.clusterings = [
            Clustering(
                k,
                n,
                config.network.embedding_dim,
                device,
                objective=config.objective,
                settings=config.clustering,
                seed=seed + number,
            )
            for number, k in enumerate(build.n_components(config, n))
        ]
        self.clustering = self.clusterings[0]
        self.optimiser = build_optimiser(
            config.optimisation.optimiser,
            self.network,
            lr=config.optimisation.learning_rate,
            weight_decay=config.optimisation.weight_decay,
            momentum=config.optimisation.momentum,
            trust_coefficient=config.optimisation.trust_coefficient,
            turned=self.network.encoder.backbone,
        )
        self.step = Step(config, self.network, self.optimiser, self.loader, self.bank, self.clusterings, device)
        self.epoch, self.step_in_epoch = 0, 0
        self.seconds = 0.0
        self.log_likelihood = math.nan
        self.metrics: list[dict[str, Any]] = []
        self._saved_at = time.monotonic()
        self._clustered: tuple[int, Samples] | None = None
        self._probes = Probes(config, self.loader, self.clean_view, device)
        if resume_from is not None:
            self.restore(*resume_from)
        if self.recorder is not None:
            self.recorder.begin(self.loader.set_aside)

    # -- Algorithm 1 --------------------------------------------------------------------------------------------------

    def run(self) -> Trained:
        """Train from where the run is to its end."""
        self.listener.began(self)
        if self.epoch == 0 and self.step_in_epoch == 0:
            self._fill_bank()
        while self.epoch < self.config.optimisation.epochs:
            started = time.monotonic()
            if self._clusters_count and self.step_in_epoch == 0:
                # E step: share the images among the centroids of the last epoch. M step: directions and concentrations.
                self.log_likelihood, *_ = [c.expectation_and_maximisation(self._samples()) for c in self.clusterings]
            n_updates = self.steps_per_epoch - self.step_in_epoch
            self._updates(started)
            if self._clusters_count:
                # Merge: join the centroids that are close, by Eq. 11 or by the test of merge="auto".
                for clustering in self.clusterings:
                    clustering.merge(self._samples())
            self._end_of_epoch(time.monotonic() - started, n_updates)
        return self.finish()

    @property
    def _clusters_count(self) -> bool:
        """Whether the mixture's clusters are part of this epoch."""
        return self.config.objective.uses_mixture and self.epoch >= self.first_clustered

    @property
    def first_clustered(self) -> int:
        """The epoch before which the clusters do not count."""
        return int(self.config.clustering.cluster_after * self.config.optimisation.epochs)

    def _updates(self, started: float) -> None:
        """The epoch's updates of the encoder, from the first that has not been done."""
        if self.step_in_epoch == 0:
            self.step.reset()
        optimisation = self.config.optimisation
        groups = self._groups(self.epoch)[self.step_in_epoch :]
        self._clustered = None  # the memory is needed for other things now
        for batch in self.loader.batches(self.epoch, [self._mine(group) for group in groups]):
            number = self.epoch * self.steps_per_epoch + self.step_in_epoch
            self.step(
                batch,
                epoch=self.epoch,
                rate=learning_rate(
                    number,
                    self.total_steps,
                    round(min(optimisation.warmup_epochs, optimisation.epochs / 2) * self.steps_per_epoch),
                    optimisation.learning_rate,
                    self.batch_size,
                ),
                number=number,
                total=self.total_steps,
                clustered=self._clusters_count,
            )
            self.step_in_epoch += 1
            self.listener.stepped(self.epoch, self.step_in_epoch, self.steps_per_epoch)
            self._look_up(started)
        self.step.check()

    def _look_up(self, started: float) -> None:
        """Between two updates: is the loss still finite, is it time to save, does anybody want us to stop?"""
        if self.device.type == "cuda" and self.step_in_epoch % _STEPS_BETWEEN_CHECKS:
            return
        self.step.check()
        stop, late = self._agreed(self.stop_requested()), self._agreed(self._due())
        if (stop or late) and self.step_in_epoch < self.steps_per_epoch:
            seconds, self.seconds = self.seconds, self.seconds + time.monotonic() - started
            self.save()
            self.seconds = seconds
            if stop:
                raise Interrupted

    def _end_of_epoch(self, seconds: float, n_updates: int) -> None:
        """Measure, save, go on to the next; or stop, if the encoder has collapsed."""
        means = self.step.means()
        if not self._clusters_count and self.config.objective.cluster_loss != "swapped":
            del means["cluster_loss"]
        samples = self._samples()
        health = self._health(samples)
        self.seconds += seconds
        self.epoch, self.step_in_epoch = self.epoch + 1, 0
        row: dict[str, Any] = {
            "epoch": self.epoch,
            **means,
            **health.as_metrics(),
            "seconds": seconds,
            "images_per_second": n_updates * self.batch_size / max(seconds, 1e-9),
        }
        if self.clustering.components is not None:
            row |= {"n_clusters": self.clustering.n_components, "log_likelihood": self.log_likelihood}
        if self._probes.is_due(self.epoch):
            row |= self.probe()
        self.metrics.append(row)
        problem = guard.diagnose(health, self.loader.n_images)
        if self.recorder is not None:
            self.recorder.add_metrics(row)
        self.listener.finished_epoch(row)
        if problem is not None:
            raise CollapseError(problem)
        stop = self._agreed(self.stop_requested())
        if stop or self._agreed(self._due()) or self.epoch == self.config.optimisation.epochs:
            self.save()
        if stop and self.epoch < self.config.optimisation.epochs:
            raise Interrupted

    def finish(self) -> Trained:
        """Settle the mixture on the embeddings of the images as they are, without augmentation."""
        embedding_ND = self._clean_embeddings()
        labels, names = self.loader.labels, self.loader.source.label_names
        trained = Trained(
            network=self.network,
            config=self.config,
            clean_view=self.clean_view,
            ids=self.loader.identifiers(),
            label_values=labels if labels is None or names is None else [names[code] for code in labels],
            embeddings=self._of_all(embedding_ND),
            metrics=self.metrics,
        )
        if self.clustering.components is None:
            return trained
        mixture = self.clustering.finish(self._joined(embedding_ND), embedding_ND)
        share = mixture.predict_proba(embedding_ND.cpu().numpy()).max(axis=1).toarray().ravel()
        density_N = torch.as_tensor(mixture.score_samples(embedding_ND))
        return replace(
            trained,
            mixture=mixture,
            clusters=self._of_all(torch.as_tensor(mixture.labels_).to(self.device)),
            probability=self._of_all(torch.from_numpy(np.asarray(share, dtype=np.float32)).to(self.device)),
            outlier_score=outlier_score(self._of_all(density_N.to(self.device))),
            groups=self._grouped(mixture, embedding_ND),
            merge_nodes=self.clustering.history.as_tensors()["node"].tolist(),
        )

    def _grouped(self, mixture: VonMisesFisherMixture, embedding_ND: Tensor) -> Groups:
        """Which clusters belong together, by the images of all ranks; only of clusters that are apart by our test."""
        k = int(mixture.n_components_)
        if self.config.clustering.merge != "auto":
            return Groups.none(k)
        index_N2 = self._of_all(torch.as_tensor(mixture.nearest(embedding_ND)).to(self.device))
        return find_groups(index_N2[:, 0], index_N2[:, -1], k)

    # -- embeddings ---------------------------------------------------------------------------------------------------

    def _samples(self) -> Samples:
        """What is clustered: the bank, or a clean pass over the images. This rank's shard, joined with the others.

        Between the last update of an epoch and the first of the next nothing changes, and one look serves all.
        """
        updates = self.epoch * self.steps_per_epoch + self.step_in_epoch
        if self._clustered is None or self._clustered[0] != updates:
            self._clustered = None  # the old ones go before the new ones come
            if self.config.clustering.embeddings == "clean" and updates:
                embedding_ND = self._clean_embeddings()
            else:
                self.bank.check()
                embedding_ND = self.bank.embeddings()
            self._clustered = (updates, self._joined(embedding_ND))
        return self._clustered[1]

    def _joined(self, embedding_ND: Tensor) -> Samples:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ZeroRowWarning)  # rows without a direction are for the guard to judge
            samples = Samples(embedding_ND, device=self.device, unit=True, name="the bank")
        samples.join_ranks()
        return samples

    @torch.no_grad()
    def _fill_bank(self) -> None:
        """Embed two views of every image before the first update, with the statistics of batches: the running ones of a
        new network mean nothing yet.
        """
        never = self.config.optimisation.epochs  # order and views of an epoch that is never trained
        # Mixed, because a folder comes class by class; the last batch is filled up with images that were there before.
        every = randomness.permutation(self.config.run.random_state, never, self.loader.n_images)
        short = -len(every) % self.batch_size
        groups = list(torch.cat([every, every[:short]]).split(self.batch_size))
        with _frozen_statistics(self.network):
            for batch in self.loader.batches(never, [self._mine(group) for group in groups]):
                self.step.embed(batch, never)
                if self._agreed(self.stop_requested()):
                    raise Interrupted(began=False)

    def _clean_embeddings(self) -> Tensor:
        """Unit embeddings of this rank's images without augmentation, by the encoder that made the bank."""
        return encode(self.network, self.loader, "embeddings", first=self.bank.first, last=self.bank.last)

    def close(self) -> None:
        """Let worker processes go."""
        self.loader.close()
        self._probes.close()

    def _of_all(self, rows: Tensor) -> np.ndarray:
        return ranks.all_gather_rows(rows, self.device).cpu().numpy()

    # -- the order of an epoch ----------------------------------------------------------------------------------------

    def _groups(self, epoch: int) -> list[Tensor]:
        """The images of each update of an epoch, over all ranks; a rest that fills no batch waits for the next."""
        order = randomness.permutation(self.config.run.random_state, epoch, self.loader.n_images)
        return list(order[: self.steps_per_epoch * self.batch_size].split(self.batch_size))

    def _mine(self, group: Tensor) -> Tensor:
        """This rank's part of a batch."""
        first, last = shard(len(group), ranks.rank(), ranks.world_size())
        return group[first:last]

    # -- looking after it ---------------------------------------------------------------------------------------------

    def _health(self, samples: Samples) -> Health:
        effective_rank, deviation = guard.spread(samples)
        components = self.clustering.components
        if components is None:
            return Health(effective_rank=effective_rank, deviation=deviation)
        return Health(
            effective_rank=effective_rank,
            deviation=deviation,
            occupied=int((components.weight_K > 0).sum()),
            least_concentration=float(components.kappa_K.min()),
            largest_concentration=float(components.kappa_K.max()),
        )

    def probe(self) -> dict[str, float]:
        """How good the features and clusters are by the labels, and how long it took to find out; trains nothing."""
        started = time.monotonic()
        found = self._probes.measured(self.network, autocast=self.step.autocast)
        own = self.loader.labels
        if own is not None and self.clustering.components is not None:
            scores = clustering_scores(own, self._of_all(self.clustering.nearest(self._samples())))
            found |= {"ami": scores.ami, "majority_accuracy": scores.majority_accuracy}
        return found | {"probe_seconds": time.monotonic() - started}

    def _due(self) -> bool:
        return self.recorder is not None and time.monotonic() - self._saved_at > 60 * self.config.run.save_every

    def _agreed(self, wish: bool) -> bool:
        """Whether any rank wishes it: all must do it together."""
        return any(ranks.all_gather_counts(int(wish), self.device))

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write everything that is needed to go on from here; numbers that are none never replace a good checkpoint."""
        self._saved_at = time.monotonic()
        if not bool(torch.stack([p.isfinite().all() for p in self.network.parameters()]).all()):
            raise CollapseError(
                "The weights are no longer finite, so they were not saved; start again with a lower --learning-rate, "
                "or with --precision fp32."
            )
        # Every rank takes part: the bank is in shards.
        views = [ranks.all_gather_rows(view[:-1], self.device) for view in self.bank.view_2ND]
        if self.recorder is None or not ranks.is_writer():
            return
        tensors = {
            **checkpoint.with_prefix("network", self.network.state_dict()),
            **checkpoint.with_prefix("optimiser", checkpoint.optimiser_tensors(self.optimiser)),
            **self._clustering_tensors(),
            **({} if self.step.queue is None else {"queue": self.step.queue.view_2QD}),
            "bank/1": views[0],
            "bank/2": views[1],
            "totals": self.step.totals,
            "random": torch.get_rng_state(),
        }
        facts = {
            "epoch": self.epoch,
            "step_in_epoch": self.step_in_epoch,
            "seconds": self.seconds,
            "log_likelihood": self.log_likelihood,
            "set_aside": self.loader.set_aside.reasons,
        }
        self.recorder.save_checkpoint(tensors, facts)

    def _clustering_tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, clustering in zip(self._clustering_names(), self.clusterings, strict=True):
            tensors |= checkpoint.with_prefix(name, clustering.as_tensors())
        return tensors

    def _clustering_names(self) -> list[str]:
        return ["clustering", *(f"clustering {number}" for number in range(2, len(self.clusterings) + 1))]

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Put back what ``save`` wrote."""
        changed = sorted(facts["set_aside"].keys() ^ self.loader.set_aside.reasons.keys())
        if changed:
            raise InputError(
                f"{len(changed):,} images that could be read no longer can, or the other way round, the first being "
                f"{changed[0]}; a run goes on with the images it began with: put them back, or start anew."
            )
        checkpoint.restore_module(self.network, checkpoint.grouped(tensors, "network"))
        checkpoint.restore_optimiser(self.optimiser, checkpoint.grouped(tensors, "optimiser"))
        for name, clustering in zip(self._clustering_names(), self.clusterings, strict=True):
            clustering.restore(checkpoint.grouped(tensors, name))
        if self.step.queue is not None:
            self.step.queue.view_2QD.copy_(tensors["queue"])
        for view, stored in zip(self.bank.view_2ND, (tensors["bank/1"], tensors["bank/2"]), strict=True):
            view[:-1].copy_(stored[self.bank.first : self.bank.last])
        self.step.totals.copy_(tensors["totals"])
        torch.set_rng_state(tensors["random"])
        self.epoch, self.step_in_epoch = int(facts["epoch"]), int(facts["step_in_epoch"])
        self.seconds, self.log_likelihood = float(facts["seconds"]), float(facts["log_likelihood"])
        if self.recorder is not None and ranks.is_writer():
            self.metrics = self.recorder.truncate_metrics(self.epoch)


@contextlib.contextmanager
def _frozen_statistics(network: nn.Module) -> Iterator[None]:
    """Normalise by each batch, and leave no trace of it in the running statistics."""
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    try:
        yield
    finally:
        for name, buffer in network.named_buffers():
            buffer.copy_(buffers[name])
