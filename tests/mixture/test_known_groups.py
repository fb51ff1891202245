"""A mixture that knows its groups: it gives new samples theirs, and saves and loads them."""

from __future__ import annotations

import json
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.numpy import load_file, save_file
from sklearn import base
from sklearn.exceptions import NotFittedError
from sklearn.metrics import adjusted_mutual_info_score

from siammm import GaussianMixture, VonMisesFisherMixture
from siammm.core.errors import InputError, StoredFileError
from siammm.mixture.group_rule import Groups

KINDS = [VonMisesFisherMixture, GaussianMixture]
Mixture = VonMisesFisherMixture | GaussianMixture


def kinds(n: int = 900, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows of three kinds in 12 dimensions."""
    rng = np.random.default_rng(seed)
    y = rng.integers(3, size=n)
    return 2 * np.eye(3, 12)[y] + 0.5 * rng.normal(size=(n, 12)), y


def fitted(kind: type[Mixture] = VonMisesFisherMixture) -> Mixture:
    """Nine components, which are finer than the kinds."""
    return kind(9, random_state=0, device="cpu").fit(kinds()[0])


@cache
def grouped(kind: type[Mixture] = VonMisesFisherMixture) -> Mixture:
    """The same, with its groups; not to be changed."""
    mixture = fitted(kind)
    mixture.groups(kinds()[0])
    return mixture


@pytest.mark.parametrize("kind", KINDS)
def test_new_samples_get_their_group(kind: type[Mixture]) -> None:
    mixture, (x, y) = fitted(kind), kinds(seed=1)
    found = mixture.groups(kinds()[0])
    assert found.n_groups == 3
    assert mixture.groups_ is found
    group = mixture.predict_group(x)
    assert adjusted_mutual_info_score(y, group) > 0.95
    share = mixture.predict_group_proba(x)
    assert share.shape == (len(x), 3)
    np.testing.assert_allclose(share.sum(axis=1), 1)
    np.testing.assert_array_equal(share.argmax(axis=1), group)
    np.testing.assert_array_equal(group[:7], mixture.predict_group(x[:7]), "a row's group is its own affair")
    both = found.assign(x, None, None)
    np.testing.assert_array_equal(both[0], group)
    np.testing.assert_allclose(both[1], share.max(axis=1), rtol=1e-6)
    # Lengths do not matter to directions.
    if kind is VonMisesFisherMixture:
        np.testing.assert_array_equal(mixture.predict_group(x * np.linspace(0.1, 9, len(x))[:, None]), group)


def test_what_goes_in_comes_out() -> None:
    mixture, x = grouped(), kinds(seed=1)[0].astype(np.float32)
    group, share = mixture.predict_group(x), mixture.predict_group_proba(x)
    assert isinstance(group, np.ndarray)
    tensor = torch.from_numpy(x)
    assert torch.equal(mixture.predict_group(tensor), torch.from_numpy(group))
    torch.testing.assert_close(mixture.predict_group_proba(tensor), torch.from_numpy(share))
    np.testing.assert_array_equal(mixture.predict_group(pd.DataFrame(x)), group)


def test_without_groups_they_are_the_components() -> None:
    x = np.random.default_rng(0).normal(size=(300, 6))
    mixture = VonMisesFisherMixture(4, random_state=0, device="cpu").fit(x)
    assert not mixture.groups(x).is_found
    for rows in (x, torch.from_numpy(x)):
        assert (mixture.predict_group(rows) == mixture.predict(rows)).all()
        share = mixture.predict_group_proba(rows)
        assert tuple(share.shape) == (300, 4)
        np.testing.assert_allclose(share.sum(axis=1), 1, atol=1e-6)
    np.testing.assert_array_equal(mixture.predict_group_proba(x), mixture.predict_proba(x).toarray())
    assert mixture.groups_ is not None
    for found, expected in zip(mixture.groups_.assign(x, [2, 0], [0.5, 0.75]), ([2, 0], [0.5, 0.75]), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_they_are_known_only_once_they_were_looked_for() -> None:
    with pytest.raises(NotFittedError):
        VonMisesFisherMixture(3).predict_group(kinds()[0])
    mixture = fitted()
    for method in (mixture.predict_group, mixture.predict_group_proba):
        with pytest.raises(InputError, match=r"No groups are known of this mixture; find them with groups\(X\) first"):
            method(kinds()[0])
    copy: Any = base.clone(grouped())
    assert copy.groups_ is None
    # Other components, other groups.
    assert deepcopy(grouped()).fit(kinds(seed=2)[0]).groups_ is None


def test_rows_that_cannot_be_used_are_refused() -> None:
    mixture, x = grouped(), kinds()[0]
    for method in (mixture.predict_group, mixture.predict_group_proba):
        for rows in (x[:, :5], torch.from_numpy(x[:, :5])):
            with pytest.raises(InputError, match="X has 5 features"):
                method(rows)
        with pytest.raises(InputError, match="X holds NaN"):
            method(np.where(x == x[3, 3], np.nan, x))


# -- saving -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_saved_with_the_mixture(kind: type[Mixture], tmp_path: Path) -> None:
    mixture, x = grouped(kind), kinds(seed=1)[0]
    found = mixture.groups_
    assert found is not None
    mixture.save(tmp_path / "m.safetensors")
    again = kind.load(tmp_path / "m.safetensors")
    assert again.groups_ is not None
    assert (again.groups_.unit, again.groups_.ratio) == (kind is VonMisesFisherMixture, found.ratio)
    for name in ("label_K", "weight_GD", "offset_G"):
        np.testing.assert_array_equal(getattr(again.groups_, name), getattr(found, name))
    np.testing.assert_array_equal(again.predict_group(x), mixture.predict_group(x))
    np.testing.assert_array_equal(again.predict_group_proba(x), mixture.predict_group_proba(x))


def test_that_there_are_none_is_saved_too(tmp_path: Path) -> None:
    mixture = fitted()
    mixture.groups_ = Groups(np.arange(9), 0.8)
    mixture.save(tmp_path / "m.safetensors")
    again = VonMisesFisherMixture.load(tmp_path / "m.safetensors").groups_
    assert again is not None
    assert (again.is_found, again.n_groups, again.ratio) == (False, 9, 0.8)


def test_a_mixture_that_nobody_asked_for_groups_has_none(tmp_path: Path) -> None:
    fitted().save(tmp_path / "m.safetensors")
    assert VonMisesFisherMixture.load(tmp_path / "m.safetensors").groups_ is None


def test_a_file_of_an_earlier_version(tmp_path: Path) -> None:
    """Its header does not speak of groups."""
    path = tmp_path / "m.safetensors"
    fitted().save(path)
    rewrite(path, lambda header, arrays: header.pop("groups"))
    assert VonMisesFisherMixture.load(path).groups_ is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header, arrays: arrays.pop("groups.label"), "groups.label is missing"),
        (lambda header, arrays: arrays.pop("groups.weight"), "groups.weight is missing"),
        (lambda header, arrays: arrays.pop("groups.offset"), "groups.offset is missing"),
        (lambda header, arrays: arrays.update({"groups.label": np.zeros(8, int)}), "groups.label is .* misshapen"),
        (lambda header, arrays: arrays.update({"groups.label": np.full(9, 3)}), "in a group that is not there"),
        (lambda header, arrays: arrays.update({"groups.label": np.full(9, -1)}), "in a group that is not there"),
        (lambda header, arrays: arrays.update({"groups.weight": np.zeros((3, 11))}), "groups.weight is .* misshapen"),
        (lambda header, arrays: arrays.update({"groups.weight": np.zeros((0, 12))}), "groups.weight is .* misshapen"),
        (lambda header, arrays: arrays.update({"groups.weight": np.array(1.0)}), "header cannot be read"),
        (lambda header, arrays: arrays.update({"groups.offset": np.zeros(2)}), "groups.offset is .* misshapen"),
        (lambda header, arrays: arrays["groups.offset"].fill(np.nan), "groups.offset is .* not finite"),
        (lambda header, arrays: header.update(groups={}), "header cannot be read"),
        (lambda header, arrays: header.update(groups=[1]), "header cannot be read"),
        (lambda header, arrays: header["groups"].update(ratio="low"), "header cannot be read"),
    ],
)
def test_damage_is_named_in_a_sentence(change: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    grouped().save(path)
    rewrite(path, change)
    with pytest.raises(StoredFileError, match=rf"m\.safetensors is damaged.*{message}.*; save .* again\."):
        VonMisesFisherMixture.load(path)


def rewrite(path: Path, change: Any) -> None:
    """Change what a file holds."""
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as stored:
        header = json.loads(stored.metadata()["siammm"])
    arrays = {name: array.copy() for name, array in load_file(path).items()}
    change(header, arrays)
    save_file(arrays, path, metadata={"siammm": json.dumps(header)})
