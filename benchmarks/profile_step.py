"""Where does each millisecond of a step go? By phase, by kind of kernel, and the kernels that take most.

    PYTHONPATH=src python benchmarks/profile_step.py --output OUT --batch 256 --width 4096

Kinds of kernels are of the step as it runs: captured and replayed, profiled over a few steps. Phases are of the same
step uncaptured, with the device idle between phases, so that a kernel's time says which phase it is of. Floating-point
operations are counted by torch; bytes are the least that the work must move, so that GB/s is what a perfect
implementation would need to move in the time that this one took. On a CPU the same tables are of torch's operations.
"""

from __future__ import annotations

import argparse
import bisect
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode

import record
import step_variants
from siammm.bench import clock
from siammm.bench.workload import Workload, image_size
from siammm.learn.build import build_network
from siammm.settings.fields import with_settings
from siammm.settings.presets import PRESETS
from siammm.settings.training import TrainConfig
from sweep import fresh, fresh_question

# The first that matches the name of a kernel or operation. Ours are told by their exact names.
KINDS: list[tuple[str, str]] = [
    ("BatchNorm", r"^_(sums|moments|apply|gradient|gradient_sums|gradient_totals)(_\w+)?$"),
    ("BatchNorm", r"batch_?norm|bn_(fw|bw)|welford|var_mean"),
    # Inductor names a kernel by what surrounds it: these cast weights and activations for cuDNN.
    ("layout and copies", r"^triton_poi_fused.*convolution|converttensor"),
    ("convolution, backward, weights", r"wgrad|bwd_filter|backward_weights?"),
    ("convolution, backward, data", r"dgrad|bwd_data"),
    ("convolution, backward", r"convolution_backward"),
    ("convolution, forward", r"fprop|conv(?!ert)|winograd|implicit_gemm"),
    ("layout and copies", r"nchwtonhwc|nhwctonchw|memcpy|memset|copy|cat_?array|aten::cat|fill|_to_copy"),
    ("matrix product", r"gemm|nvjet|cublas|cutlass|aten::(mm|bmm|addmm|baddbmm|matmul)|splitk|tem_fused"),
    ("optimiser and momentum encoder", r"multi_tensor|_foreach_|_squares|_ratios|_lars|_follow|_note"),
    ("optimiser and momentum encoder", r"^_(lengths|scales|gather|products|turns?)$"),
    ("gather and scatter", r"index|gather|scatter"),
    ("reduction", r"reduce|norm|_red_fused|_per_fused|aten::(sum|mean)"),
    ("elementwise", r""),
]  # fmt: skip

MARK = "phase:"
PHASES = [
    "views", "online forward", "targets", "loss", "backward", "bank", "optimiser", "momentum encoder's update", "rest",
]  # fmt: skip


@dataclass
class Spent:
    seconds: float = 0.0
    calls: int = 0


def kind_of(name: str) -> str:
    """The kind of work that a kernel or operation does."""
    lowered = name.lower()
    return next(kind for kind, pattern in KINDS if re.search(pattern, lowered))


def spent(prof: profile, device: torch.device) -> list[tuple[str, float, float]]:
    """Name, start and length in seconds of every kernel, or on a CPU of every operation without its children."""
    found: list[tuple[str, float, float]] = []
    for event in cast(Any, prof.events()):
        # Ranges that a profiler draws on the device's line are no kernels.
        if event.name.startswith(("ProfilerStep", MARK)) or getattr(event, "is_user_annotation", False):
            continue
        if device.type == "cuda" and event.device_type == DeviceType.CUDA:
            found.append((event.name, event.time_range.start / 1e6, event.time_range.elapsed_us() / 1e6))
        elif device.type != "cuda" and event.device_type == DeviceType.CPU:
            found.append((event.name, event.time_range.start / 1e6, event.self_cpu_time_total / 1e6))
    return found


def spans(prof: profile) -> list[tuple[float, float, str]]:
    """Start, end and name of every phase, on the same clock as the kernels."""
    found: list[tuple[float, float, str]] = []
    for event in cast(Any, prof.events()):
        if event.name.startswith(MARK) and event.device_type == DeviceType.CPU:
            start = event.time_range.start / 1e6
            found.append((start, start + event.time_range.elapsed_us() / 1e6, event.name.removeprefix(MARK)))
    return sorted(found)


def profiled(work: Callable[[], Any], device: torch.device) -> profile:
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    clock.synchronise(device)
    with profile(activities=activities) as prof:
        work()
        clock.synchronise(device)
    return prof


