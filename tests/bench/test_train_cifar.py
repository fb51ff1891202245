"""What the trainings of the benchmarks learn from and are judged by, and what they leave."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def train_cifar(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("train_cifar")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Every image is told by its label, which is its number; those of the test set come after."""
    for name, first, n in (("train", 0, 200), ("test", 200, 30)):
        number_N = np.arange(first, first + n)
        images = np.repeat(number_N, 8 * 8 * 3).reshape(n, 8, 8, 3).astype(np.uint8)
        np.savez(tmp_path / f"{name}.npz", images=images, labels=number_N)
    return tmp_path


@pytest.mark.parametrize(("held_out", "n_held"), [(0.1, 20), (0.2, 40)])
def test_held_out_images_are_training_images_that_are_not_trained_on(
    train_cifar: Any, folder: Path, held_out: float, n_held: int
) -> None:
    source, labels, other, other_labels = train_cifar.split(folder, None, held_out)
    assert (len(source), len(other)) == (200 - n_held, n_held)
    assert sorted([*labels, *other_labels]) == list(range(200))
    assert source.image(3)[0, 0, 0] == labels[3]
    assert other.image(3)[0, 0, 0] == other_labels[3]


def test_otherwise_the_test_images_judge_and_all_others_are_trained_on(train_cifar: Any, folder: Path) -> None:
    _, labels, _, other_labels = train_cifar.split(folder, None, None)
    assert list(labels) == list(range(200))
    assert list(other_labels) == list(range(200, 230))
    # So many of the images: the same as in a trial of as many.
    _, few, _, _ = train_cifar.split(folder, 50, None)
    assert list(few) == list(train_cifar.split(folder, 50, 0.1)[1])


@pytest.mark.parametrize("text", ["0", "1", "-0.2", "7", "nan"])
def test_what_is_no_share_of_the_images_is_refused(train_cifar: Any, text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="give one above 0 and below 1"):
        train_cifar.share(text)


def test_file_names_are_short_and_plain_and_differ(train_cifar: Any) -> None:
    assert train_cifar.file_name(["siammm", "5", "0", "rate=2"]) == "siammm-5-0-rate-2"
    many = [f"a_setting_with_a_long_name=0.{n}" for n in range(20)]
    names = {train_cifar.file_name(["siammm", *many]), train_cifar.file_name(["siammm", *many[:-1], "rate=3"])}
    assert len(names) == 2
    assert all(len(name) <= 120 and "=" not in name for name in names)


@pytest.mark.parametrize("preset", ["cifar", "cifar-fast", "laptop"])
def test_every_recipe_is_allowed_under_every_preset(train_cifar: Any, preset: Any) -> None:
    for method, changes in train_cifar.RECIPES.values():
        settings = changes | ({"n_components": 10} if method == "propos" else {})
        config = train_cifar.with_method(train_cifar.PRESETS[preset], method, recipe=False)
        train_cifar.check_settings(train_cifar.with_settings(config, **settings))
