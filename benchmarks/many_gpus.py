"""What would 8 and 64 GPUs do? Projected from a step that was measured on one, and from the bytes that ranks exchange.

    PYTHONPATH=src python benchmarks/many_gpus.py

ResNet-50 at 224 pixels with 100,000 clusters, as in the paper. The step and the clustering of an epoch were measured on
one H200 (the flags hold the figures; see ``results/2026-11-16-large-images-gpu.md``). What is exchanged is counted from
the networks and the settings:

- gradients: an all-reduce of the online networks' parameters, in float32;
- BatchNorm: for each layer and each of two views mean and variance, gathered forward (also in the momentum encoder),
  and two sums backward, all-reduced; both views go together in the fused step, so there is one call for each direction;
- the bank: the embeddings of the batch by the momentum encoder, of both views, gathered;
- the E and M step, once an epoch: sums and counts of the clusters, all-reduced.

Bandwidth and latency are assumptions. Two figures stand for each number of GPUs: with nothing overlapped, and with the
gradients hidden behind the backward pass, as DDP sends them in buckets. Nothing here was measured on several GPUs.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from torch import nn

import record
from siammm.learn.build import build_network
from siammm.settings.fields import with_settings
from siammm.settings.presets import PRESETS

N_IMAGES, EPOCHS, CLUSTERS, SIZE = 1_281_167, 200, 100_000, 224
FLOAT = 4
VIEWS = 2


@dataclass(frozen=True)
class Links:
    """How ranks are joined: the slowest link of a ring, and how long a small message takes."""

    gigabytes: float
    microseconds: float

    def all_reduce(self, n_bytes: float, gpus: int) -> float:
        """Seconds in a ring: everything is sent nearly twice."""
        return 2 * (gpus - 1) / gpus * n_bytes / (1e9 * self.gigabytes) + 1e-6 * self.microseconds

    def all_gather(self, n_bytes: float, gpus: int) -> float:
        """Seconds in a ring, for so many bytes of all ranks together."""
        return (gpus - 1) / gpus * n_bytes / (1e9 * self.gigabytes) + 1e-6 * self.microseconds


@dataclass(frozen=True)
class Sizes:
    """What the networks have to exchange."""

    parameters: int
    norms: list[int]
    """Channels of each BatchNorm layer of the online networks."""
    momentum_norms: list[int]
    dim: int

    @classmethod
    def of_the_paper(cls) -> Sizes:
        """ResNet-50 with the paper's heads."""
        config = with_settings(PRESETS["imagenet-200"], backbone="resnet50")
        network = build_network(config, SIZE)
        assert network.predictor is not None
        assert network.momentum_encoder is not None
        online = [*network.encoder.modules(), *network.predictor.modules()]
        return cls(
            sum(p.numel() for p in network.parameters() if p.requires_grad),
            [layer.num_features for layer in online if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d)],
            [
                m.num_features
                for m in network.momentum_encoder.modules()
                if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)
            ],
            config.network.embedding_dim,
        )


def main() -> None:
    parser = record.arguments(__doc__, batch=512)
    parser.add_argument("--images-per-second", type=float, default=2782, help="of the step on one GPU, measured")
    parser.add_argument("--clustering-seconds", type=float, default=0.326, help="of an epoch on one GPU, measured")
    parser.add_argument(
        "--loader", type=float, default=2196, help="images per second that a GPU's loader brings, measured"
    )
    parser.add_argument("--within", type=float, nargs=2, default=(360, 30), help="GB/s and microseconds in a machine")
    parser.add_argument("--between", type=float, nargs=2, default=(45, 60), help="the same between machines of 8 GPUs")
    args = parser.parse_args()
    path = record.write(
        "many-gpus",
        "What 8 and 64 GPUs would do (projected, not measured)",
        body(args, Sizes.of_the_paper()),
        seeds="none",
        n=f"ResNet-50 at {SIZE} pixels, {args.batch} images for each GPU and update, {CLUSTERS:,} clusters",
        output=args.output,
    )
    print(path.read_text())


