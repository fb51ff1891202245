"""Several processes, each with its shard, find what one process finds with all rows. Real gloo, on this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import make_blobs

from siammm import GaussianMixture, VonMisesFisherMixture
from tests.conftest import Known, known_mixture
from tests.distributed.launch import LOOPBACK, run_ranks
from tests.nursery import ROOT, Nursery

Found = list[dict[str, Any]]

# Every rank of a world runs all the cases in one go.
FITS: dict[str, dict[str, Any]] = {
    "twenty": {"kind": "vmf", "data": "twenty", "parameters": {"n_components": 20}},
    "nearest": {"kind": "vmf", "data": "small", "parameters": {"n_components": 6}},
    "hard": {"kind": "vmf", "data": "small", "parameters": {"n_components": 6, "n_neighbours": 1}},
    "posterior": {"kind": "vmf", "data": "small", "parameters": {"n_components": 6, "assignment": "posterior"}},
    "auto": {"kind": "vmf", "data": "small", "parameters": {"n_components": 40, "merge": "auto"}},
    "paper": {"kind": "vmf", "data": "small", "parameters": {"n_components": 40, "merge": "paper", "merge_floor": 4}},
    "principal": {"kind": "vmf", "data": "small", "parameters": {"n_components": 6, "concentration_dims": 8}},
    "random": {"kind": "vmf", "data": "small", "parameters": {"n_components": 6, "init": "random", "n_init": 3}},
    "tensors": {"kind": "vmf", "data": "small", "parameters": {"n_components": 6}, "tensors": True},
    "gaussian": {"kind": "gaussian", "data": "blobs", "parameters": {"n_components": 6}},
    "diagonal": {"kind": "gaussian", "data": "blobs", "parameters": {"n_components": 6, "covariance": "diag"}},
    "gaussian-auto": {"kind": "gaussian", "data": "blobs", "parameters": {"n_components": 30, "merge": "auto"}},
}
UNSEEDED = {"kind": "vmf", "data": "small", "parameters": {"n_components": 12, "init": "random", "max_iter": 2}}
SPOILT = {
    "nan": "NaN or infinity in 1 row, the first being row 3",
    "zero-dimensional": "1D array",
    "narrow": "16 float64",
    "half": "16 float32",
}
KINDS: dict[str, Any] = {"vmf": VonMisesFisherMixture, "gaussian": GaussianMixture}


@pytest.fixture(scope="module")
def data(twenty: Known, small: Known) -> dict[str, np.ndarray]:
    # A quarter of the samples of twenty components is enough to compare two fits of the same samples.
    blobs = np.asarray(make_blobs(900, 5, centers=6, random_state=1)[0]) + 100
    return {"twenty": twenty.X[:5000], "small": small.X, "blobs": blobs}


def launched(
    nursery: Nursery, folder: Path, data: dict[str, np.ndarray], cases: list[dict[str, Any]], world: int
) -> dict[str, Found]:
    """Run the cases in so many processes; what each rank found, by case."""
    for name, X in data.items():
        np.save(folder / f"{name}.npy", X)
    (folder / "cases.json").write_text(json.dumps(cases))
    run_ranks(nursery, "worker.py", folder, world, timeout=300)
    return {
        case["name"]: [dict(np.load(folder / f"{case['name']}.{rank}.npz")) for rank in range(world)] for case in cases
    }


@pytest.fixture(scope="module")
def two(nursery: Nursery, data: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """Two ranks with a half each: every kind of fit, and every kind of trouble."""
    cases = []
    for name, case in {**FITS, "unseeded": UNSEEDED}.items():
        n = len(data[case["data"]])
        parameters = case["parameters"] | ({} if name == "unseeded" else {"random_state": 0})
        cases.append(case | {"name": name, "bounds": [0, n // 2, n], "parameters": parameters})
    cases += [{"name": spoil, "spoil": spoil, "bounds": [0, 450, 900]} | FITS["nearest"] for spoil in SPOILT]
    cases.append({"name": "after", "bounds": [0, 450, 900]} | FITS["nearest"])
    return launched(nursery, tmp_path_factory.mktemp("two"), data, cases, 2)


@pytest.fixture(scope="module")
def three(nursery: Nursery, data: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """Three ranks, one of which has no rows at all."""
    cases = [
        FITS[name] | {"name": name, "bounds": [0, 700, 700, 900],
                      "parameters": FITS[name]["parameters"] | {"random_state": 0}}
        for name in UNEVEN
    ]  # fmt: skip
    return launched(nursery, tmp_path_factory.mktemp("three"), data, cases, 3)


UNEVEN = ["nearest", "posterior", "auto", "principal", "tensors", "gaussian-auto"]


@pytest.fixture(scope="module")
def alone(data: dict[str, np.ndarray]) -> Callable[[str], Any]:
    """The same fit in this one process, on all rows."""
    fits: dict[str, Any] = {}

    def fit(name: str) -> Any:
        if name not in fits:
            case = FITS[name]
            X = data[case["data"]]
            rows = torch.from_numpy(X) if case.get("tensors") else X
            fits[name] = KINDS[case["kind"]](**case["parameters"], random_state=0).fit(rows)
        return fits[name]

    return fit


def check_equal(found: Found, one: Any) -> None:
    """All ranks hold the same mixture, and it is the one that a single process finds."""
    np.testing.assert_array_equal(np.concatenate([rank["labels"] for rank in found]), np.asarray(one.labels_))
    centres = one.mean_directions_ if isinstance(one, VonMisesFisherMixture) else one.means_
    spreads = one.concentrations_ if isinstance(one, VonMisesFisherMixture) else one.variances_
    for rank in found:
        assert rank["lower_bound"] == pytest.approx(one.lower_bound_, rel=1e-5)
        np.testing.assert_allclose(rank["centres"], np.asarray(centres), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(rank["spreads"], np.asarray(spreads), rtol=1e-4)
        np.testing.assert_array_equal(rank["centres"], found[0]["centres"])
        if one.merges_ is not None:
            assert rank["counts"].tolist() == one.merges_.n_components
            np.testing.assert_allclose(rank["linkage"], one.merges_.linkage, atol=1e-5)


@pytest.mark.parametrize("name", FITS)
def test_two_ranks_find_what_one_finds(name: str, two: dict[str, Found], alone: Callable[[str], Any]) -> None:
    check_equal(two[name], alone(name))


@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_and_empty_shards(name: str, three: dict[str, Found], alone: Callable[[str], Any]) -> None:
    assert [len(rank["labels"]) for rank in three[name]] == [700, 0, 200]
    check_equal(three[name], alone(name))


def test_one_rank_may_predict_by_itself(two: dict[str, Found], alone: Callable[[str], Any]) -> None:
    """Only fitting is a matter for all: prediction and scores are of the rank's own rows."""
    for name in FITS:
        np.testing.assert_array_equal(two[name][0]["predicted"], two[name][0]["labels"])
        assert "predicted" not in two[name][1]
    assert len(two["auto"][0]["groups"]) == len(two["auto"][0]["centres"])
    assert two["nearest"][0]["score"] == pytest.approx(
        alone("nearest").score(known_mixture(k=6, d=16, n=900, low=60, high=200, seed=3).X[:450])
    )


