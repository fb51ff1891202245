"""Screening of settings: every effect is found from the means of two halves, and the better values go on."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

GAINS = {"a": 0.01, "b": -0.02, "c": 0.03, "d": -0.04}
LOOK = "   {:7.1f} s  epoch {}: loss 1.0  {} images/s\n           kNN so far {:.4f} (200 voters), {:.4f} (20)\n"


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("screen")


@pytest.mark.parametrize(("n_factors", "n_trials"), [(1, 2), (2, 4), (3, 4), (4, 8), (7, 8), (8, 16)])
def test_every_pair_of_values_is_in_a_quarter_of_the_trials(screen: Any, n_factors: int, n_trials: int) -> None:
    design_RC = screen.design(n_factors)
    assert design_RC.shape == (n_trials, n_trials - 1)
    assert not design_RC[0].any(), "the first trial changes nothing"
    sign_RC = np.where(design_RC, -1, 1)
    assert (sign_RC.T @ sign_RC == n_trials * np.eye(n_trials - 1)).all()
    assert (sign_RC.sum(axis=0) == 0).all()


def test_effects_that_add_up_are_found_exactly_and_an_empty_column_shows_none(screen: Any) -> None:
    design_RC = screen.design(6)
    gain_CK = np.array([[0.1, 1.0], [0.0, -2.0], [0.3, 0.0], [-0.4, 1.0], [0.5, 0.5], [0.6, 0.0], [0.0, 0.0]])
    np.testing.assert_allclose(screen.effects(design_RC, 7.0 + design_RC @ gain_CK), gain_CK, atol=1e-12)


def test_looks_are_read_with_their_epochs_whatever_else_is_printed(screen: Any) -> None:
    log = "torch.py:1: UserWarning: epoch 3: no\n  warnings.warn(\n"
    log += "    0.5 s  epoch 1: loss 2.0\n" + LOOK.format(1, 2, 7, 0.5, 0.6) + "    1.5 s  epoch 3: loss 2.0\n"
    assert screen.looked(log + LOOK.format(2, 4, 7, 0.55, 0.65)) == [(2, 0.5, 0.6), (4, 0.55, 0.65)]


def ran(screen: Any, monkeypatch: pytest.MonkeyPatch, folder: Path, looks: dict[int, int]) -> tuple[list[Any], Any]:
    """Commands that were started, and the report; a trial looks ten times unless ``looks`` has fewer for its number."""
    commands: list[Any] = []

    def started(command: list[str], **_: Any) -> None:
        commands.append(command)
        if not command[1].endswith("lanes.sh"):
            return
        trials = Path(command[3])
        trials.mkdir(parents=True)
        for number, arguments in enumerate(command[4:], 1):
            gain = sum(GAINS[name] * (value == "2") for name, value in re.findall(r" ([abcd])=(\d)", arguments))
            text = "".join(
                LOOK.format(1.0, 11 * look, 9, 0.5 + gain * look, 0.6 + gain * look)
                for look in range(1, looks.get(number, 10) + 1)
            )
            (trials / f"{number}.log").write_text(text)

    monkeypatch.setattr(screen.subprocess, "run", started)
    factors = [word for name in GAINS for word in ("--factor", f"{name}=1,2")]
    words = ["screen.py", "cifar10", "--output", str(folder), "--trial-epochs", "110", "--epochs", "600"]
    words += ["--held-out", "0.2", "--common", "x=5", "--trial-only", "y=6", *factors]
    monkeypatch.setattr(sys, "argv", words)
    screen.main()
    return commands, json.loads((folder / "screen.json").read_text())


def test_the_better_value_of_each_setting_goes_on_to_the_test_images(
    screen: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (lanes, final), report = ran(screen, monkeypatch, tmp_path, {})
    assert len(lanes[4:]) == 8
    assert all("--validation 0.2 --epochs 110 --set x=5 y=6 a=" in lane for lane in lanes[4:])
    assert report["epoch"] == 110
    assert report["effects"]["c: 1 to 2"] == {"200 voters": 0.3, "20 voters": 0.3}
    assert report["chosen"] == ["a=2", "b=1", "c=2", "d=1"]
    assert "--validation" not in final
    end = ["--epochs", "600", "--set", "x=5", *report["chosen"], "--output", str(tmp_path)]
    assert final[-len(end) :] == end


def test_trials_are_compared_where_the_slowest_was_stopped(
    screen: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, report = ran(screen, monkeypatch, tmp_path, {3: 4})
    assert report["epoch"] == 44
    assert report["effects"]["d: 1 to 2"]["20 voters"] == -0.16
    with pytest.raises(SystemExit, match="A trial ended before its first look"):
        ran(screen, monkeypatch, tmp_path / "none", {5: 0})
