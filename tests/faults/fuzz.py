"""Damaged inputs by the thousand, each from a seed, each given to a command as from the command line.

    with Nursery() as nursery:
        for outcome in tried(nursery, prepared(nursery, folder), range(1000)):
            assert outcome.problem is None

The kinds: tables (``.npy``, ``.npz``, Parquet, safetensors), labels, targets, images in every stored form, arrays and
pictures inside sound files, every file of a run, of an evaluation, an audit and a clustering, and every flag.

Commands run in processes that do nothing else, some hundred in each, because a process that has loaded torch takes
longer to start than most commands take. What they print and how they end is what a user would see.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import save_file

from siammm.cli import main
from siammm.runs.run import Run
from tests.commands import TINY
from tests.data.image_sets import WRITERS, encoded, example_images, write_folder
from tests.faults.damage import damaged, harm
from tests.nursery import Nursery
from tests.settings.test_flags import FLAGS, ON_OFF

# A guard for the machine, above what is allowed.
_GUARD_BYTES, MOST_BYTES = 6 * 2**30, 4 * 2**30
_MOST_SECONDS = 120.0
_AT_ONCE = 100
_SEEDS, _OUTCOMES = "seeds.json", "outcomes.jsonl"
_ENVIRONMENT = {"COLUMNS": "300", "HF_HUB_OFFLINE": "1"}
IMAGES = example_images(6, size=(6, 5))


@dataclass(frozen=True)
class Outcome:
    """What came of one input."""

    kind: str
    what: str
    """The file or the flags that were harmed."""
    code: int
    peak: int
    """The most memory, in bytes."""
    problem: str | None = None


def prepared(nursery: Nursery, folder: Path) -> Path:
    """A folder with a run and its images, an evaluation, an audit, and clusterings of a table and of images."""
    whole = folder / "whole"
    whole.mkdir(parents=True)
    write_folder(whole, example_images(24, size=(8, 8), n_classes=3))
    for suffix in ("npy", "npz", "parquet", "safetensors"):
        write_table(whole / f"t.{suffix}", 24)
    commands = [
        ["train", "images", *TINY, "--output", "run"],
        ["evaluate", "run", "--protocols", "knn", "--output", "run-evaluation"],
        ["audit", "run"],
        ["cluster", "t.npz", "--output", "clustered", *FEW],
        ["cluster", "images", "--encoder", "run", "--output", "found", *FEW],
    ]
    for command in commands:
        started = nursery.start(command, cwd=whole, environment=_ENVIRONMENT)
        assert started.wait() == 0, started.err
    shutil.copytree(whole / "run-evaluation", whole / "other")
    Run.open(whole / "run").group_names.give(0, "birds")
    (whole / "run" / "set_aside.json").write_text('{"total": 25, "set_aside": [{"image": "x", "reason": "y"}]}')
    for name in (".out", ".err"):
        (whole / name).unlink()
    return whole


def tried(nursery: Nursery, whole: Path, seeds: Sequence[int]) -> Iterator[Outcome]:
    """What came of each seed, in their order, as soon as it is known."""
    work, rest = whole.parent / "work", list(seeds)
    while rest:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        (work / _SEEDS).write_text(json.dumps(rest[:_AT_ONCE]))
        worker = nursery.start_program(
            Path(__file__), [str(whole)], cwd=work, data=_GUARD_BYTES, environment=_ENVIRONMENT
        )
        n_done, last = 0, time.monotonic()
        while True:
            runs = worker.is_running()  # before the last look
            written = (work / _OUTCOMES).read_text() if (work / _OUTCOMES).exists() else ""
            lines = written.split("\n")[:-1]  # whole ones: the last may be half written
            for line in lines[n_done:]:
                yield Outcome(**json.loads(line))
            last = time.monotonic() if len(lines) > n_done else last
            n_done = len(lines)
            if not runs:
                break
            if time.monotonic() > last + _MOST_SECONDS:
                worker.kill()
            time.sleep(0.02)
        if n_done < len(rest[:_AT_ONCE]):  # the process did not survive this one
            seed, code = rest[n_done], worker.wait()
            how = f"more than {_MOST_SECONDS:.0f} s, or killed" if code == -signal.SIGKILL else f"ended with {code}"
            yield Outcome("", "", code, 0, f"seed {seed}: {how}: {worker.err[-1500:]}")
            n_done += 1
        rest = rest[n_done:]


# -- the process that tries them ---------------------------------------------------------------------------------------


def _work(whole: Path) -> None:
    """Try the seeds that are listed in the working folder."""
    for category in (UserWarning, RuntimeWarning):
        warnings.simplefilter("always", category)  # and not only the first time
    here = Path.cwd()
    with (here / _OUTCOMES).open("a") as file:
        for seed in json.loads((here / _SEEDS).read_text()):
            file.write(json.dumps(asdict(_one(seed, whole, here / "input"))) + "\n")
            file.flush()


def _one(seed: int, whole: Path, folder: Path) -> Outcome:
    """Make the input of a seed, give it to a command, and judge how that ended."""
    draw = random.Random(seed)
    kind = draw.choices(list(KINDS), [weight for weight, _ in KINDS.values()])[0]
    folder.mkdir()
    try:
        what, arguments = KINDS[kind][1](whole, folder, draw)
        before = _entries(folder)
        Path("/proc/self/clear_refs").write_text("5")  # the peak is that of this command
        code, out, err = _called(arguments, folder)
        peak = 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
        problem = _judged(code, err, out, peak, _entries(folder) - before)
    finally:
        shutil.rmtree(folder)
    if problem is not None:
        command = shlex.join(arguments).replace(f"{whole.parent}/", "")  # a record names no folder of the machine
        problem = f"seed {seed} ({kind}, {what}): siammm {command}: {problem}"
    return Outcome(kind, what, code, peak, problem)


def _called(arguments: list[str], folder: Path) -> tuple[int, str, str]:
    """The exit code of ``siammm`` with these arguments in a folder, and what it prints."""
    before, kept = os.getcwd(), [os.dup(number) for number in (1, 2)]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        os.chdir(folder)
        for number, file in ((1, out), (2, err)):
            os.dup2(file.fileno(), number)
        try:
            code = main(arguments)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except BaseException:
            traceback.print_exc()
            code = 1
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            for number, descriptor in zip((1, 2), kept, strict=True):
                os.dup2(descriptor, number)
                os.close(descriptor)
            os.chdir(before)
        said: list[str] = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode("utf-8", "replace"))
    return code, said[0], said[1]


def _entries(folder: Path) -> set[str]:
    return {
        os.path.relpath(Path(root) / name, folder)
        for root, folders, files in os.walk(folder)
        for name in (*folders, *files)
    }


def _judged(code: int, err: str, out: str, peak: int, new: set[str]) -> str | None:
    """What is wrong with how a command ended; None if nothing is."""
    last = err.rstrip("\n").rpartition("\n")[2]
    if code not in (0, 2):
        return f"exit code {code}: {err[-1500:]}"
    if "Traceback" in err + out:
        return f"a traceback: {(err + out)[-1500:]}"
    if code == 2 and not (re.match(r"siammm: .+[.?]$", last) or "─" in last):  # or tyro's box of what cannot be parsed
        return f"no sentence at the end: {err[-800:]}"
    # A training that began says how far it got before it finds that it cannot go on.
    lines = [line for line in err.splitlines() if not re.match(r"epoch \d+ of \d+: ", line)]
    if code == 2 and last.startswith("siammm: ") and len(lines) > 1:
        return f"more than a sentence: {err[-800:]}"
    if "Warning" in err:
        return f"a warning: {err[-800:]}"
    if hidden := [name for name in new if re.search(r"\.(partial|old|spool)\b", name)]:
        return f"left behind: {hidden}"
    ours = ("run", "new-unfinished", *(["new"] if "new/config.json" in new else []))  # a training that had begun
    if code == 2 and (left := [name for name in new if not name.startswith(ours)]):
        return f"partial output: {left}"
    if peak > MOST_BYTES:
        return f"{peak / 2**30:.1f} GiB of memory"
    return None


# -- the kinds ---------------------------------------------------------------------------------------------------------

FEW = ["--n-components", "3", "--merge", "none", "--max-iter", "3", "--device", "cpu"]
_READ_TABLE = [
    ["cluster", "TABLE", "--output", "new", *FEW],
    ["cluster", "TABLE", "--output", "new", "--family", "gaussian", *FEW],
    ["cluster", "TABLE", "--output", "new", "--device", "cpu"],
    ["audit", "TABLE", "--output", "new", "--device", "cpu"],
    ["evaluate", "TABLE", "--protocols", "knn", "--output", "new", "--device", "cpu"],
]
_READ_IMAGES = [
    ["embed", "RUN", "--data", "IMAGES", "--output", "new.parquet", "--device", "cpu"],
    ["embed", "RUN", "--data", "IMAGES", "--output", "new.npy", "--device", "cpu", "--max-bad-images", "1"],
    ["evaluate", "RUN", "--data", "IMAGES", "--protocols", "knn", "--output", "new", "--device", "cpu"],
    ["train", "IMAGES", *TINY, "--epochs", "1", "--n-components", "2", "--batch-size", "4", "--output", "new"],
    ["train", "IMAGES", *TINY, "--epochs", "1", "--n-components", "2", "--batch-size", "4", "--output", "new",
     "--loader", "streaming", "--workers", "0", "--max-bad-images", "0.5"],
]  # fmt: skip


def write_table(path: Path, n: int) -> None:
    """Sound embeddings of three classes with ids, as far as the format has room for them."""
    generator = np.random.default_rng(0)
    X = (generator.normal(size=(n, 4)) + 3 * np.eye(3, 4)[np.arange(n) % 3]).astype(np.float32)
    label, ids = np.arange(n) % 3, np.array([str(i) for i in range(n)])
    if path.suffix == ".npy":
        np.save(path, X)
    elif path.suffix == ".npz":
        np.savez_compressed(path, X=X, label=label, id=ids)
    elif path.suffix == ".parquet":
        pq.write_table(pa.table({"embedding": list(X), "id": ids, "label": label}), path)
    else:
        save_file({"embeddings": X, "label": label}, path)


Case = tuple[str, list[str]]


def _filled(template: list[str], **names: Path | str) -> list[str]:
    return [str(names.get(word, word)) for word in template]


def _table(whole: Path, folder: Path, draw: random.Random) -> Case:
    path = folder / f"t.{draw.choice(['npy', 'npz', 'parquet', 'safetensors'])}"
    shutil.copyfile(whole / path.name, path)
    harm(path, draw)
    return path.name, _filled(draw.choice(_READ_TABLE), TABLE=path.name)


def _labels(whole: Path, folder: Path, draw: random.Random) -> Case:
    path = folder / f"labels.{draw.choice(['csv', 'npy', 'parquet'])}"
    if path.suffix == ".csv":
        path.write_text("id,label\n" + "".join(f"{i},{i % 3}\n" for i in range(24)))
    elif path.suffix == ".npy":
        np.save(path, np.arange(24) % 3)
    else:
        pq.write_table(pa.table({"id": [str(i) for i in range(24)], "label": np.arange(24) % 3}), path)
    harm(path, draw)
    table = whole / f"t.{draw.choice(['npz', 'parquet'])}"
    return path.name, ["audit", str(table), "--labels", path.name, "--output", "new", "--device", "cpu"]


def _targets(whole: Path, folder: Path, draw: random.Random) -> Case:
    """Several labels per image, in a table beside the images."""
    path = folder / f"targets.{draw.choice(['csv', 'parquet'])}"
    names = [str(file.relative_to(whole / "images")) for file in sorted((whole / "images").rglob("*.png"))]
    cat, dog = [i % 2 for i in range(len(names))], [i // 2 % 2 for i in range(len(names))]
    if path.suffix == ".csv":
        rows = zip(names, cat, dog, strict=True)
        path.write_text("image,cat,dog\n" + "".join(f"{a},{b},{c}\n" for a, b, c in rows))
    else:
        pq.write_table(pa.table({"image": names, "cat": cat, "dog": dog}), path)
    harm(path, draw)
    given = f"{whole / 'images'}::{path.name}"
    return path.name, [
        "evaluate", str(whole / "run"), "--protocols", "transfer", "--transfer", given, "--transfer-test", given,
        "--epochs", "1", "--output", "new", "--device", "cpu",
    ]  # fmt: skip


def _images(whole: Path, folder: Path, draw: random.Random) -> Case:
    """A set in one of the stored forms, with one of its files damaged."""
    form = draw.choice(sorted(WRITERS))
    path = WRITERS[form](folder, IMAGES)
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    harm(draw.choice(files), draw)
    return form, _filled(draw.choice(_READ_IMAGES), IMAGES=path.name, RUN=whole / "run")


def _inner(whole: Path, folder: Path, draw: random.Random) -> Case:
    """An array inside a sound ``.npz``, or a picture inside a sound table, that is damaged."""
    if draw.randrange(2):
        path, stream, form = folder / "x.npz", io.BytesIO(), "array"
        np.save(stream, IMAGES.images)
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("images.npy", damaged(stream.getvalue(), draw))
    else:
        path, form = folder / "x.parquet", draw.choice(["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"])
        pictures = [encoded(image, form) for image in IMAGES.images]
        pictures[0] = damaged(pictures[0], draw)
        pq.write_table(pa.table({"image": pictures}), path)
    return f"{form} in {path.name}", _filled(draw.choice(_READ_IMAGES), IMAGES=path.name, RUN=whole / "run")


_RESUME = ["train", "IMAGES", "--resume", "run", "--device", "cpu"]
_GO_ON = [*_RESUME, "--epochs", "3"]
_AGAIN = ["train", "IMAGES", *TINY, "--output", "run", "--resume-if-exists"]
_REPORT = ["report", "run", "--max-thumbnails", "0", "--no-open", "--output", "page.html"]
_COMPARE = ["compare", "run-evaluation", "other"]
_EXPORT = ["export", "run", "--formats", "tables", "--output", "new", "--data", "IMAGES"]
_AUDIT = ["audit", "run", "--output", "new", "--data", "IMAGES"]
_EVALUATE = ["evaluate", "run", "--protocols", "knn", "--output", "new", "--data", "IMAGES"]
_EMBED = ["embed", "run", "--data", "IMAGES", "--output", "new.parquet"]
_SORT = ["sort", "run", "--to", "new", "--data", "IMAGES"]
_START = ["train", "IMAGES", *TINY, "--weights", "run", "--output", "new", "--epochs", "1"]
_CLUSTER = ["cluster", "IMAGES", "--encoder", "run", "--output", "new", *FEW]
_OF_CLUSTERED = [
    ["report", "clustered", "--max-thumbnails", "0", "--no-open", "--output", "page.html"],
    ["export", "clustered", "--formats", "tables", "--output", "new"],
    ["audit", "TABLE", "--mixture", "clustered/mixture.safetensors", "--output", "new"],
    ["cluster", "TABLE", "--init", "clustered/mixture.safetensors", "--output", "new", "--max-iter", "2"],
]
_OF_FOUND = [
    ["report", "found", "--max-thumbnails", "0", "--no-open", "--output", "page.html"],
    ["embed", "found", "--data", "IMAGES", "--output", "new.parquet"],
    ["sort", "found", "--to", "new", "--data", "IMAGES"],
    ["audit", "found", "--output", "new", "--data", "IMAGES"],
]
READERS: dict[str, list[list[str]]] = {
    "run/config.json": [_RESUME, _GO_ON, _AGAIN, _REPORT, _EXPORT, _AUDIT, _EVALUATE, _EMBED, _START],
    "run/metrics.jsonl": [_RESUME, _GO_ON, _AGAIN, _REPORT],
    "run/inventory.parquet": [_RESUME, _GO_ON],
    "run/checkpoints/last.safetensors": [_RESUME, _GO_ON],
    "run/.lock": [_RESUME, _AGAIN],
    "run/mixture.safetensors": [_REPORT, _EXPORT, _AUDIT, _EMBED],
    "run/encoder.safetensors": [_REPORT, _EXPORT, _EVALUATE, _EMBED, _START, _CLUSTER, _AGAIN],
    "run/assignments.parquet": [_REPORT, _AUDIT, _SORT],
    "run/embeddings.npy": [_REPORT, _AUDIT],
    "run/merges.json": [_REPORT],
    "run/names.json": [_REPORT, _SORT],
    "run/set_aside.json": [_REPORT],
    "run-evaluation/evaluation.json": [_REPORT, _COMPARE],
    "run-audit/suspects.parquet": [_REPORT],
    "run-audit/summary.json": [_REPORT],
    "clustered/summary.json": _OF_CLUSTERED,
    "clustered/mixture.safetensors": _OF_CLUSTERED,
    "clustered/assignments.parquet": _OF_CLUSTERED[:2],
    "found/summary.json": _OF_FOUND,
    "found/mixture.safetensors": _OF_FOUND,
    "found/assignments.parquet": _OF_FOUND,
    "found/embeddings.npy": _OF_FOUND,
    "found/embeddings.parquet": [["cluster", "found/embeddings.parquet", "--output", "new", *FEW], *_OF_FOUND],
}
"""Every stored file, and the commands that read it."""


def _stored(whole: Path, folder: Path, draw: random.Random) -> Case:
    """One of the files of a run and of what belongs to it."""
    name = draw.choice(list(READERS))
    for part in ("run", "run-evaluation", "run-audit", "other", "clustered", "found"):
        if part.split("-")[0] == name.split("/")[0].split("-")[0] or part in ("run", "other"):
            shutil.copytree(whole / part, folder / part)
    if name == "run/.lock":
        (folder / name).write_text('{"host": "h", "pid": 1, "started": 1, "place": "p", "token": "t"}')
        if draw.random() < 0.5:
            os.utime(folder / name, (1e9, 1e9))
    harm(folder / name, draw)
    return name, _filled(draw.choice(READERS[name]), IMAGES=whole / "images", TABLE=whole / "t.npz")


_VALUES = ["inf", "-inf", "nan", "0", "-1", "1e300", "1" + 400 * "0", "", "None", "é", 300 * "x", "auto", "0.5", "2",
           "3", "7", "1e-300", "none", "x", "[1]", "a b", "\t", "../x", "--", "run", "images", "t.npz", "/dev/null",
           "0x10", "1_000", "٣", "\udce9"]  # fmt: skip
_LARGE = {"--hidden-dim", "--embedding-dim", "--n-prototypes", "--queue-size", "--image-size", "--view-size",
          "--batch-size", "--n-components", "--port", "--max-thumbnails", "--thumbnail-size", "--n-neighbours",
          "--concentration-dims", "--n-negatives", "--accumulate", "--merge-floor", "--random-state"}  # fmt: skip
# What is tried with each command, short where all is sound; explore would not end.
_BASE: dict[str, list[str]] = {
    "train": ["train", "images", *TINY, "--epochs", "1"],
    "cluster": ["cluster", "t.npz", "--max-iter", "3"],
    "embed": ["embed", "run"],
    "evaluate": ["evaluate", "run", "--protocols", "knn"],
    "audit": ["audit", "run"],
    "report": ["report", "run", "--no-open", "--max-thumbnails", "0"],
    "explore": ["explore", "gone"],
    "export": ["export", "run", "--formats", "tables"],
    "sort": ["sort", "run", "--to", "sorted"],
    "compare": ["compare", "run-evaluation", "other"],
    "bench": ["bench"],
    "demo": ["demo"],
}
# At the end, where they count: with these, commands that would take minutes refuse.
_LAST = {"bench": ["--output", "images"], "demo": ["--random-state", "x"]}


def _flags(whole: Path, folder: Path, draw: random.Random) -> Case:
    """Up to three flags of a command, with values that may or may not be meant for them."""
    for part in ("run", "run-evaluation", "run-audit", "other", "images"):
        (folder / part).symlink_to(whole / part)
    (folder / "t.npz").symlink_to(whole / "t.npz")
    command = draw.choices(list(_BASE), [len(FLAGS[name].split()) for name in _BASE])[0]
    arguments, tried = list(_BASE[command]), list[str]()
    for _ in range(draw.choice([1, 1, 2, 3])):
        flag = draw.choice(FLAGS[command].split())
        if flag in ("--hub", "--resume"):  # the one sends something away, the other writes into the run
            continue
        tried.append(flag)
        if flag in ON_OFF:
            arguments.append(draw.choice([flag, f"--no-{flag[2:]}"]))
            continue
        arguments.append(flag)
        if draw.randrange(12):
            large = ["100000", "1000000"] if flag in _LARGE else []
            value = draw.choice([*_VALUES, *large])
            # Images of 1,000 pixels take the memory that is asked for, some 5 GiB; larger ones have no room.
            arguments.append("1_00" if value == "1_000" and flag in ("--image-size", "--view-size") else value)
    arguments += _LAST.get(command, [])
    if "--output" not in arguments and command not in ("explore", "sort", "compare", "bench", "demo"):
        arguments += ["--output", "new.parquet" if command == "embed" else "new"]
    return " ".join(tried), arguments


KINDS: dict[str, tuple[float, Callable[[Path, Path, random.Random], Case]]] = {
    "table": (0.2, _table),
    "labels": (0.06, _labels),
    "targets": (0.02, _targets),
    "images": (0.2, _images),
    "inner": (0.1, _inner),
    "stored": (0.24, _stored),
    "flags": (0.18, _flags),
}
"""How often each kind is drawn, and what makes one."""


if __name__ == "__main__":
    _work(Path(sys.argv[1]))
