"""Sources: the same images give the same source however they are stored, and hostile files are refused or set aside."""

from __future__ import annotations

import gzip
import io
import json
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siammm.core.errors import InputError, SiamMMError, StoredFileError
from siammm.data import decode, table_source
from siammm.data.decode import BadImage, decode_all
from siammm.data.folder_source import FolderSource
from siammm.data.sources import Source, open_source
from tests.data import image_sets
from tests.data.image_sets import WRITERS, ExampleImages, add_member, encoded, example_images

GIVEN = example_images()
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


def refused(data: Any, match: str, error: type[SiamMMError] = InputError, **settings: Any) -> None:
    with pytest.raises(error, match=match) as caught:
        open_source(data, **settings)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith((".", "?"))


# -- what holds for every kind


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


# -- paths


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
    refused(tmp_path / "cat.JPG", f"one image.*folder {tmp_path}")


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


# -- image folders


def write_files(root: Path, *names: str | bytes) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        path = os.path.join(os.fsencode(root), os.fsencode(name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(encoded(np.full((4, 4, 3), number, np.uint8)))
    return root


def identifiers(source: Source) -> list[str]:
    return [source.identifier(i) for i in range(len(source))]


def test_a_folder_is_sorted_and_hidden_files_are_passed_over(tmp_path: Path) -> None:
    root = write_files(tmp_path / "r", "b.png", "a/z.PNG", "a/deep/er/y.jpeg", ".x.png", ".hidden/w.png", "a-b/v.webp")
    (root / "notes.txt").write_text("no image")
    (root / "Thumbs.db").write_bytes(b"")
    assert identifiers(open_source(root)) == ["a-b/v.webp", "a/deep/er/y.jpeg", "a/z.PNG", "b.png"]


@pytest.mark.parametrize(
    ("names", "classes"),
    [
        (["cat/1.png", "cat/2.png", "dog/1.png"], ["cat", "cat", "dog"]),
        (["all/cat/1.png", "all/dog/1.png", "all/dog/x/2.png"], ["cat", "dog", "dog"]),
        (["cat/1.png", "dog/deep/er/1.png"], ["cat", "dog"]),
        (["train/cat/1.png", "train/dog/1.png", "val/cat/1.png"], ["cat", "dog", "cat"]),
        (["cat/1.png", "dog/1.png", "stray.png"], None),
        (["all/cat/1.png", "all/dog/1.png", "all/stray.png"], None),
        (["train/1.png", "val/1.png"], None),
        (["train/cat/1.png", "val/1.png"], None),
        (["only/1.png", "only/2.png"], None),
        (["1.png", "2.png"], None),
    ],
)
def test_classes_are_the_first_folders_that_differ(names: list[str], classes: list[str] | None, tmp_path: Path) -> None:
    source = open_source(write_files(tmp_path / "r", *names))
    if classes is None:
        assert source.labels is None
        assert source.label_names is None
    else:
        assert source.labels is not None
        assert source.label_names == sorted(set(classes))
        assert np.array(source.label_names)[source.labels].tolist() == classes


def test_empty_folders_are_no_classes(tmp_path: Path) -> None:
    root = write_files(tmp_path / "r", "all/cat/1.png", "all/dog/1.png")
    (root / "empty").mkdir()
    assert open_source(root).label_names == ["cat", "dog"]


def test_links_are_followed_and_loops_end(tmp_path: Path) -> None:
    root = write_files(tmp_path / "r", "cat/1.png")
    elsewhere = write_files(tmp_path / "elsewhere", "2.png")
    (root / "dog").symlink_to(elsewhere)
    (root / "cat" / "loop").symlink_to(root)
    (elsewhere / "back").symlink_to(root / "dog")
    (root / "cat" / "linked.png").symlink_to(elsewhere / "2.png")
    source = open_source(root)
    assert identifiers(source) == ["cat/1.png", "cat/linked.png", "dog/2.png"]
    assert source.label_names == ["cat", "dog"]


def test_a_link_to_nothing_is_a_bad_image(tmp_path: Path) -> None:
    root = write_files(tmp_path / "r", "1.png")
    (root / "2.png").symlink_to(root / "gone.png")
    source = open_source(root)
    assert identifiers(source) == ["1.png", "2.png"]
    with pytest.raises(BadImage, match="No such file"):
        source.image(1)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    root = write_files(tmp_path / "r", "1.png")
    os.mkfifo(root / "2.png")
    assert identifiers(open_source(root)) == ["1.png"]


HOSTILE_NAMES: list[str | bytes] = [
    "new\nline.png",
    " .png",
    "'quotes\".png",
    "日本語.png",
    "emoji😀.png",
    "-rf.png",
    "a\tb.png",
    b"latin\xe9.png",
    b"\xff\xfe.png",
    "{0..9}.png",
    "%s%n.png",
]


def test_names_of_any_kind_are_read(tmp_path: Path) -> None:
    try:
        root = write_files(tmp_path / "r", *HOSTILE_NAMES)
    except OSError:
        pytest.skip("this file system takes only Unicode names")
    source = open_source(root)
    assert len(source) == len(HOSTILE_NAMES)
    seen = {int(source.image(i)[0, 0, 0]) for i in range(len(source))}
    assert seen == set(range(len(HOSTILE_NAMES)))
    names = identifiers(source)
    assert "new\nline.png" in names
    assert r"latin\xe9.png" in names
    for name in names:
        name.encode("utf-8")
    assert source.fingerprint() == pickle.loads(pickle.dumps(source)).fingerprint()


def test_folders_of_any_name_are_classes(tmp_path: Path) -> None:
    root = write_files(tmp_path / "r", b"caf\xe9/1.png", "new\nline/2.png")
    source = open_source(root)
    assert source.label_names == ["caf\\xe9", "new\nline"]


def test_a_root_with_a_strange_name_is_refused_in_one_line(tmp_path: Path) -> None:
    refused(tmp_path / "new\nline", "does not exist")
    (tmp_path / "new\nline").mkdir()
    refused(tmp_path / "new\nline", "holds no images")


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    refused(tmp_path, r"holds no images \(1 other files\)")
    (tmp_path / "data.arrow").write_text("x")
    refused(tmp_path, "save_to_disk")


def test_a_folder_has_no_columns(tmp_path: Path) -> None:
    root = write_files(tmp_path / "r", "1.png")
    refused(root, "leave --image-key out", image_key="image")
    refused(root, "leave --label-key out", label_key="label")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    root = write_files(tmp_path / "r", "cat/1.png", "dog/1.png")
    (root / "dog").chmod(0)
    try:
        refused(root, "dog")
    finally:
        (root / "dog").chmod(0o700)


def test_tables_beside_images_do_not_matter_but_shards_do(tmp_path: Path) -> None:
    root = write_files(tmp_path / "r", "1.png", "2.png")
    pq.write_table(pa.table({"file_name": ["1.png"]}), root / "metadata.parquet")
    assert isinstance(open_source(root), FolderSource)
    shards = image_sets.write_tar_shards(tmp_path, GIVEN)
    write_files(shards, "example.png")
    refused(shards, "not clear which")


def test_many_paths_are_packed(tmp_path: Path) -> None:
    names = [f"class{i % 7}/{i:07d}.png" for i in range(20_000)]
    source = FolderSource(tmp_path, sorted(names), name="x")
    assert identifiers(source)[:2] == ["class0/0000000.png", "class0/0000007.png"]
    assert len(pickle.dumps(source)) < 20_000 * 40


def test_a_folder_of_one_split(tmp_path: Path) -> None:
    root = write_files(tmp_path / "r", "train/cat/1.png", "train/dog/2.png", "test/cat/3.png")
    assert identifiers(open_source(f"{root}::train")) == ["cat/1.png", "dog/2.png"]
    refused(f"{root}::val", "no split 'val'")
    refused(f"{root}::../r", "no split")


# -- arrays


@pytest.mark.parametrize("layout", ["NHWC", "NCHW", "NHW", "NHW1", "N1HW"])
@pytest.mark.parametrize("where", ["memory", "npy", "npz"])
def test_arrays_of_every_layout(layout: str, where: str, tmp_path: Path) -> None:
    images = GIVEN.images
    grey = images[..., 0]
    arrays = {"NHWC": images, "NCHW": images.transpose(0, 3, 1, 2), "NHW": grey}
    arrays |= {"NHW1": grey[..., None], "N1HW": grey[:, None]}
    data: Any = arrays[layout]
    if where == "npy":
        np.save(tmp_path / "x.npy", data)
    elif where == "npz":
        np.savez_compressed(tmp_path / "x.npz", data)
    source = open_source(data if where == "memory" else tmp_path / f"x.{where}")
    expected = images if "C" in layout else np.repeat(grey[..., None], 3, 3)
    np.testing.assert_array_equal(decode_all(source).images, expected)
    assert source.uniform_shape() == (8, 10)
    assert source.fingerprint() == open_source(np.ascontiguousarray(expected)).fingerprint()
    assert source.identifier(3) == "3"


def test_npy_is_mapped_and_opened_again(tmp_path: Path) -> None:
    path = image_sets.write_npy(tmp_path, GIVEN)
    source = open_source(path)
    assert isinstance(source._images, np.memmap)  # type: ignore[attr-defined]
    again = pickle.loads(pickle.dumps(source))
    assert isinstance(again._images, np.memmap)
    assert len(pickle.dumps(source)) < 2000
    refused(path, "without names", image_key="images")
    assert open_source(path, label_key="").labels is None


def test_reading_does_not_hand_out_the_users_array() -> None:
    images = GIVEN.images.copy()
    source = open_source(images)
    source.image(0)[:] = 0
    np.testing.assert_array_equal(images, GIVEN.images)


def test_exact_floats_are_taken_and_others_refused() -> None:
    for dtype in (np.float16, np.float32, np.float64):
        exact = (np.arange(256).reshape(1, 16, 16, 1).repeat(3, 3) / 255).astype(dtype)
        np.testing.assert_array_equal(decode_all(open_source(exact)).images.ravel()[::3], np.arange(256))
    random = np.random.default_rng(0).random((2, 4, 4, 3))
    refused(random, r"no whole 255ths.*round")
    refused(random * 16, "from .* to 1[0-9]")
    refused(random - 0.5, "from -0")
    refused(np.full((1, 2, 2), np.nan), "from nan")
    refused(np.full((1, 2, 2), np.inf), "from inf")


@pytest.mark.parametrize(
    ("array", "match"),
    [
        (np.zeros((4, 4), np.uint8), "shape"),
        (np.zeros((9, 8, 3), np.uint8), "one image is given as"),
        (np.zeros((2, 8, 8, 4), np.uint8), "shape"),
        (np.zeros((2, 2, 8, 8, 3), np.uint8), "shape"),
        (np.zeros((0, 8, 8, 3), np.uint8), "no pixels"),
        (np.zeros((2, 0, 8, 3), np.uint8), "no pixels"),
        (np.zeros((2, 8, 8, 3), np.int64), "int64"),
        (np.zeros((2, 8, 8, 3), bool), r"\* 255"),
        (np.zeros((2, 8, 8, 3), object), "Python objects"),
        (np.zeros((2, 8, 8, 3), complex), "complex"),
        (np.zeros((2, 8, 8), "U3"), "str"),
    ],
)
def test_arrays_that_are_no_images_are_refused(array: np.ndarray, match: str, tmp_path: Path) -> None:
    refused(array, match)
    np.save(tmp_path / "x.npy", array, allow_pickle=True)
    refused(tmp_path / "x.npy", match)
    np.savez(tmp_path / "x.npz", images=array)
    refused(tmp_path / "x.npz", match)


class Exploding:
    """Says so if anybody unpickles it."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("unpickled",))


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    evil = np.array([Exploding()], dtype=object)
    np.save(tmp_path / "x.npy", evil, allow_pickle=True)
    refused(tmp_path / "x.npy", "never unpickled")
    cases: list[dict[str, Any]] = [{"images": evil}, {"images": GIVEN.images, "labels": evil.repeat(12)}]
    for names in cases:
        np.savez(tmp_path / "x.npz", **names)
        refused(tmp_path / "x.npz", "never unpickled|of object")
    # One that is not asked for does no harm.
    np.savez(tmp_path / "x.npz", images=GIVEN.images, extra=evil, names=evil)
    assert len(open_source(tmp_path / "x.npz")) == 12


@pytest.mark.parametrize("key", ["images", "image", "x", "X", "data", "anything"])
@pytest.mark.parametrize("label", ["labels", "label", "y", "targets"])
def test_npz_keys_are_found(key: str, label: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", **{key: GIVEN.images, label: GIVEN.labels, "other": np.zeros(3)})
    source = open_source(tmp_path / "x.npz")
    np.testing.assert_array_equal(source.labels, GIVEN.labels)
    assert source.label_names is None
    np.testing.assert_array_equal(source.image(2), GIVEN.images[2])


def test_npz_keys_are_chosen(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, a=GIVEN.images, b=255 - GIVEN.images, fine=GIVEN.labels, coarse=np.zeros(12, np.int64))
    refused(path, "2 arrays that could be images.*--image-key")
    refused(path, "no array 'c'", image_key="c")
    refused(path, "no array 'c'", image_key="a", label_key="c")
    refused(path, "12 integers or strings", image_key="a", label_key="b")
    source = open_source(path, image_key="b", label_key="coarse")
    np.testing.assert_array_equal(source.image(0), 255 - GIVEN.images[0])
    np.testing.assert_array_equal(source.labels, np.zeros(12))
    np.savez(path, images=GIVEN.images, labels=GIVEN.labels[:5])
    refused(path, r'--label-key ""')
    assert open_source(path, label_key="").labels is None


def test_npz_with_two_arrays_of_one_name_is_refused(tmp_path: Path) -> None:
    path = image_sets.write_npz(tmp_path, GIVEN)
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("images.npy", b"")
    refused(path, "two arrays", StoredFileError)


def test_npz_bomb_is_refused_by_its_header(tmp_path: Path) -> None:
    header = io.BytesIO()
    shape = (10**9, 1000, 1000, 3)
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images.npy", header.getvalue() + b"\0" * 1000)
    refused(tmp_path / "x.npz", "write it again", StoredFileError)


@pytest.mark.parametrize(
    ("values", "expected", "names"),
    [
        (np.array([0, 2, 1]), [0, 2, 1], None),
        (np.array([0, 2, 1], np.uint8), [0, 2, 1], None),
        (np.array(["b", "a", "b"]), [1, 0, 1], ["a", "b"]),
        (np.array([b"b", b"a", b"b"]), [1, 0, 1], ["a", "b"]),
        (np.array([7_000_000, 3, 7_000_000]), [1, 0, 1], ["3", "7000000"]),
        (np.array([-5, 3, 3]), [0, 1, 1], ["-5", "3"]),
        (np.array([0, -1, 1]), None, None),
        (np.array(["a", "", "b"]), None, None),
    ],
)
def test_labels_become_numbers(values: np.ndarray, expected: Any, names: Any, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", images=GIVEN.images[:3], labels=values)
    source = open_source(tmp_path / "x.npz")
    assert (None if source.labels is None else source.labels.tolist()) == expected
    assert source.label_names == names


def test_digits() -> None:
    from sklearn.datasets import load_digits

    source = open_source("digits")
    known: Any = load_digits()
    assert source.kind == source.name == "digits"
    assert len(source) == 1797
    assert source.uniform_shape() == (8, 8)
    np.testing.assert_array_equal(source.labels, known.target)
    assert source.label_names == list("0123456789")
    np.testing.assert_allclose(source.image(9)[..., 1], known.images[9] * 255 / 16, atol=0.5)
    assert source.image(9).max() == 255
    assert open_source("digits", label_key="").labels is None
    refused("digits", "leave --image-key out", image_key="x")


# -- Parquet and datasets


def test_parquet_is_read_once_when_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(image_sets.write_parquet(tmp_path, GIVEN))
    assert source.note is None
    reads = counted(source, monkeypatch)
    for i in np.random.default_rng(0).integers(0, 12, 50):
        source.image(i)
    assert sorted(reads) == [0, 1, 2]


def counted(source: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    reads: list[int] = []
    read = source._read_group

    def count(group: int) -> Any:
        reads.append(group)
        return read(group)

    monkeypatch.setattr(source, "_read_group", count)
    return reads


def test_parquet_beyond_memory_keeps_a_few_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_source, "IN_MEMORY_LIMIT", 1000)
    monkeypatch.setattr(table_source, "_CACHE_LIMIT", 3000)
    source = open_source(image_sets.write_parquet_folder(tmp_path, GIVEN))
    assert source.note is not None
    assert "slow to read at random" in source.note
    reads = counted(source, monkeypatch)
    np.testing.assert_array_equal(decode_all(source, threads=4).images, GIVEN.images)
    assert len(source._groups) < 4  # type: ignore[attr-defined]
    assert sorted(set(reads)) == [0, 1, 2, 3]
    reads.clear()
    for i in range(12):
        source.image(i)
    assert len(reads) == 4
    assert source.uniform_shape() == (8, 10)
    monkeypatch.undo()
    assert source.fingerprint() == pickle.loads(pickle.dumps(source)).fingerprint()


def parquet(tmp_path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    return tmp_path / "x.parquet"


PNGS = [encoded(image) for image in GIVEN.images[:4]]


def test_parquet_columns_are_found(tmp_path: Path) -> None:
    plain = open_source(parquet(tmp_path, photo_data=PNGS, thumbnail=["x"] * 4, target=["b", "a", "b", "c"]))
    np.testing.assert_array_equal(plain.image(3), GIVEN.images[3])
    assert plain.label_names == ["a", "b", "c"]
    np.testing.assert_array_equal(plain.labels, [1, 0, 1, 2])
    coded = pa.array(["x", "y", "x", "x"]).dictionary_encode()
    large = open_source(parquet(tmp_path, img=pa.array(PNGS, pa.large_binary()), label=coded))
    np.testing.assert_array_equal(large.labels, [0, 1, 0, 0])
    np.testing.assert_array_equal(large.image(1), GIVEN.images[1])
    assert large.identifier(1) == "1"


def test_parquet_columns_are_chosen(tmp_path: Path) -> None:
    path = parquet(tmp_path, a=PNGS, b=PNGS[::-1], number=[1, 2, 3, 4], real=[0.5] * 4)
    refused(path, "2 columns that could be images; give --image-key one of: a, b")
    refused(path, "no column 'c'", image_key="c")
    refused(path, "holds int64", image_key="number")
    refused(path, "does not exist", image_key="a", label_key="c")
    refused(path, "no integers or strings", image_key="a", label_key="real")
    source = open_source(path, image_key="b", label_key="number")
    np.testing.assert_array_equal(source.image(0), GIVEN.images[3])
    np.testing.assert_array_equal(source.labels, [1, 2, 3, 4])
    refused(parquet(tmp_path, file_name=["a.png"]), "no column of images.*embed")
    refused(parquet(tmp_path, image=pa.array([], pa.binary())), "0 rows")


def test_missing_values_in_tables(tmp_path: Path) -> None:
    path = parquet(tmp_path, image=[PNGS[0], None, b"", PNGS[1]], label=[0, None, 1, 1])
    source = open_source(path)
    assert source.labels is None
    refused(path, "1 of 4 rows.*no label", label_key="label")
    for i in (1, 2):
        with pytest.raises(BadImage, match="empty"):
            source.image(i)
    rows = [{"bytes": None, "path": "/etc/hostname"}, {"bytes": PNGS[0], "path": None}]
    source = open_source(parquet(tmp_path, image=rows))
    with pytest.raises(BadImage, match="no bytes in its row"):
        source.image(0)
    np.testing.assert_array_equal(source.image(1), GIVEN.images[0])


def test_hub_splits_are_told_apart(tmp_path: Path) -> None:
    root = image_sets.write_parquet_folder(tmp_path, GIVEN)
    pq.write_table(image_sets.image_table(GIVEN, slice(3)), root / "data" / "test-00000-of-00001.parquet")
    refused(root, "several splits.*hub::train|several splits.*hub::test")
    assert len(open_source(f"{root}::train")) == 12
    assert len(open_source(f"{root}::test")) == 3
    refused(f"{root}::validation", "no split 'validation'")
    assert len(open_source(f"{root}/data/train-*.parquet")) == 12
    assert open_source(f"{root}::train").identifier(7) == "train-00001-of-00002.parquet:1"


def test_parquet_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        pq.write_table(pa.table({"image": PNGS[:2]}), tmp_path / folder / "x.parquet", row_group_size=1)
    assert identifiers(open_source(tmp_path)) == ["a/x.parquet:0", "a/x.parquet:1", "b/x.parquet:0", "b/x.parquet:1"]


def test_parquet_files_must_be_of_one_kind(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": PNGS}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"picture": PNGS}), tmp_path / "b.parquet")
    refused(tmp_path, "'image' is binary in .* but no such column")


def test_a_dict_of_datasets_asks_for_a_split(tmp_path: Path) -> None:
    root = image_sets.write_datasets_dict(tmp_path, GIVEN)
    refused(root, "splits train; choose one, for example .*saved_dict::train")
    refused(f"{root}::test", "no split 'test'; it has: train")
    source = open_source(f"{root}::train")
    np.testing.assert_array_equal(decode_all(source).images, GIVEN.images)
    assert source.name == f"{root}::train"


def test_a_saved_dataset_is_mapped(tmp_path: Path) -> None:
    root = image_sets.write_datasets(tmp_path, GIVEN)
    before = pa.total_allocated_bytes()
    source = open_source(root, label_key="")
    assert pa.total_allocated_bytes() - before < 10_000
    assert source.identifier(8) == "8"
    assert len(open_source(next(root.glob("*.arrow")))) == 6


@pytest.mark.parametrize(
    ("state", "match"),
    [
        ({"_data_files": [{"filename": "../data.arrow"}]}, "not in its folder"),
        ({"_data_files": [{"filename": "/etc/passwd"}]}, "not in its folder"),
        ({"_data_files": [{"filename": 3}]}, "not in its folder"),
        ({"_data_files": [7]}, "not in its folder"),
        ({"_data_files": []}, "names no Arrow files"),
        ({"_data_files": 7}, "names no Arrow files"),
        ({}, "names no Arrow files"),
        ([], "no table of keys"),
        ("{", "damaged"),
        ({"_data_files": [{"filename": "gone.arrow"}]}, "cannot be read"),
        ({"_data_files": [{"filename": "x"}], "_indices_data_files": [{"filename": "y"}]}, "flatten_indices"),
    ],
)
def test_damaged_saved_datasets_are_refused(state: Any, match: str, tmp_path: Path) -> None:
    root = image_sets.write_datasets(tmp_path, GIVEN)
    (root / "state.json").write_text(state if isinstance(state, str) else json.dumps(state))
    refused(root, match, SiamMMError)


def test_class_names_are_also_found_beside_the_tables(tmp_path: Path) -> None:
    root = tmp_path / "saved"
    root.mkdir()
    table = image_sets.image_table(GIVEN).replace_schema_metadata(None)
    with pa.ipc.new_stream(str(root / "data.arrow"), table.schema) as stream:
        stream.write_table(table)
    (root / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    info = {"features": {"label": {"names": GIVEN.names, "_type": "ClassLabel"}}}
    (root / "dataset_info.json").write_text(json.dumps(info))
    assert open_source(root).label_names == GIVEN.names


# -- tar shards


def make_tar(path: Path, fill: Callable[[tarfile.TarFile], Any], **settings: Any) -> Path:
    with tarfile.open(path, "w", **settings) as tar:
        fill(tar)
    return path


def members(*files: tuple[str, bytes]) -> Callable[[tarfile.TarFile], None]:
    def fill(tar: tarfile.TarFile) -> None:
        for name, data in files:
            add_member(tar, name, data)

    return fill


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tar_keys(form: int, tmp_path: Path) -> None:
    long = "deep/" * 20 + "er"
    files = [("a/1.png", PNGS[0]), ("a/1.txt", b"words"), ("b.2/1.seg.png", b"mask"), ("b.2/1.PNG", PNGS[1])]
    files += [(f"{long}.jpeg", PNGS[2]), ("no/image.json", b"{}"), ("._a.png", b"from macOS"), ("x.png.cls", b"3")]
    source = open_source(make_tar(tmp_path / "x.tar", members(*files), format=form))
    assert identifiers(source) == ["a/1", "b.2/1", long]
    for i in range(3):
        np.testing.assert_array_equal(source.image(i), GIVEN.images[i])


def test_tar_members_can_be_chosen(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "x.tar", members(("1.png", PNGS[0]), ("1.seg.png", PNGS[1]), ("2.seg.png", PNGS[2])))
    source = open_source(path, image_key="seg.png")
    np.testing.assert_array_equal(decode_all(source).images, GIVEN.images[1:3])
    refused(path, "no members called .webp", image_key="webp")


@pytest.mark.parametrize(
    ("labels", "expected", "names"),
    [
        ([("cls", b"3"), ("cls", b"1\n")], [3, 1], None),
        ([("cls", b"dog"), ("cls", b" cat ")], [1, 0], ["cat", "dog"]),
        ([("json", b'{"label": 4}'), ("json", b'{"y": 1, "label": 2}')], [4, 2], None),
        ([("json", b'{"label": "b"}'), ("json", b'{"label": "a"}')], [1, 0], ["a", "b"]),
        ([("json", b'{"label": 4}'), ("json", b'{"other": 2}')], None, None),
        ([("cls", b"3"), ("txt", b"1")], None, None),
        ([("cls", b""), ("cls", b"1")], None, None),
        ([("json", b"[1, 2]"), ("json", b"null")], None, None),
        ([("txt", b"3"), ("txt", b"1")], None, None),
    ],
)
def test_tar_labels(labels: list[tuple[str, bytes]], expected: Any, names: Any, tmp_path: Path) -> None:
    files: list[tuple[str, bytes]] = []
    for i, (extension, text) in enumerate(labels):
        files += [(f"{i}.{extension}", text), (f"{i}.png", PNGS[i])]
    source = open_source(make_tar(tmp_path / "x.tar", members(*files)))
    assert (None if source.labels is None else source.labels.tolist()) == expected
    assert source.label_names == names


def test_tar_labels_can_be_chosen(tmp_path: Path) -> None:
    files = [("0.png", PNGS[0]), ("0.json", b'{"label": 1, "fine": 7}'), ("1.png", PNGS[1]), ("1.json", b'{"fine": 5}')]
    path = make_tar(tmp_path / "x.tar", members(*files))
    np.testing.assert_array_equal(open_source(path, label_key="fine").labels, [7, 5])
    refused(path, "1 of 2 samples", label_key="label")
    assert open_source(path).labels is None
    bad = make_tar(tmp_path / "bad.tar", members(("0.png", PNGS[0]), ("0.json", b"{'not': json")))
    refused(bad, "no JSON")
    assert open_source(bad, label_key="").labels is None


def test_tar_folders_are_classes_as_in_an_image_folder(tmp_path: Path) -> None:
    root = image_sets.write_folder(tmp_path, GIVEN)

    def fill(tar: tarfile.TarFile) -> None:
        for path in sorted(root.rglob("*.png")):
            tar.add(path, path.relative_to(tmp_path))

    source = open_source(make_tar(tmp_path / "x.tar", fill))
    np.testing.assert_array_equal(source.labels, GIVEN.labels)
    assert source.label_names == GIVEN.names


def test_shards_with_the_same_keys_are_told_apart(tmp_path: Path) -> None:
    for name in ("a.tar", "b.tar"):
        make_tar(tmp_path / name, members(("0.png", PNGS[0]), ("1.png", PNGS[1])))
    assert identifiers(open_source(tmp_path)) == ["a.tar:0", "a.tar:1", "b.tar:0", "b.tar:1"]
    path = make_tar(tmp_path / "c.tar", members(("0.png", PNGS[0]), ("1.png", PNGS[1]), ("0.png", PNGS[2])))
    assert identifiers(open_source(path)) == ["0", "1", "0#2"]


def test_tar_names_that_point_elsewhere_are_only_names(tmp_path: Path) -> None:
    def fill(tar: tarfile.TarFile) -> None:
        add_member(tar, "/etc/absolute.png", PNGS[0])
        add_member(tar, "../../above.png", PNGS[1])
        for kind, name in (
            (tarfile.SYMTYPE, "soft.png"),
            (tarfile.LNKTYPE, "hard.png"),
            (tarfile.FIFOTYPE, "pipe.png"),
        ):
            link = tarfile.TarInfo(name)
            link.type = kind
            link.linkname = "/etc/passwd"
            tar.addfile(link)
        add_member(tar, "new\nline.png", PNGS[2])
        add_member(tar, "latin\udce9.png", PNGS[3])

    before = set(tmp_path.rglob("*"))
    path = make_tar(tmp_path / "x.tar", fill)
    source = open_source(path)
    assert identifiers(source) == [
        "/etc/absolute", "../../above", "soft", "hard", "pipe", "new\nline", r"latin\xe9",
    ]  # fmt: skip
    for i in (2, 3, 4):
        with pytest.raises(BadImage, match="link or a special file"):
            source.image(i)
    decoded = decode_all(source, limit=0.5)
    np.testing.assert_array_equal(decoded.images, GIVEN.images[:4])
    assert set(tmp_path.rglob("*")) == before | {path}


@pytest.mark.parametrize("name", ["x.tar.gz", "x.tgz", "x.tar", "x.tar.zst"])
def test_compressed_tars_are_refused(name: str, tmp_path: Path) -> None:
    plain = make_tar(tmp_path / "plain", members(("0.png", PNGS[0])))
    (tmp_path / name).write_bytes(gzip.compress(plain.read_bytes()))
    refused(tmp_path / name, "is compressed.*decompress it")


def test_a_tar_without_images_is_refused(tmp_path: Path) -> None:
    refused(make_tar(tmp_path / "x.tar", members(("a.txt", b"text"))), "no members with an image's extension")
    refused(make_tar(tmp_path / "x.tar", members()), "no members")


def test_a_tar_that_lies_about_sizes_is_refused(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "x.tar", members(("0.png", PNGS[0])))
    data = bytearray(path.read_bytes())
    header = tarfile.TarInfo("0.png")
    header.size = 2**33
    data[:512] = header.tobuf(tarfile.GNU_FORMAT)[:512]
    path.write_bytes(data)
    refused(path, "write it again", StoredFileError)


# -- torchvision


def test_torchvision_names_are_checked(tmp_path: Path) -> None:
    refused("torchvision:CIFAR10", "does not name a set and a folder")
    refused(f"torchvision:CIFAR11:{tmp_path}", "did you mean CIFAR10")
    refused(f"torchvision:xyzzy:{tmp_path}", "no set called 'xyzzy'")
    refused("torchvision:CIFAR10:/not/there", "does not exist; download")
    refused(f"torchvision:CIFAR10:{tmp_path}", "nothing is downloaded")
    refused(f"torchvision:CIFAR10:{tmp_path}:validation", "train and test")
    refused(f"torchvision:ImageNet:{tmp_path}", "nothing is downloaded")
    assert list(tmp_path.iterdir()) == []


def test_torchvision_arrays(tmp_path: Path) -> None:
    # MNIST's files are simple enough to write.
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    random = np.random.default_rng(0)
    for part, n in (("train", 6), ("t10k", 3)):
        pixels, labels = random.integers(0, 256, (n, 28, 28), np.uint8), np.arange(n, dtype=np.uint8)
        images = b"\0\0\x08\x03" + np.array([n, 28, 28], ">i4").tobytes() + pixels.tobytes()
        (raw / f"{part}-images-idx3-ubyte").write_bytes(images)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(
            b"\0\0\x08\x01" + np.array([n], ">i4").tobytes() + labels.tobytes()
        )
    source = open_source(f"torchvision:MNIST:{tmp_path}")
    assert source.kind == "torchvision"
    assert len(source) == 6
    assert source.uniform_shape() == (28, 28)
    np.testing.assert_array_equal(source.labels, np.arange(6))
    assert source.label_names is not None
    assert source.label_names[3].startswith("3")
    test = open_source(f"torchvision:MNIST:{tmp_path}:test")
    assert len(test) == 3
    np.testing.assert_array_equal(test.image(2), np.repeat(pixels[2][..., None], 3, 2))
    assert open_source(f"torchvision:MNIST:{tmp_path}:test", label_key="").labels is None
    refused(f"torchvision:MNIST:{tmp_path}", "leave --image-key out", image_key="x")
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(test)).image(2), test.image(2))


def test_torchvision_files(tmp_path: Path) -> None:
    root = image_sets.write_folder(tmp_path, GIVEN)
    source = open_source(f"torchvision:ImageFolder:{root}")
    plain = open_source(root)
    assert identifiers(source) == identifiers(plain)
    assert source.label_names == GIVEN.names
    assert source.fingerprint() == plain.fingerprint()
    np.testing.assert_array_equal(source.labels, GIVEN.labels)
    np.testing.assert_array_equal(decode_all(pickle.loads(pickle.dumps(source))).images, GIVEN.images)
    (root / "class000" / "00000.png").write_bytes(b"")
    with pytest.raises(BadImage, match="empty"):
        source.image(0)
    refused(f"torchvision:ImageFolder:{root}:test", "only one part")


# -- real images, where they are


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
