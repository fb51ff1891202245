"""Two loaders, one interface: the same images in the same views, whoever reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from siammm.core.errors import InputError
from siammm.data import loader as loading
from siammm.data.augment import clean_side
from siammm.data.loader import Batch, Loader, ResidentLoader, StreamingLoader, open_loader
from siammm.data.sources import Source, open_source
from siammm.data.view_settings import views
from tests.data.image_sets import ExampleImages, encoded, example_images, write_folder, write_npy, write_npz

CPU = torch.device("cpu")
SEED = 3


@pytest.fixture(scope="module")
def given() -> ExampleImages:
    return example_images(20, size=(12, 12), n_classes=4)


def opened(
    source: Source | np.ndarray, kind: Any = "auto", *, size: int = 12, preset: Any = "32", **more: Any
) -> Loader:
    source = source if isinstance(source, Source) else open_source(source)
    more = {"workers": 0} | more
    return open_loader(source, views(size, preset), CPU, kind=kind, seed=SEED, **more)


def all_views(loader: Loader, epoch: int, groups: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Both views of every image of these batches, in order."""
    found = [
        loader.views(batch, SEED, epoch) for batch in loader.batches(epoch, [torch.tensor(group) for group in groups])
    ]
    return torch.cat([first for first, _ in found]), torch.cat([second for _, second in found])


EVERY = [list(range(20))]


# -- what both must do


