"""Small image sets in every form that ``open_source`` reads, all from the same arrays.

    images = example_images()
    path = WRITERS["tar"](tmp_path, images)
    open_source(path)

Images are stored without loss. Labels ascend, so that an image folder, which is read class by class, keeps the order.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


@dataclass(frozen=True)
class ExampleImages:
    """Pixels, labels in ascending order, and the names of the classes in alphabetical order."""

    images: np.ndarray
    labels: np.ndarray
    names: list[str]


def example_images(n: int = 12, *, size: tuple[int, int] = (8, 10), n_classes: int = 3, seed: int = 0) -> ExampleImages:
    """Images of random pixels around a colour that differs by class, so that classes can be told apart."""
    random = np.random.default_rng(seed)
    labels = np.arange(n) * n_classes // n
    colours = random.integers(40, 216, (n_classes, 1, 1, 3))
    images = (colours[labels] + random.integers(-40, 40, (n, *size, 3))).astype(np.uint8)
    return ExampleImages(images, labels.astype(np.int64), [f"class{number:03d}" for number in range(n_classes)])


def encoded(image: np.ndarray, form: str = "PNG", **settings: Any) -> bytes:
    """The bytes of an image file; PNG by default."""
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, form, **settings)
    return stream.getvalue()


def write_folder(folder: Path, given: ExampleImages) -> Path:
    root = folder / "images"
    for i, (image, label) in enumerate(zip(given.images, given.labels, strict=True)):
        path = root / given.names[label] / f"{i:05d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(image))
    return root


def write_npy(folder: Path, given: ExampleImages) -> Path:
    """Without labels: there is no place for them."""
    np.save(folder / "images.npy", given.images)
    return folder / "images.npy"


def write_npz(folder: Path, given: ExampleImages) -> Path:
    np.savez(folder / "images.npz", images=given.images, labels=given.labels, names=np.array(given.names))
    return folder / "images.npz"


def image_table(given: ExampleImages, rows: slice = slice(None)) -> Any:
    """An Arrow table as ``datasets`` lays it out, with the names of the classes in its metadata."""
    import pyarrow as pa

    values = [{"bytes": encoded(image), "path": f"{i}.png"} for i, image in enumerate(given.images[rows])]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    label = {"names": given.names, "_type": "ClassLabel"}
    info = {"info": {"features": {"image": {"_type": "Image"}, "label": label}}}
    schema = pa.schema([("image", kind), ("label", pa.int64())], metadata={b"huggingface": json.dumps(info).encode()})
    return pa.table([pa.array(values, kind), pa.array(given.labels[rows])], schema=schema)


def write_parquet(folder: Path, given: ExampleImages) -> Path:
    """One file of several row groups."""
    import pyarrow.parquet as pq

    pq.write_table(image_table(given), folder / "images.parquet", row_group_size=5)
    return folder / "images.parquet"


def write_parquet_folder(folder: Path, given: ExampleImages) -> Path:
    """Two files, as a data set on the Hugging Face hub has them."""
    import pyarrow.parquet as pq

    half = len(given.images) // 2
    root = folder / "hub" / "data"
    root.mkdir(parents=True)
    for number, rows in enumerate((slice(None, half), slice(half, None))):
        path = root / f"train-{number:05d}-of-00002.parquet"
        pq.write_table(image_table(given, rows), path, row_group_size=3)
    return root.parent


def write_datasets(folder: Path, given: ExampleImages) -> Path:
    """What ``Dataset.save_to_disk`` of Hugging Face's datasets leaves, in two shards of several batches."""
    import pyarrow as pa

    root = folder / "saved"
    root.mkdir()
    half = len(given.images) // 2
    files: list[dict[str, str]] = []
    for number, rows in enumerate((slice(None, half), slice(half, None))):
        table = image_table(given, rows)
        files.append({"filename": f"data-{number:05d}-of-00002.arrow"})
        with pa.ipc.new_stream(str(root / files[-1]["filename"]), table.schema) as stream:
            stream.write_table(table, max_chunksize=4)
    (root / "state.json").write_text(json.dumps({"_data_files": files, "_split": "train", "_format_type": None}))
    (root / "dataset_info.json").write_text(json.dumps({"features": {}}))
    return root


def write_datasets_dict(folder: Path, given: ExampleImages) -> Path:
    """What ``DatasetDict.save_to_disk`` leaves: the split ``train``, to be opened as ``path::train``."""
    root = folder / "saved_dict"
    root.mkdir()
    write_datasets(root, given).rename(root / "train")
    (root / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    return root


def add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def write_tar(folder: Path, given: ExampleImages, *, name: str = "images.tar", rows: slice = slice(None)) -> Path:
    with tarfile.open(folder / name, "w") as tar:
        for i in range(len(given.images))[rows]:
            add_member(tar, f"{i:05d}.png", encoded(given.images[i]))
            add_member(tar, f"{i:05d}.cls", given.names[given.labels[i]].encode())
    return folder / name


def write_tar_shards(folder: Path, given: ExampleImages) -> Path:
    """Three shards; they are also reached as ``shards/part-{000..002}.tar``."""
    root = folder / "shards"
    root.mkdir()
    third = -(-len(given.images) // 3)
    for number in range(3):
        rows = slice(number * third, (number + 1) * third)
        write_tar(root, given, name=f"part-{number:03d}.tar", rows=rows)
    return root


Writer = Callable[[Path, ExampleImages], Path]

WRITERS: dict[str, Writer] = {
    "folder": write_folder,
    "npz": write_npz,
    "parquet": write_parquet,
    "parquet folder": write_parquet_folder,
    "datasets": write_datasets,
    "tar": write_tar,
    "tar shards": write_tar_shards,
}
"""By kind; each writes into an existing folder and returns what to give to ``open_source``. All keep the labels."""
