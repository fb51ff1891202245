"""One session on a machine with a GPU where nothing can be installed: from packed images to a bundle of records.

Here, before each call, what travels (64 MiB with the checkout; git ignores the folder carry):

    python benchmarks/gpu_session.py pack carry --packs SHARED/data --sets cifar10 --records RECORDS

There, within the ten minutes of a call; what has a record is not run again, and the next call goes on:

    PYTHONPATH=src:carry/site python3 benchmarks/gpu_session.py run --carry carry --output $OUT --seconds 560

Here again:

    python benchmarks/gpu_session.py collect FILES... --records RECORDS
    python benchmarks/gpu_session.py plan --records RECORDS

Steps are, in their order of priority: the tests that need a GPU, ``siammm bench``, trainings at once, the studies.
``--steps`` names others: ``tests``, ``bench``, ``at-once``, ``sheet``, or a study with its sets and seeds as in
``t4-losses@cifar10+cifar100@0+1``.

The images are packs: an .npz of JPEG sheets of tiles of one size. A set that is too large for a call travels in parts
of its sheets, as in ``tiny:1/3``, and is used once all of it is there. Packs, data, checkpoints and records stay in
``--work`` on the machine for as long as it is held.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

import record

ROOT = Path(__file__).parents[1]
STUDIES = ROOT / "benchmarks" / "studies"
# What decides first: one seed of every question, then all. CIFAR-10 of every table comes before the other sets.
PRIORITY = (
    "tests", "bench", "at-once",
    "q1-clustering@@0", "q2-weight@@0", "q3-instance-loss@@0", "q5-oracle@@0", "q4-fixed-k@@0",
    "q1-clustering", "q2-weight", "q3-instance-loss", "q5-oracle", "q4-fixed-k", "swav-recipes",
    "t1-t2-t3-methods@cifar10", "t4-losses@cifar10", "t5-fixed-or-merged@cifar10", "t6-start@cifar10",
    "t7-concentration@cifar10", "t8-negatives@cifar10", "t7-time", "curve-of-k", "figure-clusters", "sheet",
    "t1-t2-t3-methods@cifar100", "t1-t2-t3-methods@tiny", "t5-fixed-or-merged@cifar100", "t4-losses@cifar100",
    "t6-start@cifar100", "t7-concentration@cifar100", "t8-negatives@cifar100",
)  # fmt: skip
# The packs of each set, and how many training images it has in all.
PACKS: dict[str, dict[str, list[str]]] = {
    "cifar10": {"train": ["cifar10_train"], "test": ["cifar10_test"]},
    "cifar100": {"train": ["cifar100_train"], "test": ["cifar100_test"]},
    "tiny": {"train": ["tinyimagenet_train_a", "tinyimagenet_train_b"], "test": ["tinyimagenet_test"]},
}
# What the command line needs and a bare machine may lack; all of it is plain Python.
SITE = ("tyro", "docstring_parser", "typeguard", "typing_extensions", "jinja2", "markupsafe", "threadpoolctl")
TRAVELS, COMES_BACK = 64 * 2**20, 15 * 2**20
# Steps that are done once on a machine, and not in every call.
_OF_A_MACHINE = ("tests", "bench", "at-once", "sheet")
# The last seconds of a call: ending what runs and bundling.
_RESERVE = 30.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    packing = actions.add_parser("pack", help="make the folder that travels")
    packing.add_argument("carry", type=Path)
    packing.add_argument("--packs", type=Path, required=True, help="the folder of the packed sets")
    packing.add_argument("--sets", nargs="*", default=[], help="as cifar10 or tiny:1/3")
    packing.add_argument("--records", type=Path, help="the records so far")
    running = actions.add_parser("run", help="work through the steps")
    running.add_argument("--carry", type=Path, required=True)
    running.add_argument("--output", type=Path, required=True, help="the folder that comes back")
    running.add_argument("--work", type=Path, default=Path("/tmp/siammm-session"))
    running.add_argument("--seconds", type=float, default=560)
    running.add_argument("--at-once", type=int, help="trainings that share the GPU (default: the study's)")
    running.add_argument("--steps", nargs="*", default=PRIORITY)
    planning = actions.add_parser("plan", help="what is left, and how long it takes")
    planning.add_argument("--records", type=Path, required=True)
    planning.add_argument("--steps", nargs="*", default=PRIORITY)
    collecting = actions.add_parser("collect", help="put what came back among the records")
    collecting.add_argument("files", type=Path, nargs="+")
    collecting.add_argument("--records", type=Path, required=True)
    args = parser.parse_args()
    if args.action == "pack":
        print(pack(args.carry, args.packs, args.sets, args.records))
    elif args.action == "run":
        run(args.carry, args.output, args.work, args.steps, args.seconds, args.at_once)
    elif args.action == "plan":
        for line in plan(args.records, args.steps):
            print(line)
    else:
        print(collect(args.files, args.records))


# -- here: what travels ------------------------------------------------------------------------------------------------


def pack(carry: Path, packs: Path, sets: Sequence[str], records: Path | None) -> str:
    """Make the folder anew: parts of packs, earlier records, and the packages that a bare machine lacks."""
    shutil.rmtree(carry, ignore_errors=True)
    (carry / "packs").mkdir(parents=True)
    for given in sets:
        name, _, part = given.partition(":")
        number, of = (int(word) for word in (part or "1/1").split("/"))
        for split, names in PACKS[name].items():
            if split == "test" and number > 1:
                continue
            share = (number, of) if split == "train" else (1, 1)
            for letter, arrays in parts_of([packs / f"{one}.npz" for one in names], *share):
                np.savez(carry / "packs" / f"{name}-{split}-{letter}.npz", **arrays)  # pyright: ignore[reportArgumentType]
    if records is not None:
        for path in sorted(records.glob("*/*.json")):
            (carry / "records" / path.parent.name).mkdir(parents=True, exist_ok=True)
            shutil.copy(path, carry / "records" / path.parent.name)
    for module in SITE:
        copy_package(module, carry / "site")
    # There is no git on the machine, and a record without its commit is none.
    commit = record.commit()
    (carry / "commit").write_text(commit)
    tree = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    checkout = sum((ROOT / name).stat().st_size for name in tree.stdout.split("\0") if name and (ROOT / name).is_file())
    carried = sum(path.stat().st_size for path in carry.rglob("*") if path.is_file())
    said = f"{carried / 2**20:.1f} MiB to carry and {checkout / 2**20:.1f} MiB of checkout"
    if carried + checkout > TRAVELS:
        raise SystemExit(f"{said} are more than {TRAVELS >> 20} MiB; carry a set less, or it in parts.")
    return f"{said}, of commit {commit}"


def parts_of(paths: Sequence[Path], number: int, of: int) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Part ``number`` of ``of`` of the sheets of several packs, each with a name by which parts are in order."""
    read = [dict(np.load(path)) for path in paths]
    sheets = [(which, sheet) for which, arrays in enumerate(read) for sheet in range(len(arrays["offsets"]) - 1)]
    wanted = [sheets[at] for at in np.array_split(np.arange(len(sheets)), of)[number - 1].tolist()]
    for which, arrays in enumerate(read):
        mine = [sheet for pack, sheet in wanted if pack == which]
        if not mine:
            continue
        first, last, per = mine[0], mine[-1] + 1, int(arrays["per"])
        images = slice(first * per, min(last * per, int(arrays["n"])))
        offsets = arrays["offsets"][first : last + 1]
        cut = ("jpeg", "offsets", "labels", "coarse_labels")
        part = {key: value for key, value in arrays.items() if key not in cut}
        part |= {key: arrays[key][images] for key in ("labels", "coarse_labels") if key in arrays}
        part |= {"jpeg": arrays["jpeg"][offsets[0] : offsets[-1]], "offsets": offsets - offsets[0]}
        part["n"] = np.array(len(part["labels"]))
        yield f"{which}-{first:04d}", part


