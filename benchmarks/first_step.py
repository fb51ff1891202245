"""Where does the time go before training is at speed? Without and with the compiled code of an earlier run.

    python benchmarks/first_step.py cifar10 --set view_size=24 batch_size=512 optimiser=muon

Runs a few epochs twice, each in a process of its own: the first with empty caches, the second with what the first left.
A thread looks at the main one twenty times a second and notes what it is at, which costs nothing. Clusters begin after
the second epoch, which is when a step is compiled anew. Compiling goes on in processes beside; what is counted is how
long training waits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

TRITON = "our kernels, compiled by Triton"
# What a line of the stack, read from the innermost, says about what is being done; the first that fits counts.
KINDS = {
    "torch's compiler": ("torch/_inductor", "torch/_dynamo", "torch/_functorch", "torch/fx", "sympy"),
    TRITON: ("triton/",),
    "importing": ("importlib",),
    "optimiser": (
        "learn/optim",
        "learn/lars",
        "learn/muon",
        "learn/cuda/optimisers",
        "learn/cuda/muon_kernels",
        "learn/cuda/update_kernels",
    ),
    "gradients": ("autograd/__init__",),
    "networks forward": ("learn/networks", "learn/cuda/fused", "torch/nn"),
    "clustering": ("siammm/mixture", "learn/clustering"),
    "images": ("data/loader", "data/augment", "data/sources"),
    "the rest of the step": ("learn/loop", "learn/cuda/update.py"),
}
PERIOD = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--preset", default="cifar")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--set", nargs="*", default=[], help="settings as name=value")
    parser.add_argument("--output", type=Path, help="write a result there, rather than to benchmarks/results")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(_run(args.data, args.preset, args.epochs, args.set)), flush=True)
        return
    import record

    words = [str(args.data), "--preset", args.preset, "--epochs", str(args.epochs), "--set", *args.set]
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        for name in ("empty caches", "those of an earlier run"):
            began = time.monotonic()
            done = subprocess.run(
                [sys.executable, __file__, *words, "--child"], env=os.environ | caches, check=True, text=True,
                stdout=subprocess.PIPE,
            )  # fmt: skip
            found[name] = json.loads(done.stdout.splitlines()[-1]) | {"whole": time.monotonic() - began}
            print(name, json.dumps(found[name]), flush=True)  # for those who must stop it before the second is done
    kinds = ["imports and images", *KINDS, "else"]
    rows: list[list[str]] = []
    for phase in ("until the first epoch ends", "the epoch with which clusters begin", "a later epoch"):
        for kind in kinds:
            seconds = [run[phase].get(kind, 0.0) for run in found.values()]
            if max(seconds) >= 0.1:
                rows.append([phase, kind, *(f"{value:.1f}" for value in seconds)])
        rows.append([phase, "**all**", *(f"**{sum(run[phase].values()):.1f}**" for run in found.values())])
    rows.append(["the whole command", "", *(f"{run['whole']:.1f}" for run in found.values())])
    body = record.table(["phase", "what", *(f"s, {name}" for name in found)], rows)
    print(body, flush=True)
    written = record.write(
        "first-step", "How long until training is at speed?", body, seeds="0",
        n=f"{next(iter(found.values()))['n']:,} images", output=args.output,
    )  # fmt: skip
    print(written)


def _run(data: Path, preset: Any, epochs: int, pairs: list[str]) -> dict[str, Any]:
    """Train, watched; seconds of each kind in each phase."""
    began = time.monotonic()
    import numpy as np
    import torch

    from siammm.data.sources import open_source
    from siammm.learn.loop import Training
    from siammm.learn.observers import Silent
    from siammm.settings.fields import with_settings
    from siammm.settings.presets import PRESETS
    from train_cifar import given

    images = np.load(data / "train.npz")["images"]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = given(pairs) | {"epochs": epochs, "cluster_after": 2 / epochs}
    config = with_settings(PRESETS[preset], data=str(data), **settings)
    counts = [Counter[str]()]  # for each epoch
    stopped = threading.Event()
    watched = threading.get_ident()

    def watch() -> None:
        while not stopped.wait(PERIOD):
            frames = sys._current_frames()
            kind = _kind(frames.pop(watched, None))
            # Gradients are computed by a thread of torch's, which compiles kernels when it meets them.
            if kind == "gradients" and any(_kind(frame) == TRITON for frame in frames.values()):
                kind = TRITON
            counts[-1][kind] += 1

    class Marks(Silent):
        def finished_epoch(self, row: dict[str, Any]) -> None:
            marks.append(time.monotonic())
            counts.append(Counter())

    ready = time.monotonic()
    marks = [ready]
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    Training(config, open_source(images), device, listener=Marks()).run()
    stopped.set()
    watcher.join()

    def phase(number: int) -> dict[str, float]:
        seconds, total = marks[number + 1] - marks[number], max(1, sum(counts[number].values()))
        return {kind: seconds * count / total for kind, count in counts[number].items()}

    return {
        "n": len(images),
        "until the first epoch ends": {"imports and images": ready - began, **phase(0)},
        "the epoch with which clusters begin": phase(2),
        "a later epoch": phase(epochs - 1),
    }


def _kind(frame: Any) -> str:
    """What the thread whose innermost frame this is does."""
    while frame is not None:
        name = frame.f_code.co_filename
        for kind, places in KINDS.items():
            if any(place in name for place in places):
                return kind
        frame = frame.f_back
    return "else"


if __name__ == "__main__":
    main()
