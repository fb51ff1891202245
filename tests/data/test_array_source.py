"""Arrays of images, in memory and in .npy and .npz: layouts, keys, labels, and what is refused."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from siammm.core.errors import StoredFileError
from siammm.data.set_aside import decode_all
from siammm.data.sources import open_source
from tests.data import image_sets
from tests.data.opened import GIVEN, refused


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
    refused(random, r"not multiples of 1/255.*round")
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