def copy_package(module: str, site: Path) -> None:
    """A plain Python package of this environment, without its caches."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{module} is not installed here; install the package first, as CONTRIBUTING.md says.")
    origin = Path(spec.origin)
    site.mkdir(parents=True, exist_ok=True)
    if origin.name == "__init__.py":
        shutil.copytree(origin.parent, site / module, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.pyd"))
    else:
        shutil.copy(origin, site)
    # Some ask for their own version.
    found = importlib.metadata.distribution(importlib.metadata.packages_distributions()[module][0])
    information = next((file.parent for file in found.files or [] if file.name == "METADATA"), None)
    if information is not None:
        shutil.copytree(found.locate_file(information), site / information.name, dirs_exist_ok=True)  # pyright: ignore


# -- there: the work ---------------------------------------------------------------------------------------------------


def run(carry: Path, output: Path, work: Path, steps: Sequence[str], seconds: float, at_once: int | None) -> None:
    """Unpack what came, work through the steps until the time is over, and bundle what there is to bring back."""
    ends = time.monotonic() + seconds - _RESERVE
    records, logs = work / "records", work / "logs"
    for folder in (records, logs, work / "packs", work / "site", output):
        folder.mkdir(parents=True, exist_ok=True)
    if (carry / "site").exists():
        shutil.copytree(carry / "site", work / "site", dirs_exist_ok=True)
    for path in (*sorted(carry.glob("packs/*.npz")), *carry.glob("commit")):
        shutil.copy(path, work / "packs" if path.suffix else work)
    for path in carry.glob("records/*/*.json"):
        place = records / path.parent.name / path.name
        if not place.exists():
            place.parent.mkdir(exist_ok=True)
            shutil.copy(path, place)
    for line in unpack(work / "packs", work / "data"):
        print(line, flush=True)
    for step in steps:
        left = ends - time.monotonic()
        if left < _RESERVE:
            print(f"no time for {step}", flush=True)
            break
        began = time.monotonic()
        # A call that goes on does not repeat what belongs to its machine.
        mark = work / f"{step}.done"
        if step in _OF_A_MACHINE and mark.exists():
            continue
        code = one(step, work, left, at_once)
        if step in _OF_A_MACHINE and (code == 0 or step == "tests"):
            mark.touch()
        print(f"{step}: {time.monotonic() - began:.0f} s, ended with {code}", flush=True)
        bundle(work, output)
    bundle(work, output)


def one(step: str, work: Path, seconds: float, at_once: int | None) -> int:
    """One step, its output in a log; the last lines of it are printed."""
    log = work / "logs" / f"{step.partition('@')[0]}.log"
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{work / 'site'}"}
    environment["PYTHONUNBUFFERED"] = "1"
    if (work / "commit").exists():
        environment["SIAMMM_COMMIT"] = (work / "commit").read_text()
    with log.open("ab") as file:
        child = subprocess.Popen(
            command_of(step, work, seconds, at_once), cwd=ROOT, stdout=file, stderr=file, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = child.wait(seconds + _RESERVE / 2)  # studies end by themselves
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 9)
            code = child.wait()
    for line in log.read_text(errors="replace").splitlines()[-12:]:
        print(f"    {line[:300]}", flush=True)
    return code


def command_of(step: str, work: Path, seconds: float, at_once: int | None) -> list[str]:
    """The command of a step."""
    if step == "tests":
        return ["make", "test-gpu", f"PYTHON={sys.executable}"]
    if step == "bench":
        return [sys.executable, "-m", "siammm", "bench", "--preset", "cifar", "--seconds", "30"]
    if step == "at-once":
        words = [sys.executable, str(ROOT / "benchmarks" / "at_once.py"), str(work / "data" / "cifar10")]
        return [*words, "--output", str(work / "records" / "at-once")]
    if step == "sheet":
        records = work / "records" / "figure-clusters" / "cifar10-siammm-0.npz"
        words = [sys.executable, str(ROOT / "benchmarks" / "cluster_sheet.py"), str(records)]
        return [*words, str(work / "data" / "cifar10"), "--output", str(work / "records" / "figure-clusters")]
    name, *more = step.split("@")
    words = [sys.executable, str(ROOT / "benchmarks" / "study.py"), "run", str(STUDIES / f"{name}.json")]
    words += ["--data", str(work / "data"), "--output", str(work / "records" / name), "--seconds", str(seconds)]
    words += ["--sets", *more[0].split("+")] if more and more[0] else []
    words += ["--seeds", *more[1].split("+")] if len(more) > 1 else []
    return words + (["--at-once", str(at_once)] if at_once else [])


def unpack(packs: Path, data: Path) -> Iterator[str]:
    """Write train.npz and test.npz of each set that is there in all its parts."""
    from study_cells import SETS

    for name in PACKS:
        files = {split: sorted(packs.glob(f"{name}-{split}-*.npz")) for split in ("train", "test")}
        if not files["train"] or not files["test"] or (data / name / "train.npz").exists():
            continue
        there = sum(int(np.load(path)["n"]) for path in files["train"])
        if there < SETS[name][1]:
            yield f"{name}: {there:,} of {SETS[name][1]:,} images so far"
            continue
        (data / name).mkdir(parents=True, exist_ok=True)
        for split in ("test", "train"):
            found = [read_pack(path) for path in files[split]]
            merged = found[0] | {
                key: np.concatenate([part[key] for part in found])
                for key in ("images", "labels", "coarse_labels")
                if key in found[0]
            }
            np.savez(data / name / f"{split}.npz", **merged)  # pyright: ignore[reportArgumentType]
        yield f"{name}: {there:,} images"


def read_pack(path: Path) -> dict[str, np.ndarray]:
    """The images (N, H, W, 3) of a pack, its labels, and names where known."""
    from PIL import Image

    arrays = dict(np.load(path))
    n, h, w, per = (int(arrays.pop(key)) for key in ("n", "h", "w", "per"))
    arrays.pop("cols", None)
    data, offsets = arrays.pop("jpeg"), arrays.pop("offsets")
    images = np.empty((n, h, w, 3), np.uint8)
    for sheet in range(len(offsets) - 1):
        start = sheet * per
        count = min(per, n - start)
        pixels = np.array(Image.open(io.BytesIO(data[offsets[sheet] : offsets[sheet + 1]].tobytes())))
        rows, columns, _ = pixels.shape
        tiles = pixels.reshape(rows // h, h, columns // w, w, 3).transpose(0, 2, 1, 3, 4).reshape(-1, h, w, 3)
        images[start : start + count] = tiles[:count]
    return arrays | {"images": images}


def bundle(work: Path, output: Path) -> None:
    """All records, figures and logs in one compressed tar, cut into files that may come back."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as tar:
        for path in sorted(
            [
                *work.glob("records/*/*.json"),
                *work.glob("records/*/*.png"),
                *work.glob("records/*/*.md"),
                *work.glob("logs/*.log"),
            ]
        ):
            tar.add(path, arcname=str(path.relative_to(work)))
        for path in sorted(work.glob("records/*/partial/*/log")):
            tar.add(path, arcname=f"logs/{path.parts[-4]}-{path.parts[-2]}.log")
    content = whole.getvalue()
    for old in output.glob("session.tar.gz.*"):
        old.unlink()
    for number, start in enumerate(range(0, len(content), COMES_BACK)):
        (output / f"session.tar.gz.{number}").write_bytes(content[start : start + COMES_BACK])


