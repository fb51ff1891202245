"""An experiment: more than two views of an image in a step, each compared with the mean of the others.

The compute of a step is that of its views; the mean of several targets is a steadier target than one. The rate is one
for 256 images: with half the images a step it must be twice as high to be the same.

Legend:  V views, B images of a batch, D dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from siammm.config import ObjectiveConfig
from siammm.data import augment
from siammm.data.loader import Batch, ResidentLoader
from siammm.learn import losses
from siammm.learn.clustering import Clustering
from siammm.learn.objective import BatchLoss
from siammm.learn.step import Step, freshly_compiled


def step_of(n_views: int) -> type[Step]:
    """The step with so many views, for the contrastive instance loss and the likelihood of clusters."""

    class ManyViews(Step):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            loader = self.loader
            assert isinstance(loader, ResidentLoader)

            def views(batch: Batch, seed: int, epoch: Tensor) -> Tensor:
                x_B3HW = loader.image_N3HW[batch.position_B]
                sample_B = loader._sample_on_device[batch.position_B]
                height, width = x_B3HW.shape[2:]
                seen: list[Tensor] = []
                for number in range(n_views):
                    settings = loader.view_settings[number % 2]
                    stream = number if number < 2 else number + 2  # two are those of noise
                    drawn = augment.draw(settings, height, width, seed, epoch, sample_B, stream)
                    seen.append(augment.apply(x_B3HW, drawn, settings))
                return torch.cat(seen)

            self._views = freshly_compiled(views) if self._compiled else views
            self._loss = freshly_compiled(_loss) if self._compiled else _loss

        def _update(self, batch: Batch, clustered: bool, negatives: Sequence[Tensor | None] | None = None) -> None:
            self.optimiser.zero_grad()
            x = self._views(batch, self.config.run.random_state, self._epoch)
            pieces = self.network._fused
            if self.device.type == "cuda":
                x = x.to(memory_format=torch.channels_last)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
                if self._beside is not None:
                    here = torch.cuda.current_stream()
                    self._beside.wait_stream(here)
                    with torch.cuda.stream(self._beside), torch.no_grad():
                        targets = pieces["momentum_encoder"](x, n_views)
                else:
                    with torch.no_grad():
                        targets = pieces["momentum_encoder"](x, n_views)
                predictions = pieces["predictor"](pieces["encoder"](x, n_views), n_views)
                if self._beside is not None:
                    torch.cuda.current_stream().wait_stream(self._beside)
            v_VBD = predictions.float().view(n_views, -1, predictions.shape[1])
            target_VBD = functional.normalize(targets.float(), dim=1).view(n_views, -1, targets.shape[1])
            loss = self._loss(
                self.config.objective, v_VBD, target_VBD, batch.position_B, self.clusterings[0], clustered,
                self._temperature,
            )  # fmt: skip
            loss.total.backward()
            self._remember(batch.position_B, target_VBD[0::2].sum(dim=0), target_VBD[1::2].sum(dim=0))
            self._apply(torch.stack([loss.total, loss.instance, loss.cluster]).detach().to(self.totals))

    return ManyViews


def _loss(
    config: ObjectiveConfig,
    v_VBD: Tensor,
    target_VBD: Tensor,
    position_B: Tensor,
    clustering: Clustering,
    clustered: bool,
    temperature: Tensor | None,
) -> BatchLoss:
    n_views = v_VBD.shape[0]
    total_BD = target_VBD.sum(dim=0)
    tau = config.contrastive_temperature if temperature is None else temperature
    parts = [losses._contrast(v, total_BD - own, tau, None) for v, own in zip(v_VBD, target_VBD, strict=True)]
    instance = 2 * torch.stack(parts).mean()
    cluster = instance.new_zeros(())
    if clustered:
        index_BH = clustering.index_NH[position_B].repeat(n_views, 1)
        cluster = 2 * losses.soft_assignment_loss(
            v_VBD.flatten(0, 1),
            clustering.mu_KD[index_BH],
            clustering.kappa_K[index_BH],
            clustering.weight_NH[position_B].repeat(n_views, 1),
        )
    return BatchLoss(losses.final_loss(cluster, instance, config.cluster_weight), instance, cluster)