@pytest.mark.parametrize("kind", ["resident", "streaming"])
def test_a_view_depends_on_the_seed_the_epoch_and_the_image_alone(kind: str, given: ExampleImages) -> None:
    loader = opened(given.images, kind)
    one = all_views(loader, 5, EVERY)
    order = [7, 3, 0, 19, 11]
    for groups in ([order], [[7, 3], [0], [19, 11]]):
        for left, right in zip(all_views(loader, 5, groups), one, strict=True):
            torch.testing.assert_close(left, right[order], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(all_views(loader, 6, EVERY)[0], one[0])
    assert not torch.allclose(one[0], one[1])


@pytest.mark.parametrize("kind", ["resident", "streaming"])
def test_the_epoch_may_be_a_tensor(kind: str, given: ExampleImages) -> None:
    loader = opened(given.images, kind)
    for batch in loader.batches(4, [torch.arange(6)]):
        for left, right in zip(loader.views(batch, SEED, 4), loader.views(batch, SEED, torch.tensor(4)), strict=True):
            assert torch.equal(left, right)


@pytest.mark.parametrize("preset", ["digits", "32", "64"])
def test_the_loaders_differ_by_rounding_to_bytes_alone(preset: str, given: ExampleImages) -> None:
    resident, streaming = (
        all_views(opened(given.images, kind, preset=preset), 1, EVERY) for kind in ("resident", "streaming")
    )
    for left, right in zip(resident, streaming, strict=True):
        assert left.shape == right.shape == (20, 3, 12, 12)
        # A byte is 1/255, which the normalisation makes about 1/57; solarising turns few pixels over at its threshold.
        difference = (left - right).abs()
        assert float(difference.median()) < 0.02
        assert float((difference > 0.1).double().mean()) < 0.02


@pytest.mark.parametrize("kind", ["resident", "streaming"])
def test_batches_say_which_images_they_hold(kind: str, given: ExampleImages) -> None:
    loader = opened(given.images, kind)
    groups = [torch.tensor([4, 2]), torch.tensor([9]), torch.tensor([0, 1, 2])]
    found = list(loader.batches(0, groups))
    assert [batch.position_B.tolist() for batch in found] == [group.tolist() for group in groups]
    assert all((batch.crops is None) == (kind == "resident") for batch in found)
    assert list(loader.batches(0, [])) == []


@pytest.mark.parametrize("kind", ["resident", "streaming"])
def test_clean_views_come_in_order(kind: str, given: ExampleImages) -> None:
    loader = opened(given.images, kind)
    parts = list(loader.clean(3, 17, batch_size=5))
    assert [start for start, _ in parts] == [3, 8, 13]
    assert [x.shape[0] for _, x in parts] == [5, 5, 4]
    whole = torch.cat([x for _, x in loader.clean(0, 20)])
    assert torch.equal(torch.cat([x for _, x in parts]), whole[3:17])
    assert list(loader.clean(4, 4)) == []


@pytest.mark.parametrize(
    ("size", "device", "expected"), [(32, "cpu", 512), (96, "cpu", 87), (224, "cpu", 16), (2000, "cpu", 1),
    (128, "cuda", 512), (224, "cuda", 256)],
)  # fmt: skip
def test_large_images_are_encoded_few_at_a_time(size: int, device: str, expected: int, given: ExampleImages) -> None:
    """512 images of 224 pixels at once took 10 GB of memory on a CPU."""
    loader = opened(given.images, "resident")
    loader.device, loader._size = torch.device(device), size
    assert loader.clean_batch_size == expected
    if device == "cpu":
        assert len(next(loader.clean(0, 20))[1]) == min(20, expected)


def test_clean_views_are_the_same_from_both(given: ExampleImages) -> None:
    one, other = (
        torch.cat([x for _, x in opened(given.images, kind).clean(0, 20)]) for kind in ("resident", "streaming")
    )
    torch.testing.assert_close(one, other)
    pixels = torch.from_numpy(given.images).permute(0, 3, 1, 2) / 255
    settings = views(12, "32")[0]
    mean, std = (torch.tensor(values)[:, None, None] for values in (settings.mean, settings.std))
    torch.testing.assert_close(one, (pixels - mean) / std, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["resident", "streaming"])
def test_images_of_different_sizes(kind: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for i, size in enumerate([(12, 12), (20, 9), (8, 30), (12, 13)]):
        (tmp_path / f"{i}.png").write_bytes(encoded(random.integers(0, 256, (*size, 3)).astype(np.uint8)))
    loader = opened(open_source(tmp_path), kind)
    assert all(x.shape == (4, 3, 12, 12) for x in all_views(loader, 0, [[0, 1, 2, 3]]))
    assert [x.shape for _, x in loader.clean(0, 4)] == [(4, 3, 12, 12)]


@pytest.mark.parametrize("kind", ["resident", "streaming"])
def test_images_that_cannot_be_read_are_numbered_around(kind: str, given: ExampleImages, tmp_path: Path) -> None:
    """Positions number what is left; random numbers hang on the image's number in the source, which does not change."""
    root = write_folder(tmp_path, given)
    whole = all_views(opened(open_source(root), kind), 2, EVERY)
    for i in (0, 7):
        next(root.rglob(f"{i:05d}.png")).write_bytes(b"")
    loader = opened(open_source(root), kind, limit=0.5)
    assert loader.n_images == 18
    left = [i for i in range(20) if i not in (0, 7)]
    assert loader.sample_N.tolist() == left
    assert loader.identifiers() == [open_source(root).identifier(i) for i in left]
    assert loader.labels is not None
    np.testing.assert_array_equal(loader.labels, given.labels[left])
    assert list(loader.set_aside.reasons.values()) == ["is empty (0 bytes)"] * 2
    for found, expected in zip(all_views(loader, 2, [list(range(18))]), whole, strict=True):
        torch.testing.assert_close(found, expected[left], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["resident", "streaming"])
def test_too_many_that_cannot_be_read(kind: str, given: ExampleImages, tmp_path: Path) -> None:
    root = write_folder(tmp_path, given)
    next(root.rglob("00003.png")).write_bytes(b"")
    with pytest.raises(InputError, match="1 of 20 images"):
        opened(open_source(root), kind)


def test_labels_are_those_of_the_source(given: ExampleImages, tmp_path: Path) -> None:
    labels = opened(open_source(write_npz(tmp_path, given))).labels
    assert labels is not None
    np.testing.assert_array_equal(labels, given.labels)
    assert opened(given.images).labels is None


# -- which loader


def test_small_images_stay_on_the_device(given: ExampleImages) -> None:
    assert isinstance(opened(given.images), ResidentLoader)


def test_large_images_and_images_of_different_sizes_are_streamed(tmp_path: Path) -> None:
    large = np.zeros((4, loading.SMALL + 1, 20, 3), np.uint8)
    assert isinstance(opened(large, size=16), StreamingLoader)
    for i, side in enumerate((8, 9)):
        (tmp_path / f"{i}.png").write_bytes(encoded(np.zeros((side, side, 3), np.uint8)))
    assert isinstance(opened(open_source(tmp_path)), StreamingLoader)


@pytest.mark.parametrize(
    ("n_images", "shape", "device", "free", "stays"),
    [
        (9_469, (128, 128), "cuda", 2**31, True),  # 465 MB
        (9_469, (128, 128), "cuda", 2**30, False),
        (9_469, (224, 224), "cuda", 2**33, True),  # 1.4 GB
        (1_281_167, (224, 224), "cuda", 140 * 2**30, False),
        (100, (1024, 1024), "cuda", 2**40, False),  # far larger than a view
        (100_000, (64, 64), "cuda", 2**32, True),  # small images may take more: 1.2 of 4 GiB
        (9_469, (128, 128), "cpu", 2**40, False),
        (9_469, (96, 64), "cpu", 2**40, True),
    ],
)
def test_what_stays_on_the_device_is_a_matter_of_its_memory(
    n_images: int, shape: tuple[int, int], device: str, free: int, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2**50))
    monkeypatch.setattr(loading, "free_memory", lambda: free)
    assert loading.suits_resident(n_images, shape, 128, torch.device(device)) == stays


def test_what_does_not_fit_is_streamed_or_refused(given: ExampleImages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_RESIDENT_SHARE", 0.0)
    assert isinstance(opened(given.images), StreamingLoader)
    with pytest.raises(InputError, match=r"20 images of 12 x 12 pixels do not fit .*; use --loader streaming"):
        opened(given.images, "resident")


def test_the_resident_loader_holds_bytes(given: ExampleImages) -> None:
    loader = opened(given.images, "resident")
    assert isinstance(loader, ResidentLoader)
    assert loader.image_N3HW.dtype == torch.uint8
    assert loader.image_N3HW.shape == (20, 3, 12, 12)


def test_images_mapped_from_a_file_are_left_alone(given: ExampleImages, tmp_path: Path) -> None:
    """torch warns of arrays it may not write to; here that would be an error."""
    path = write_npy(tmp_path, given)
    before = path.read_bytes()
    loader = opened(open_source(path), "resident")
    all_views(loader, 0, EVERY)
    assert path.read_bytes() == before


@pytest.mark.parametrize(("size", "side"), [(8, 8), (32, 32), (96, 96), (128, 146), (224, 256)])
def test_the_square_that_a_clean_view_is_cut_from(size: int, side: int) -> None:
    assert clean_side(size) == side


# -- streaming


def test_worker_processes_read_the_same(given: ExampleImages, tmp_path: Path) -> None:
    source = open_source(write_folder(tmp_path, given))
    groups = [[5, 1, 9], [0, 2, 3], [4, 6], [7]]
    alone, helped = opened(source, "streaming"), opened(source, "streaming", workers=2)
    for epoch in (0, 1):  # the same workers go on into the next epoch
        for left, right in zip(all_views(alone, epoch, groups), all_views(helped, epoch, groups), strict=True):
            assert torch.equal(left, right)
    assert torch.equal(*(torch.cat([x for _, x in loader.clean(0, 20, batch_size=6)]) for loader in (alone, helped)))
    helped.close()


def test_crops_travel_as_bytes(given: ExampleImages) -> None:
    batch: Batch = next(iter(opened(given.images, "streaming").batches(0, [torch.arange(4)])))
    assert batch.crops is not None
    assert [crop.dtype for crop in batch.crops] == [torch.uint8] * 2
    assert [crop.shape for crop in batch.crops] == [(4, 3, 12, 12)] * 2


def test_what_was_found_before_need_not_be_looked_at_again(given: ExampleImages, tmp_path: Path) -> None:
    source = open_source(write_folder(tmp_path, given))

    def never(i: int) -> np.ndarray:
        raise AssertionError("read again")

    source.image = never  # pyright: ignore[reportAttributeAccessIssue]
    bad = {source.identifier(4): "is damaged"}
    loader = opened(source, "streaming", known_bad=bad)
    assert loader.sample_N.tolist() == [i for i in range(20) if i != 4]
    assert loader.set_aside.reasons == bad


def test_an_image_that_is_gone_for_a_moment_is_tried_again(
    given: ExampleImages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading.time, "sleep", lambda seconds: None)
    root = write_folder(tmp_path, given)
    source = open_source(root)
    loader = opened(source, "streaming")
    plain, failures = source.image, [2]

    def moody(i: int) -> np.ndarray:
        if i == 3 and failures[0]:
            failures[0] -= 1
            raise loading.BadImage("cannot be read (a moment of weakness)")
        return plain(i)

    source.image = moody  # pyright: ignore[reportAttributeAccessIssue]
    assert len(all_views(loader, 0, [[2, 3]])[0]) == 2
    failures[0] = 3
    with pytest.raises(InputError, match=r"00003\.png could be read when training began, but no longer"):
        all_views(loader, 0, [[2, 3]])


def test_reading_tells_how_far_it_is(given: ExampleImages, tmp_path: Path) -> None:
    source = open_source(write_folder(tmp_path, given))
    for kind in ("resident", "streaming"):
        told: list[tuple[int, int]] = []
        opened(source, kind, progress=lambda done, total, told=told: told.append((done, total)))
        assert told[-1] == (20, 20)