# -- here again --------------------------------------------------------------------------------------------------------


def collect(files: Sequence[Path], records: Path) -> str:
    """Put the records of a bundle among those that are here; nothing is written over."""
    content = b"".join(path.read_bytes() for path in sorted(files))
    new = 0
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as tar:
        for member in tar.getmembers():
            parts = Path(member.name).parts
            file = tar.extractfile(member)
            if file is None or ".." in parts:
                continue
            place = records.joinpath(*(parts[1:] if parts[0] == "records" else parts))
            if parts[0] == "records" and place.exists():
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(file.read())
            new += parts[0] == "records"
    return f"{new} new records in {records}"


def plan(records: Path, steps: Sequence[str]) -> Iterator[str]:
    """What is left of each study, and about how long it takes on an H200."""
    import study
    import study_cells

    total, seen = 0.0, set[str]()
    for step in steps:
        name, *more = step.split("@")
        if not (STUDIES / f"{name}.json").exists():
            continue
        read = study_cells.read_study(STUDIES / f"{name}.json")
        output = records / name
        output.mkdir(parents=True, exist_ok=True)
        seeds = [int(word) for word in more[1].split("+")] if len(more) > 1 else None
        sets = more[0].split("+") if more and more[0] else None
        cells = [cell for cell in study.left(read, output, None, sets=sets, seeds=seeds) if cell.identity not in seen]
        seen |= {cell.identity for cell in cells}  # the same training in another study is taken over
        at_once, earlier = read.get("at_once", 4), study_cells.beside(output)
        minutes = sum(study_cells.seconds_for(cell, earlier, at_once)[0] for cell in cells) / at_once / 60
        total += minutes
        yield f"{step:32} {len(cells):3} cells left, {minutes:5.0f} minutes"
    yield f"{'in all':32} {'':14} {total:5.0f} minutes"


if __name__ == "__main__":
    main()
