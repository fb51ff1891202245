"""Reading all images of a source, with those that cannot be read set aside."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from siammm.core.errors import InputError
from siammm.data.set_aside import SetAside, decode_all
from siammm.data.sources import open_source
from tests.data.image_sets import encoded, example_images, write_folder


def test_set_aside_counts_an_image_once() -> None:
    aside = SetAside(1000)
    for _ in range(3):
        aside.add("a.png", "is empty")
    aside.add("b.png", "is damaged")
    assert len(aside) == 2
    aside.check(0.01)


def test_too_many_are_an_error_of_one_sentence() -> None:
    aside = SetAside(100)
    for i in range(3):
        aside.add(f"dir/line\nbreak{i}.png", "is empty (0 bytes)")
    aside.check(0.03)
    with pytest.raises(InputError) as caught:
        aside.check()
    message = str(caught.value)
    assert message.startswith("3 of 100 images (3 %) cannot be read")
    assert "--max-bad-images" in message
    assert "limit is 1 %" in message
    assert r"line\nbreak0" in message
    assert "\n" not in message


def test_no_bad_images_pass_any_limit() -> None:
    SetAside(0).check(0)
    SetAside(10).check(0)


def test_set_aside_is_written_whole(tmp_path: Path) -> None:
    aside = SetAside(10)
    aside.add("ü\n.png", "is empty")
    path = tmp_path / "set_aside.json"
    aside.write(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["set_aside.json"]
    assert json.loads(path.read_text()) == {"total": 10, "set_aside": [{"image": "ü\n.png", "reason": "is empty"}]}
    with pytest.raises(InputError, match="cannot be written"):
        aside.write(tmp_path / "gone" / "set_aside.json")


def test_decode_all_reads_everything_in_order(tmp_path: Path) -> None:
    given = example_images(200)
    source = open_source(write_folder(tmp_path, given))
    done: list[tuple[int, int]] = []
    decoded = decode_all(source, progress=lambda *count: done.append(count))
    np.testing.assert_array_equal(decoded.images, given.images)
    np.testing.assert_array_equal(decoded.kept, np.arange(200))
    assert len(decoded.set_aside) == 0
    assert done == [(64, 200), (128, 200), (192, 200), (200, 200)]


def test_the_number_of_threads_does_not_matter(tmp_path: Path) -> None:
    source = open_source(write_folder(tmp_path, example_images(150)))
    one, many = decode_all(source, (6, 6), threads=1), decode_all(source, (6, 6), threads=7)
    np.testing.assert_array_equal(one.images, many.images)


@pytest.mark.parametrize("bad", [[0], [299], [0, 1, 2], [5, 130, 131, 299], [*range(100, 200)], [*range(1, 300)]])
def test_bad_images_are_left_out_and_reported(bad: list[int], tmp_path: Path) -> None:
    given = example_images(300, n_classes=1, size=(4, 4))
    root = write_folder(tmp_path, given)
    for i in bad:
        (root / "class000" / f"{i:05d}.png").write_bytes(b"")
    decoded = decode_all(open_source(root), (4, 4), limit=1.0)
    kept = np.setdiff1d(np.arange(300), bad)
    np.testing.assert_array_equal(decoded.kept, kept)
    np.testing.assert_array_equal(decoded.images, given.images[kept])
    assert set(decoded.set_aside.reasons) == {f"class000/{i:05d}.png" for i in bad}
    assert set(decoded.set_aside.reasons.values()) == {"is empty (0 bytes)"}


def test_too_many_bad_images_stop_the_reading(tmp_path: Path) -> None:
    root = write_folder(tmp_path, example_images(100, size=(4, 4), n_classes=1))
    for i in (3, 7):
        (root / "class000" / f"{i:05d}.png").write_bytes(b"")
    with pytest.raises(InputError, match=r"2 of 100 images \(2 %\).*'class000/0000[37]\.png', which is empty"):
        decode_all(open_source(root), (4, 4))
    assert len(decode_all(open_source(root), (4, 4), limit=0.02).images) == 98


def test_nothing_readable_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(b"")
    with pytest.raises(InputError, match="None of the 1 images"):
        decode_all(open_source(tmp_path), (4, 4), limit=1.0)


def test_different_sizes_need_a_shape(tmp_path: Path) -> None:
    for i, size in enumerate([(8, 8), (16, 8), (8, 16)]):
        (tmp_path / f"{i}.png").write_bytes(encoded(np.full((*size, 3), 50 * i, np.uint8)))
    source = open_source(tmp_path)
    with pytest.raises(InputError, match="--image-size"):
        decode_all(source)
    decoded = decode_all(source, (4, 4))
    assert decoded.images.shape == (3, 4, 4, 3)
    assert [int(image[0, 0, 0]) for image in decoded.images] == [0, 50, 100]


def test_images_that_cannot_be_read_are_not_said_to_differ(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(InputError, match=r"None of the images of .* can be read: 'a.png' is empty"):
        decode_all(open_source(tmp_path))


def test_an_error_of_the_progress_ends_the_threads(tmp_path: Path) -> None:
    source = open_source(write_folder(tmp_path, example_images(300)))

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decode_all(source, progress=interrupt)
    time.sleep(0.05)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("siammm-decode")]


def test_more_memory_than_there_is_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(example_images().images)
    with pytest.raises(InputError, match="GiB of memory"):
        decode_all(source, (10**7, 10**7))