def test_ranks_agree_on_a_seed_when_none_is_given(two: dict[str, Found]) -> None:
    np.testing.assert_array_equal(two["unseeded"][0]["centres"], two["unseeded"][1]["centres"])


@pytest.mark.parametrize("spoil", SPOILT)
def test_what_one_rank_refuses_every_rank_refuses(spoil: str, two: dict[str, Found]) -> None:
    """At once, and the rank at fault says what is wrong; none waits for the others."""
    for rank in two[spoil]:
        assert rank["type"] == "InputError"
        assert rank["seconds"] < 15
    assert SPOILT[spoil] in str(two[spoil][1]["error"])
    if spoil in ("nan", "zero-dimensional"):  # what concerns the shards of all is said by all
        assert "Rank 1 cannot use its input" in str(two[spoil][0]["error"])
    else:
        assert two[spoil][0]["error"] == two[spoil][1]["error"]


def test_ranks_are_in_step_after_a_refusal(two: dict[str, Found]) -> None:
    assert two["after"][0]["lower_bound"] == two["after"][1]["lower_bound"]


@pytest.fixture
def guide(tmp_path: Path) -> list[str]:
    """The arguments that docs/many-machines.md gives torchrun, with its script and embeddings in an empty folder."""
    text = (ROOT / "docs" / "many-machines.md").read_text("utf-8")
    scripts = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    command = re.search(r"^torchrun (--standalone .* fit_shards.py)$", text, flags=re.MULTILINE)
    assert len(scripts) == 1
    assert command is not None
    (tmp_path / "fit_shards.py").write_text(scripts[0])
    np.save(tmp_path / "embeddings.npy", guide_rows())
    return command.group(1).split()


def guide_rows() -> np.ndarray:
    return known_mixture(k=5, d=12, n=600, low=60, high=200, seed=0).X.astype(np.float32)


def check_guide(folder: Path) -> None:
    """The ranks of the guide left one mixture and their labels."""
    mixture = VonMisesFisherMixture.load(folder / "mixture.safetensors")
    assert mixture.n_components_ == 5
    labels = np.concatenate([np.load(folder / f"labels.{rank}.npy") for rank in range(2)])
    np.testing.assert_array_equal(labels, mixture.predict(guide_rows()))


def test_the_guide_runs_on_ranks_as_torchrun_starts_them(nursery: Nursery, guide: list[str], tmp_path: Path) -> None:
    """Its script as it stands, and its command as torchrun understands it; ``slow`` has torchrun itself start both."""
    from torch.distributed.run import parse_args

    parsed = parse_args(guide)
    assert (parsed.standalone, parsed.nproc_per_node, parsed.training_script) == (True, "2", "fit_shards.py")
    run_ranks(nursery, tmp_path / parsed.training_script, tmp_path, 2, timeout=240)
    check_guide(tmp_path)


@pytest.mark.slow
def test_the_guide_runs_under_torchrun(guide: list[str], tmp_path: Path) -> None:
    """Python and torch start three times."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *guide],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "GLOO_SOCKET_IFNAME": LOOPBACK},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    check_guide(tmp_path)