@contextmanager
def phases(load: Workload) -> Iterator[None]:
    """Make every phase of an uncaptured step wait for the device before and after, within a range of its name."""
    training, twin, device = load.training, load.training.accelerated, load.device
    captured, encode = None if twin is None else (twin.captures, twin.side_stream), training.pieces.encode
    training.pieces.encode = None  # by training.encode, whose parts are told apart
    if twin is not None:
        twin.captures, twin.side_stream = False, None

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def phase(*args: Any, **kwargs: Any) -> Any:
            clock.synchronise(device)
            with record_function(MARK + name):
                result = call(*args, **kwargs)
                clock.synchronise(device)
            return result

        return phase

    places: list[tuple[Any, str, str]] = [
        (training.pieces, "views", "views"),
        (training, "online", "online forward"),
        (training.network, "targets", "targets"),
        (training.pieces, "loss", "loss"),
        (torch.Tensor, "backward", "backward"),
        (training, "store_in_bank", "bank"),
        (training.optimiser, "step", "optimiser"),
        (training.network, "update_momentum", "momentum encoder's update"),
    ]
    before = [(owner, name, getattr(owner, name), name in vars(owner)) for owner, name, _ in places]
    for owner, name, phase in places:
        setattr(owner, name, noted(phase, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, original, own in before:
            if own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)
        training.pieces.encode = encode
        if twin is not None and captured is not None:
            twin.captures, twin.side_stream = captured


def by_kind(events: list[tuple[str, float, float]], steps: int) -> dict[str, Spent]:
    found: dict[str, Spent] = defaultdict(Spent)
    for name, _, seconds in events:
        kind = found[kind_of(name)]
        kind.seconds += seconds / steps
        kind.calls += 1
    return dict(sorted(found.items(), key=lambda item: -item[1].seconds))


def by_phase(prof: profile, steps: int, device: torch.device) -> dict[str, Spent]:
    """Device time of each phase: of the kernels that ran within it, or on a CPU the time by the clock."""
    found = {name: Spent() for name in PHASES}
    ranges = spans(prof)
    if device.type != "cuda":
        for start, end, name in ranges:
            found[name].seconds += (end - start) / steps
            found[name].calls += 1
        return found
    starts = [start for start, _, _ in ranges]
    for _, start, seconds in spent(prof, device):
        at = bisect.bisect_right(starts, start) - 1  # phases do not overlap
        name = ranges[at][2] if at >= 0 and start <= ranges[at][1] else "rest"
        found[name].seconds += seconds / steps
        found[name].calls += 1
    return found


@dataclass(frozen=True)
class Work:
    """What a kind of kernel has to do at least."""

    flops: float = 0.0
    """Of one image."""
    moved: float = 0.0
    """Bytes of one image."""
    moved_once: float = 0.0
    """Bytes of a step, however many images it has."""


def least_work(config: TrainConfig) -> dict[str, Work]:
    """For each kind of which it is known."""
    size = image_size(config)
    network = build_network(config, size).to("meta")
    elements: list[int] = []
    for module in network.encoder.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.register_forward_hook(lambda m, inputs, output: elements.append(output.numel()))
    x = torch.empty(2, 3, size, size, device="meta")
    counts: dict[str, float] = defaultdict(float)
    with FlopCounterMode(display=False) as counter:
        predictions = network(x, x)
        seen = sum(elements) / 2  # both views were seen: of one view of two images
        network.targets(x, x, predictions.z_1, predictions.z_2)
        (predictions.v_1.sum() + predictions.v_2.sum()).backward()
    for operation, flops in counter.get_flop_counts()["Global"].items():
        counts[str(operation)] += flops / 2
    forward = sum(v for k, v in counts.items() if k.endswith("convolution") or k.endswith("convolution.default"))
    backward = sum(v for k, v in counts.items() if "convolution_backward" in k)
    products = sum(v for k, v in counts.items() if "convolution" not in k)
    weights = forward / 2  # of the online encoder's two views; the momentum encoder learns nothing
    per_view = 2.0 * seen / 2  # two bytes a value, of one image
    parameters = sum(p.numel() for p in network.parameters() if p.requires_grad)
    followers = 0 if network.momentum_encoder is None else sum(p.numel() for p in network.momentum_encoder.parameters())
    return {
        "convolution, forward": Work(flops=forward),
        "convolution, backward, weights": Work(flops=weights),
        "convolution, backward, data": Work(flops=backward - weights),
        "convolution, backward": Work(flops=backward),
        "matrix product": Work(flops=products),
        # Forward an activation is read twice and written once, backward gradient and activation are read twice.
        "BatchNorm": Work(moved=per_view * (4 * 3 + 2 * 5)),
        # Norms read weight and gradient; the update reads these and the buffer, and writes two. A follower: 12 bytes.
        "optimiser and momentum encoder": Work(moved_once=28.0 * parameters + 12.0 * followers),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=record.RESULTS)
    parser.add_argument("--preset", default="cifar")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--backbone")
    parser.add_argument("--variants", nargs="*", default=[])
    parser.add_argument("--n-images", type=int, default=50_000)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--kernels", type=int, default=40, help="how many of the longest to list")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device = torch.device(args.device)
    settings = {"batch_size": args.batch, "hidden_dim": args.width, "n_components": min(4000, args.n_images // 4)}
    settings |= ({"backbone": args.backbone} if args.backbone else {}) | step_variants.settings(args.variants)
    config = with_settings(PRESETS[args.preset], **settings)
    step_variants.set_globally(args.variants)
    load = Workload(config, device, n_images=args.n_images)
    step_variants.apply(load.training, args.variants)
    load.prepare(clustered=True)
    usual = clock.windows(lambda n: load.advance(n, clustered=True), device, seconds=2.0)
    milliseconds = 1000 * sorted(usual)[len(usual) // 2]
    events = spent(profiled(lambda: load.advance(args.steps, clustered=True), device), device)
    kinds = by_kind(events, args.steps)
    with phases(load):
        load.advance(1, clustered=True)  # what is compiled anew for being called so is not counted
        parts = by_phase(profiled(lambda: load.advance(args.steps, clustered=True), device), args.steps, device)
    longest: dict[str, Spent] = defaultdict(Spent)
    for name, _, seconds in events:
        longest[name].seconds += seconds / args.steps
        longest[name].calls += 1
    first = sorted(longest.items(), key=lambda item: -item[1].seconds)[: args.kernels]
    load.check()
    batch = load.batch_size
    body = _body(
        kinds,
        parts,
        first,
        least_work(config),
        milliseconds,
        batch,
        args.steps,
        bool(load.training.accelerated and load.training.accelerated.graphs),
    )
    question = fresh_question(f"profile-{args.preset}-{batch}", args.output)
    path = record.write(
        question,
        f"Where a step of {batch} images goes: {config.network.backbone}, heads {config.network.hidden_dim} wide",
        body,
        seeds="0",
        n=f"{args.steps} steps of {batch} images" + (f"; {', '.join(args.variants)}" if args.variants else ""),
        output=args.output,
    )
    stored = {
        "settings": settings, "variants": args.variants, "milliseconds": milliseconds, "batch": batch,
        "kinds": {name: vars(value) for name, value in kinds.items()},
        "phases": {name: vars(value) for name, value in parts.items()},
        "kernels": [[name, kind_of(name), value.seconds, value.calls] for name, value in longest.items()],
        **record.circumstances(),
    }  # fmt: skip
    fresh(args.output / f"{question}.json").write_text(json.dumps(stored, indent=1))
    print(path.read_text())


def _body(
    kinds: dict[str, Spent], parts: dict[str, Spent], longest: list[tuple[str, Spent]],
    least: dict[str, Work], milliseconds: float, batch: int, steps: int, captured: bool,
) -> str:  # fmt: skip
    busy = 1000 * sum(value.seconds for value in kinds.values())
    rows = []
    for name, value in kinds.items():
        work = least.get(name, Work())
        flops, moved = work.flops * batch, work.moved * batch + work.moved_once
        rows.append(
            [
                name,
                f"{1000 * value.seconds:.3f}",
                f"{100 * 1000 * value.seconds / max(busy, 1e-9):.1f} %",
                f"{value.calls / steps:.0f}",
                f"{flops / value.seconds / 1e12:.3g}" if flops and value.seconds else "",
                f"{moved / value.seconds / 1e9:,.0f}" if moved and value.seconds else "",
            ]
        )
    text = (
        f"A step takes {milliseconds:.3f} ms by the clock ({1000 * batch / milliseconds:,.0f} images a second, "
        f"{'captured' if captured else 'not captured'}); the device is busy for {busy:.3f} ms of it.\n\n## By kind\n\n"
    )
    text += record.table(["kind", "ms a step", "share", "kernels", "TFLOP/s", "GB/s of the least bytes"], rows)
    text += "\n\n## By phase (uncaptured, one after another)\n\n"
    text += record.table(
        ["phase", "ms a step", "kernels"],
        [[name, f"{1000 * value.seconds:.3f}", f"{value.calls / steps:.0f}"] for name, value in parts.items()],
    )
    text += "\n\n## The longest\n\n"
    return text + record.table(
        ["kernel", "kind", "ms a step", "calls"],
        [
            [f"`{name[:110]}`".replace("|", "/"), kind_of(name), f"{1000 * v.seconds:.4f}", f"{v.calls / steps:.0f}"]
            for name, v in longest
        ],
    )


if __name__ == "__main__":
    main()
