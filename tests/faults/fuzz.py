"""Damaged inputs by the hundred, each from a seed: what reads them ends well or refuses in a sentence.

    python -m tests.faults.fuzz 1000 --seed 7

Prints every input that ended in anything else. The kinds: tables (``.npy``, ``.npz``, Parquet, safetensors),
CSV labels and targets, images in ``.npz``, Parquet, tar and folders, and flags.
"""

from __future__ import annotations

import argparse
import io
import resource
import sys
import tempfile
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import save

from siammm.audit.images import _read_labels  # pyright: ignore[reportPrivateUsage]
from siammm.cli import parse
from siammm.core.errors import SiamMMError
from siammm.data.decode import decode_all
from siammm.data.embeddings import read_embeddings
from siammm.data.sources import open_source
from siammm.data.voc import open_targets
from siammm.settings.checks import check_settings
from siammm.settings.training import TrainConfig
from tests.data.image_sets import WRITERS, encoded, example_images

IMAGES = example_images(6, size=(6, 5))
_HEADER_WORDS = [b"'<f4'", b"|u1", b"(", b")", b"{", b"'", b",", b"\n", b"-1", b"9" * 30, b"1e9", b"None", b"\xff"]
_FLAG_VALUES = ["inf", "-inf", "nan", "0", "-1", "1e300", "1" + 400 * "0", "", "None", "é", 300 * "x", "auto", "0.5"]
_FLAGS = [
    "--temperature", "--tol", "--n-components", "--merge", "--merge-threshold", "--epochs", "--batch-size",
    "--learning-rate", "--output", "--device", "--image-size", "--workers", "--crop-scale", "--preset", "--method",
    "--accumulate", "--momentum", "--random-state", "--save-every", "--loader", "--max-bad-images", "--seconds",
]  # fmt: skip


def damaged(data: bytes, random: np.random.Generator) -> bytes:
    """The bytes with a few faults in them; more often near the start and the end, where headers are."""
    content = bytearray(data)
    for _ in range(int(random.integers(1, 5))):
        if not content:
            break
        n = len(content)
        near = [int(random.integers(n)), int(random.integers(min(n, 160))), n - 1 - int(random.integers(min(n, 300)))]
        at, how = near[random.integers(3)], random.integers(6)
        if how == 0:
            content[at] ^= 1 << int(random.integers(8))
        elif how == 1:
            content[at] = int(random.integers(256))
        elif how == 2:
            del content[at:]
        elif how == 3:
            del content[at : at + int(random.integers(1, 20))]
        elif how == 4:
            content[at:at] = _HEADER_WORDS[random.integers(len(_HEADER_WORDS))]
        else:
            content[at : at + 8] = random.bytes(8)
    return bytes(content)


def _bytes(write: Callable[[io.BytesIO], object]) -> bytes:
    stream = io.BytesIO()
    write(stream)
    return stream.getvalue()


_X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
_TABLE = pa.table({"embedding": list(_X), "id": [str(i) for i in range(8)], "label": np.arange(8) % 3})
TABLES = {
    "npy": _bytes(lambda file: np.save(file, _X)),
    "npz": _bytes(lambda file: np.savez_compressed(file, X=_X, label=np.arange(8))),
    "parquet": _bytes(lambda file: pq.write_table(_TABLE, file)),
    "safetensors": save({"embeddings": _X, "label": np.arange(8)}),
}
LABELS = {
    "csv": b"id,label\n" + b"".join(b"%d,%d\n" % (i, i % 3) for i in range(8)),
    "npy": _bytes(lambda file: np.save(file, np.arange(8))),
    "parquet": TABLES["parquet"],
}
TARGETS = {
    "csv": b"image,cat,dog\n" + b"".join(b"%d,1,0\n" % i for i in range(6)),
    "parquet": _bytes(lambda file: pq.write_table(pa.table({"image": list("012345"), "cat": [1] * 6}), file)),
}


def one(seed: int, folder: Path) -> str:
    """Make and read the input of a seed; returns its kind. Raises what the reader raises beyond a refusal."""
    random = np.random.default_rng(seed)
    kind = ("table", "labels", "targets", "images", "inner", "flags")[random.integers(6)]
    try:
        if kind == "table":
            _with_file(TABLES, folder, random, read_embeddings)
        elif kind == "labels":
            _with_file(LABELS, folder, random, lambda path: _read_labels(path, None, None))
        elif kind == "targets":
            source = open_source(IMAGES.images)
            _with_file(TARGETS, folder, random, lambda path: open_targets(source, path))
        elif kind == "images":
            _images(folder, random)
        elif kind == "inner":
            _inner(folder, random)
        else:
            _flags(random)
    except SiamMMError as refusal:
        if "\n" in str(refusal).strip():
            raise AssertionError(f"several lines: {refusal}") from refusal
    return kind


def _with_file(
    files: dict[str, bytes], folder: Path, random: np.random.Generator, read: Callable[[Path], object]
) -> None:
    suffix = sorted(files)[random.integers(len(files))]
    path = folder / f"t.{suffix}"
    path.write_bytes(damaged(files[suffix], random))
    read(path)


def _images(folder: Path, random: np.random.Generator) -> None:
    """A set in one of the stored forms, with one of its files damaged."""
    path = WRITERS[sorted(WRITERS)[random.integers(len(WRITERS))]](folder, IMAGES)
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    chosen = files[random.integers(len(files))]
    chosen.write_bytes(damaged(chosen.read_bytes(), random))
    decode_all(open_source(path), (6, 5), threads=1, limit=1.0)


def _inner(folder: Path, random: np.random.Generator) -> None:
    """An array inside a sound ``.npz``, or an image inside a sound table, that is damaged."""
    if random.integers(2):
        content = damaged(_bytes(lambda file: np.save(file, IMAGES.images)), random)
        with zipfile.ZipFile(folder / "x.npz", "w") as archive:
            archive.writestr("images.npy", content)
        decode_all(open_source(folder / "x.npz"), threads=1, limit=1.0)
    else:
        form = ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP")[random.integers(6)]
        pq.write_table(pa.table({"image": [damaged(encoded(IMAGES.images[0], form), random)]}), folder / "x.parquet")
        decode_all(open_source(folder / "x.parquet", max_pixels=10**6), (6, 5), threads=1, limit=1.0)


def _flags(random: np.random.Generator) -> None:
    command = ("train", "cluster", "bench")[random.integers(3)]
    arguments = [command] + (["x.npy"] if command != "bench" else [])
    for _ in range(int(random.integers(1, 4))):
        arguments.append(_FLAGS[random.integers(len(_FLAGS))])
        if random.integers(8):
            arguments.append(_FLAG_VALUES[random.integers(len(_FLAG_VALUES))])
    try:
        config = parse(arguments)
    except SystemExit as stop:
        if stop.code not in (0, 2):
            raise AssertionError(f"exit code {stop.code}") from stop
        return
    if isinstance(config, TrainConfig):
        check_settings(config)


def run(seeds: Iterable[int]) -> dict[int, str]:
    """Tries these seeds; the traceback of each that ended in anything but a result or a refusal."""
    failed: dict[int, str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    one(seed, Path(folder))
                except Exception:
                    failed[seed] = traceback.format_exc()
    return failed


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    failed = run(range(given.seed, given.seed + given.count))
    for seed, text in failed.items():
        sys.stdout.write(f"seed {seed}\n{text}\n")
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    sys.stdout.write(f"{given.count} inputs, {len(failed)} with a traceback, at most {most:.1f} GiB of memory\n")


if __name__ == "__main__":
    main()
