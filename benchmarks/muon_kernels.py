"""What do Muon's kernels gain? The step of ``cifar-fast`` with and without them, all else the same.

    python benchmarks/muon_kernels.py

Without them, the matrices turn by torch's own operations, which are captured with the step in the same way.
"""

from __future__ import annotations

import statistics

import torch

import record
from siammm.bench import clock
from siammm.bench.workload import Workload
from siammm.learn import optim
from siammm.learn.cuda.optimisers import FusedMuon
from siammm.learn.muon import Muon
from siammm.settings.presets import PRESETS

SECONDS = 6.0


class WithoutTurnKernels(FusedMuon):
    """Muon whose matrices turn by torch's operations; the rest is moved by LARS's kernels as before."""

    _turn = Muon._turn


def rate(kind: type[FusedMuon]) -> tuple[float, float]:
    """Images per second of the step with clusters: the median of the windows, and their deviation."""
    optim.FusedMuon = kind  # pyright: ignore[reportPrivateImportUsage]
    device = torch.device("cuda")
    load = Workload(PRESETS["cifar-fast"], device, n_images=50_000)
    load.prepare(clustered=True)
    seconds = clock.windows(lambda n: load.advance(n, clustered=True), device, seconds=SECONDS)
    load.check()
    rates = [load.batch_size / value for value in seconds]
    load.close()
    return statistics.median(rates), statistics.stdev(rates)


def main() -> None:
    measured = [(name, kind, *rate(kind)) for name, kind in KINDS]
    rows = [[name, f"{median:,.0f}", f"{deviation:,.0f}"] for name, _, median, deviation in measured]
    body = record.table(["Muon", "images/s, median", "deviation of the windows"], rows)
    print(body)
    print(
        record.write(
            "muon-kernels", "What Muon's kernels gain", f"{body}\n\nEach in a run of its own.", seeds="0",
            n="cifar-fast: batch 512, views of 24 pixels",
        )
    )  # fmt: skip


KINDS: list[tuple[str, type[FusedMuon]]] = [("with kernels", FusedMuon), ("without", WithoutTurnKernels)]

if __name__ == "__main__":
    main()
