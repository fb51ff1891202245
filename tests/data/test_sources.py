"""Sources: the same images give the same source however they are stored, and hostile files are refused or set aside."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from siammm.core.errors import StoredFileError
from siammm.data import decode
from siammm.data.decode import BadImage
from siammm.data.set_aside import decode_all
from siammm.data.sources import Source, open_source
from tests.data import image_sets
from tests.data.image_sets import WRITERS, ExampleImages, encoded
from tests.data.opened import GIVEN, refused

KINDS = {
    "folder": "folder",
    "npz": "array",
    "parquet": "parquet",
    "parquet folder": "parquet",
    "datasets": "datasets",
    "tar": "tar",
    "tar shards": "tar",
}


@pytest.fixture(params=sorted(WRITERS))
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """The same images in every form: its name and what to open."""
    return request.param, WRITERS[request.param](tmp_path, GIVEN)


def test_every_kind_gives_the_same_images_in_the_same_order(stored: tuple[str, Path]) -> None:
    source = open_source(stored[1])
    assert isinstance(source, Source)
    assert source.kind == KINDS[stored[0]]
    assert len(source) == len(GIVEN.images)
    for i, image in enumerate(GIVEN.images):
        pixels = source.image(i)
        np.testing.assert_array_equal(pixels, image)
        assert pixels.dtype == np.uint8
        assert pixels.flags.writeable
        assert pixels.flags.c_contiguous
    np.testing.assert_array_equal(decode_all(source).images, GIVEN.images)


def test_every_kind_gives_the_same_labels(stored: tuple[str, Path]) -> None:
    source = open_source(stored[1])
    assert source.labels is not None
    assert source.labels.dtype == np.int64
    np.testing.assert_array_equal(source.labels, GIVEN.labels)
    assert source.label_names == GIVEN.names


def test_labels_can_be_left_out(stored: tuple[str, Path]) -> None:
    source = open_source(str(stored[1]), label_key="")
    assert source.labels is None
    assert source.label_names is None


def test_every_kind_knows_its_shape_and_name(stored: tuple[str, Path]) -> None:
    source = open_source(str(stored[1]))
    assert source.uniform_shape() == (8, 10)
    assert source.size(3) == (8, 10)
    assert source.name == str(stored[1])
    assert str(stored[1]) in repr(source)


def test_identifiers_are_unique(stored: tuple[str, Path]) -> None:
    source = open_source(stored[1])
    assert len({source.identifier(i) for i in range(len(source))}) == len(source)


def test_positions_beyond_the_end_are_refused(stored: tuple[str, Path]) -> None:
    source = open_source(stored[1])
    np.testing.assert_array_equal(source.image(-1), GIVEN.images[-1])
    for i in (len(source), -len(source) - 1):
        for read in (source.image, source.identifier):
            with pytest.raises(IndexError):
                read(i)


def test_a_fingerprint_is_of_the_images_and_not_of_their_place(stored: tuple[str, Path], tmp_path: Path) -> None:
    before = open_source(stored[1]).fingerprint()
    assert len(before) == 64
    moved = tmp_path / "moved" / stored[1].name
    moved.parent.mkdir()
    shutil.move(stored[1], moved)
    os.utime(moved, (0, 0))
    assert open_source(moved).fingerprint() == before


def test_a_fingerprint_notices_other_images(tmp_path: Path) -> None:
    images = GIVEN.images.copy()
    images[5, 2, 3, 1] ^= 1
    fewer = ExampleImages(GIVEN.images[:-1], GIVEN.labels[:-1], GIVEN.names)
    for kind, write in WRITERS.items():
        prints: set[str] = set()
        for number, given in enumerate((GIVEN, ExampleImages(images, GIVEN.labels, GIVEN.names), fewer)):
            folder = tmp_path / kind / str(number)
            folder.mkdir(parents=True)
            prints.add(open_source(write(folder, given)).fingerprint())
        assert len(prints) == 3, kind


def test_a_fingerprint_notices_other_names(tmp_path: Path) -> None:
    root = image_sets.write_folder(tmp_path, GIVEN)
    before = open_source(root).fingerprint()
    (root / "class002" / "00011.png").rename(root / "class002" / "00012.png")
    assert open_source(root).fingerprint() != before


def test_a_fingerprint_exists_with_unreadable_images(tmp_path: Path) -> None:
    root = image_sets.write_folder(tmp_path, GIVEN)
    source = open_source(root)
    (root / "class000" / "00000.png").unlink()
    assert source.fingerprint() != open_source(root).fingerprint()


def test_threads_may_read_at_the_same_time(stored: tuple[str, Path]) -> None:
    source = open_source(stored[1])
    order = np.random.default_rng(0).integers(0, len(source), 200)
    with ThreadPoolExecutor(8) as pool:
        for i, pixels in zip(order, pool.map(source.image, order), strict=True):
            np.testing.assert_array_equal(pixels, GIVEN.images[i])


@pytest.mark.parametrize("used_before", [False, True])
def test_a_source_can_be_sent_to_another_process(stored: tuple[str, Path], used_before: bool) -> None:
    source = open_source(stored[1])
    if used_before:
        source.image(0)
    sent = pickle.dumps(source)
    assert len(sent) < 5000
    again = pickle.loads(sent)
    for i in (0, 7, 11):
        np.testing.assert_array_equal(again.image(i), GIVEN.images[i])
    np.testing.assert_array_equal(again.labels, GIVEN.labels)
    assert again.fingerprint() == source.fingerprint()


def _read_all(source: Source, queue: Any) -> None:
    queue.put([source.image(i) for i in range(len(source))])


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
def test_a_forked_process_can_read(stored: tuple[str, Path]) -> None:
    source = open_source(stored[1])
    source.image(0)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_read_all, args=(source, queue))
    child.start()
    np.testing.assert_array_equal(queue.get(timeout=30), GIVEN.images)
    child.join()


def test_a_spawned_process_with_another_folder_can_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sources = [open_source(write(Path(), GIVEN)) for write in WRITERS.values()]
    Path("sources.pickle").write_bytes(pickle.dumps(sources))
    program = (
        "import pickle, sys; sources = pickle.load(open(sys.argv[1], 'rb'));"
        "print([int(sum(int(s.image(i).sum()) for i in range(len(s)))) for s in sources])"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "sources.pickle")]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == [int(GIVEN.images.sum(dtype=np.int64))] * len(WRITERS)


def test_a_source_is_given_back_as_it_is() -> None:
    source = open_source("digits")
    assert open_source(source) is source


def test_opening_does_not_load_what_it_does_not_need() -> None:
    heavy = ("torch", "torchvision", "pyarrow", "sklearn", "pandas")
    program = f"import sys, siammm.data.sources; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_bad_images_are_set_aside_in_every_kind(tmp_path: Path) -> None:
    # A PNG whose pixels break off, behind a whole header.
    def broken(image: np.ndarray, form: str = "PNG") -> bytes:
        data = encoded(image, form)
        return data[:-40] if image is marked else data

    monkey = pytest.MonkeyPatch()
    for kind, write in WRITERS.items():
        if kind == "npz":
            continue
        images = [*GIVEN.images]
        marked = images[4]
        given = ExampleImages(np.empty(0), GIVEN.labels, GIVEN.names)
        object.__setattr__(given, "images", images)
        monkey.setattr(image_sets, "encoded", broken)
        folder = tmp_path / kind
        folder.mkdir()
        source = open_source(write(folder, given))
        with pytest.raises(BadImage, match="damaged"):
            source.image(4)
        decoded = decode_all(source, limit=0.1)
        assert [*decoded.set_aside.reasons] == [source.identifier(4)]
        assert decoded.kept.tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11]
    monkey.undo()


def test_a_limit_on_pixels_reaches_the_images(tmp_path: Path) -> None:
    for kind in ("folder", "parquet", "datasets", "tar"):
        folder = tmp_path / kind
        folder.mkdir()
        source = open_source(WRITERS[kind](folder, GIVEN), max_pixels=79)
        with pytest.raises(BadImage, match="limit of 79"):
            source.image(0)
        assert source.uniform_shape() is None


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "gone", "does not exist")
    refused(tmp_path / "gone-{000..002}.tar", "gone-000.tar does not exist")
    refused(f"{tmp_path}/*.tar", "does not exist")
    refused(f"{tmp_path}::train", "no split 'train'")
    refused("x" * 5000, "not a path|does not exist")
    refused("null\0byte", "not a path|does not exist")
    refused(12, "int")
    refused(tmp_path, "max_pixels=0", max_pixels=0)


def test_one_image_is_refused_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "cat.JPG").write_bytes(encoded(GIVEN.images[0], "JPEG"))
    refused(tmp_path / "cat.JPG", f"a single image.*folder {tmp_path}")


@pytest.mark.parametrize("name", ["x.txt", "x", "x.zip", "x.pt"])
def test_other_files_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"something")
    refused(tmp_path / name, "images are read from")


@pytest.mark.parametrize("name", ["x.npy", "x.npz", "x.parquet", "x.tar", "x.arrow"])
def test_empty_and_wrong_files_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"")
    refused(tmp_path / name, "is empty", StoredFileError)
    (tmp_path / name).write_bytes(b"this is something else altogether " * 100)
    refused(tmp_path / name, "not a|cannot be read as", StoredFileError)


@pytest.mark.parametrize("kind", ["npz", "parquet", "tar"])
def test_a_file_that_breaks_off_is_refused(kind: str, tmp_path: Path) -> None:
    path = WRITERS[kind](tmp_path, GIVEN)
    whole = path.read_bytes()
    for share in (0.3, 0.6):
        path.write_bytes(whole[: int(share * len(whole))])
        refused(path, "write it again", StoredFileError)


def test_names_with_several_files(tmp_path: Path) -> None:
    shards = image_sets.write_tar_shards(tmp_path, GIVEN)
    for pattern in (f"{shards}/part-{{000..002}}.tar", f"{shards}/*.tar", f"{shards}/part-00{{0..2}}.tar"):
        source = open_source(pattern)
        np.testing.assert_array_equal(decode_all(source).images, GIVEN.images)
    assert len(open_source(f"{shards}/part-{{001..001}}.tar")) == 4
    refused(f"{shards}/part-{{000..009}}.tar", "part-003.tar does not exist")
    refused(f"{shards}/part-{{002..000}}.tar", "must go up")
    refused(f"{shards}/part-{{0..99999999999}}.tar", "must go up")
    refused(f"{shards}/part-{{0..9999}}{{0..9999}}.tar", "more than")


# By default beside the checkout.
SHARED = Path(os.environ.get("SIAMMM_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))


@pytest.mark.skipif(not (SHARED / "unpack.py").exists(), reason=f"no real images in {SHARED}")
@pytest.mark.slow
def test_real_images_are_the_same_as_arrays_and_as_a_folder(tmp_path: Path) -> None:
    unpack = [sys.executable, str(SHARED / "unpack.py"), "cifar10"]
    for options in ([], ["--folder"]):
        subprocess.run(
            [*unpack, str(tmp_path / ("folder" if options else "arrays")), "--per-class", "20", *options], check=True
        )
    arrays, folder = open_source(tmp_path / "arrays" / "train.npz"), open_source(tmp_path / "folder" / "train")
    assert len(arrays) == len(folder) == 200
    assert arrays.labels is not None
    assert arrays.label_names == folder.label_names
    order = np.argsort(arrays.labels, kind="stable")
    np.testing.assert_array_equal(arrays.labels[order], folder.labels)
    np.testing.assert_array_equal(decode_all(arrays).images[order], decode_all(folder).images)
    assert decode.MAX_PIXELS == 178_956_970
