"""Whatever a file or a link among the user's data is: no traceback, no wait without end, no memory without bound."""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siammm.runs import files
from tests.commands import TINY
from tests.data.image_sets import example_images, write_folder
from tests.nursery import Nursery

# What a command may take beyond what it has once everything is imported.
BUDGET = 2**31
LINKS = {"itself": "itself.png", "a device without end": "/dev/zero", "a terminal": "/dev/tty", "a pipe": "pipe"}


@pytest.mark.parametrize("to", LINKS)
def test_a_link_in_an_image_folder(to: str, nursery: Nursery, tmp_path: Path) -> None:
    """It is an image that cannot be read, named with its reason; the others are trained on, if it is allowed."""
    root = write_folder(tmp_path, example_images(24, size=(8, 8)))
    os.mkfifo(root / "pipe")
    (root / "class000" / "itself.png").symlink_to(LINKS[to] if LINKS[to].startswith("/") else root / "pipe")
    if to == "itself":
        (root / "class000" / "itself.png").unlink()
        (root / "class000" / "itself.png").symlink_to("itself.png")
    arguments = ["train", str(root), *TINY, "--epochs", "1"]
    refused = nursery.start(arguments, cwd=tmp_path, memory=BUDGET)
    assert refused.wait() == 2
    assert "1 of 25 images (4 %) cannot be read" in refused.err
    assert "'class000/itself.png', which cannot be read (" in refused.err
    assert "Traceback" not in refused.err
    allowed = nursery.start([*arguments, "--max-bad-images", "0.1"], cwd=tmp_path, memory=BUDGET)
    assert allowed.wait() == 0, allowed.err
    assert "class000/itself.png" in (tmp_path / "images-run" / files.SET_ASIDE).read_text()


def test_links_out_of_an_image_folder_are_said_once(nursery: Nursery, tmp_path: Path) -> None:
    root = write_folder(tmp_path, example_images(24, size=(8, 8)))
    elsewhere = write_folder(tmp_path / "elsewhere", example_images(6, size=(8, 8)))
    (root / "class000" / "more").symlink_to(elsewhere)
    (root / "class001" / "one.png").symlink_to(elsewhere / "class000" / "00000.png")
    (root / "class001" / "inside.png").symlink_to(root / "class000" / "00000.png")
    command = nursery.start(["train", str(root), *TINY, "--epochs", "1"], cwd=tmp_path)
    assert command.wait() == 0, command.err
    said = " ".join(command.out.split())
    assert said.count("read through links that lead out of it") == 1
    assert "7 images of 32 in" in said


@pytest.mark.parametrize("suffix", ["npy", "npz", "parquet", "safetensors"])
def test_a_table_that_is_a_pipe_or_a_device(suffix: str, nursery: Nursery, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f"pipe.{suffix}")
    (tmp_path / f"zero.{suffix}").symlink_to("/dev/zero")
    for name, kind in (("pipe", "a pipe"), ("zero", "a device")):
        command = nursery.start(["cluster", f"{name}.{suffix}"], cwd=tmp_path, memory=BUDGET)
        assert f"{kind}, not a file" in command.refusal(20)


@pytest.mark.parametrize("command", ["cluster", "train"])
def test_a_small_npz_that_unpacks_to_gigabytes(command: str, nursery: Nursery, tmp_path: Path) -> None:
    """7 GB of zeros in 7 MB, which are refused before they are unpacked."""
    header, kind = io.BytesIO(), "<f4" if command == "cluster" else "|u1"
    shape = (7 * 2**20, 256) if command == "cluster" else (7 * 2**20, 32, 32, 1)
    np.lib.format.write_array_header_1_0(header, {"descr": kind, "fortran_order": False, "shape": shape})
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    start = packer.compress(header.getvalue()) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(bytes(2**24)) + packer.flush(zlib.Z_FULL_FLUSH)
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", start + block * (7 * 2**30 // 2**24) + packer.flush())
        member = archive.filelist[0]
        member.compress_type, member.file_size = zipfile.ZIP_DEFLATED, len(header.getvalue()) + 7 * 2**30
    assert (tmp_path / "x.npz").stat().st_size < 2**23
    assert "would unpack to 7.0 GiB" in nursery.start([command, "x.npz"], cwd=tmp_path, memory=BUDGET).refusal()


def test_a_small_parquet_file_that_unpacks_to_gigabytes(nursery: Nursery, tmp_path: Path) -> None:
    """One image of a megabyte a hundred thousand times: the file stores it once."""
    picture = bytes(2**20)
    rows = pa.DictionaryArray.from_arrays(pa.array(np.zeros(100_000, np.int32)), pa.array([picture]))
    pq.write_table(pa.table({"image": rows}), tmp_path / "x.parquet", store_schema=False)
    assert (tmp_path / "x.parquet").stat().st_size < 2**23
    command = nursery.start(["train", "x.parquet", *TINY], cwd=tmp_path, memory=2**30)
    assert command.wait() == 2, command.err
    assert "need more memory than is free" in command.err


def test_a_large_file_that_is_no_image_is_not_read(nursery: Nursery, tmp_path: Path) -> None:
    root = write_folder(tmp_path, example_images(24, size=(8, 8)))
    with (root / "class000" / "large.png").open("wb") as file:
        file.truncate(2**30)
    command = nursery.start(["train", str(root), *TINY], cwd=tmp_path, memory=2**29)
    assert command.wait() == 2
    assert "large.png', which is not an image in a supported format" in command.err
