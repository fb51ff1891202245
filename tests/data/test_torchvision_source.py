"""Datasets of torchvision, by name."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from siammm.data.decode import BadImage
from siammm.data.set_aside import decode_all
from siammm.data.sources import open_source
from tests.data import image_sets
from tests.data.opened import GIVEN, identifiers, refused


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
