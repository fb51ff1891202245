"""Screening of settings: every effect is found from the means of two halves, and the better values go on."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

# Of each setting, with 200 and with 20 voters: of d only the mean is a gain, of e there is none.
GAINS = {"a": (0.01, 0.02), "b": (-0.02, -0.01), "c": (0.03, 0.03), "d": (-0.01, 0.03), "e": (0.0, 0.0)}


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("screen")


@pytest.fixture
def lines(screen: Any, capsys: pytest.CaptureFixture[str]) -> Any:
    """What a trial prints: after so many of its 110 epochs, with these accuracies at each look."""
    train_cifar = importlib.import_module("train_cifar")

    def printed(n_epochs: int, accuracies: Any) -> str:
        looks = iter(accuracies)
        listener = train_cifar.Lines(lambda _: next(looks), lambda *_: None, [])
        listener.began(SimpleNamespace(config=SimpleNamespace(optimisation=SimpleNamespace(epochs=110))))
        for epoch in range(1, n_epochs + 1):
            listener.finished_epoch({"epoch": epoch, "loss": 1.0, "images_per_second": 7.0})
        return capsys.readouterr().out

    return printed


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


def test_looks_are_read_with_their_epochs_whatever_else_is_printed(screen: Any, lines: Any) -> None:
    log = lines(30, [(0.5, 0.6), (0.55, 0.65)])
    assert screen.looked(log) == {11: (0.5, 0.6), 22: (0.55, 0.65)}
    warned = "torch.py:1: UserWarning: epoch 3: no\n  warnings.warn(\n"
    assert screen.looked(warned + log.replace("           kNN", f"{warned}           kNN")) == screen.looked(log)


def ran(screen: Any, lines: Any, monkeypatch: pytest.MonkeyPatch, folder: Path, epochs: dict[int, int]) -> Any:
    """What was started, with its settings; a trial has 110 epochs unless ``epochs`` has fewer for its number."""
    started: list[Any] = []

    def run(command: list[str], **settings: Any) -> None:
        started.append((command, settings))
        if not command[1].endswith("lanes.sh"):
            return
        trials = Path(command[3])
        trials.mkdir(parents=True)
        for number, arguments in enumerate(command[4:], 1):
            changed = [name for name, value in re.findall(r" ([a-e])=(\d)", arguments) if value == "2"]
            many, few = (sum(GAINS[name][kind] for name in changed) for kind in range(2))
            looks = ((0.4 + many * count, 0.6 + few * count) for count in range(1, 11))
            (trials / f"{number}.log").write_text(lines(epochs.get(number, 110), looks))

    monkeypatch.setattr(screen.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--output", str(folder)])
    screen.main()
    return started, json.loads((folder / "screen.json").read_text())


@pytest.fixture
def argv(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["screen.py", "cifar10", "--recipe", "byol", "--trial-epochs", "110", "--held-out", "0.2"]
    words += ["--common", "x=5", "--trial-only", "y=6"]
    monkeypatch.setattr(sys, "argv", [*words, *(word for name in GAINS for word in ("--factor", f"{name}=1,2"))])


@pytest.mark.usefixtures("argv")
def test_the_better_value_of_each_setting_goes_on_to_the_test_images(
    screen: Any, lines: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--epochs", "600"])
    ((lanes, settings), (final, _)), report = ran(screen, lines, monkeypatch, tmp_path, {})
    assert settings["env"]["PYTHON"] == sys.executable
    assert len(lanes[4:]) == 8
    start = "cifar10 --recipe byol --validation 0.2 --epochs 110 --set x=5 y=6 a="
    assert all(lane.startswith(start) for lane in lanes[4:])
    assert report["epoch"] == 110
    assert report["trials"][0] == {"trial": lanes[4], "200 voters": 0.4, "20 voters": 0.6}
    assert report["effects"]["a: 1 to 2"] == {"200 voters": 0.1, "20 voters": 0.2}
    assert report["effects"]["no factor, column 6"] == {"200 voters": 0.0, "20 voters": 0.0}
    # Where nothing is gained, what is usual stays.
    assert report["chosen"] == ["a=2", "b=1", "c=2", "d=2", "e=1"]
    script, output = str(Path(screen.__file__).parent / "train_cifar.py"), str(tmp_path)
    assert final == [
        sys.executable, "-u", script, "cifar10", "--recipe", "byol", "--epochs", "600", "--set", "x=5",
        *report["chosen"], "--output", output,
    ]  # fmt: skip


@pytest.mark.usefixtures("argv")
def test_trials_are_compared_after_the_last_epoch_that_all_reached(
    screen: Any, lines: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started, report = ran(screen, lines, monkeypatch, tmp_path, {3: 50})
    assert len(started) == 1, "without --epochs nothing is run on the test images"
    assert report["epoch"] == 44
    assert report["effects"]["c: 1 to 2"]["20 voters"] == 0.12


@pytest.mark.usefixtures("argv")
def test_a_trial_that_never_looked_is_no_ground_for_a_choice(
    screen: Any, lines: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="A trial ended before its first look"):
        ran(screen, lines, monkeypatch, tmp_path, {5: 10})