def body(args: argparse.Namespace, sizes: Sizes) -> str:
    rows, exchanged = [], []
    for gpus in (1, 8, 64):
        links = Links(*(args.within if gpus <= 8 else args.between))
        step = args.batch / args.images_per_second
        gradients, others, parts = exchange(sizes, links, gpus, args.batch) if gpus > 1 else (0.0, 0.0, [])
        exchanged += [[f"{gpus}", *part] for part in parts]
        slow, fast = (gpus * args.batch / (step + others + sent) for sent in (gradients, 0.0))
        sums = FLOAT * CLUSTERS * (sizes.dim + 2)
        clustering = args.clustering_seconds / gpus + (links.all_reduce(sums, gpus) if gpus > 1 else 0)
        brought = gpus * args.loader
        rows.append([
            f"{gpus}", f"{gpus * args.batch:,}", *(f"{rate:,.0f}" for rate in (slow, fast)),
            f"{100 * slow / gpus / args.images_per_second:.0f} to {100 * fast / gpus / args.images_per_second:.0f} %",
            *(f"{EPOCHS * (N_IMAGES / rate + clustering) / 3600:.2f}" for rate in (slow, fast)),
            f"{EPOCHS * (N_IMAGES / min(fast, brought) + clustering) / 3600:.2f}", f"{1e3 * clustering:.0f}",
        ])  # fmt: skip
    header = [
        "GPUs", "batch", "images/s, nothing overlapped", "gradients hidden", "of perfect scaling",
        f"hours for {EPOCHS} epochs", "hours, gradients hidden", "hours with this loader", "clustering, ms per epoch",
    ]  # fmt: skip
    text = record.table(header, rows)
    text += "\n\nWhat each GPU exchanges in an update:\n\n"
    text += record.table(["GPUs", "what", "calls", "MB", "ms"], exchanged)
    return text + (
        f"\n\nFrom {args.images_per_second:,.0f} images per second on one GPU with {args.batch} images at a time, "
        f"{args.clustering_seconds} s of clustering an epoch and {args.loader:,.0f} images per second from one loader "
        "(all measured, [record](2026-11-16-large-images-gpu.md)). Assumed: "
        f"{args.within[0]:g} GB/s and {args.within[1]:g} microseconds in a machine of 8, {args.between[0]:g} GB/s per "
        f"GPU and {args.between[1]:g} microseconds between machines. The measured step is one CUDA graph with compiled "
        "loss; several GPUs launch their kernels one by one, without the second stream, which is not in these figures. "
        "The batch grows with the GPUs; the paper's is 4,096, which is that of 8. The numbers for 64 are about speed "
        "alone: whether training with such a batch is as good is another question."
    )


def exchange(sizes: Sizes, links: Links, gpus: int, batch: int) -> tuple[float, float, list[list[str]]]:
    """Seconds for the gradients and for all else in one update, and a row of the table for each kind."""
    gradient_bytes = FLOAT * sizes.parameters
    forward = [*sizes.norms, *sizes.momentum_norms]
    gathered = [gpus * FLOAT * VIEWS * 2 * channels for channels in forward]
    reduced = [FLOAT * VIEWS * 2 * channels for channels in sizes.norms]
    bank = gpus * batch * (VIEWS * FLOAT * sizes.dim + 8)
    kinds: list[tuple[str, int, float, float]] = [
        ("gradients", 1, gradient_bytes, links.all_reduce(gradient_bytes, gpus)),
        ("BatchNorm, forward", len(gathered), sum(gathered), sum(links.all_gather(b, gpus) for b in gathered)),
        ("BatchNorm, backward", len(reduced), sum(reduced), sum(links.all_reduce(b, gpus) for b in reduced)),
        ("bank", 3, bank, links.all_gather(bank, gpus) + 2e-6 * links.microseconds),
        ("losses, and whether all is finite", 2, 16, 2 * links.all_reduce(8, gpus)),
    ]
    rows = [[name, f"{calls}", f"{size / 1e6:.2f}", f"{1e3 * seconds:.2f}"] for name, calls, size, seconds in kinds]
    return kinds[0][3], sum(seconds for *_, seconds in kinds[1:]), rows


if __name__ == "__main__":
    main()
