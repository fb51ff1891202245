"""The cells of a study: one training each, by set of images, name and seed.

A study is a JSON file. ``shared`` holds what all its cells have in common, on top of one of ``studies/bases``; a set of
images may change that, and so may a cell. Where a number is written as "5 x classes", it is that many times the classes
of the set.

    "shared": {"base": "paper-form", "epochs": 100},
    "sets": {"cifar10": {}, "tiny": {"epochs": 50, "set": {"image_size": 32}}},
    "cells": {"fixed": {"set": {"merge": "none", "n_components": "5 x classes"}}}

A study without ``sets`` is of one set, whose folder is given with ``--data``; with them, that is the folder of the
sets' folders.
"""

from __future__ import annotations

import hashlib
import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import train_cifar
from siammm.settings.checks import check_settings
from siammm.settings.fields import value_of, with_settings
from siammm.settings.methods import with_method
from siammm.settings.presets import PRESETS
from siammm.settings.stored import as_plain
from siammm.settings.training import ClusteringConfig, ObjectiveConfig, TrainConfig

HERE = Path(__file__).parent
BASES = HERE / "studies" / "bases"
# Of each set: its classes and training images.
SETS = {"cifar10": (10, 50_000), "cifar100": (100, 50_000), "tiny": (200, 100_000)}
# What a cell may be given besides its settings.
_KEYS = {"base", "recipe", "preset", "epochs", "validation", "images", "keep", "keep_at", "oracle", "evaluations"}
# An epoch of CIFAR with views of 24 pixels on an H200 that several trainings share, by earlier records: .7 to 1.1 s of
# the GPU. Starting, compiling and the end of a training take a minute, during which the others go on.
_EPOCH_SECONDS, _START_SECONDS = 1.0, 45.0
# k-means++ once: 256 rounds of drawing take .33 s of a CPU core, besides the GPU's part.
_SEEDING_SECONDS = 0.5
# Guesses, for an H200 that four trainings share, until records say how long these take.
_EVALUATION_SECONDS = {"linear": 2.0, "clusters": 10.0, "semi": 80.0, "transfer": 5.0, "mosaics": 40.0}


@dataclass(frozen=True)
class Cell:
    """One training: everything that ``train_cifar.py`` is told."""

    study: str
    name: str
    seed: int
    image_set: str | None
    how: dict[str, Any]
    """What else the training is told: recipe, epochs and so on."""
    settings: dict[str, Any]

    @property
    def label(self) -> str:
        """Its name in the folder of records."""
        return "-".join([*([self.image_set] if self.image_set else []), self.name, str(self.seed)])

    @property
    def evaluations(self) -> list[str]:
        """What is measured after training."""
        return self.how.get("evaluations", [])

    @property
    def is_oracle(self) -> bool:
        """Whether it is told the labels: a diagnosis, never a result."""
        return bool(self.how.get("oracle"))

    @property
    def identity(self) -> str:
        """Equal for cells of different studies that are the same training."""
        how = {key: value for key, value in self.how.items() if key not in ("recipe", "preset", "evaluations")}
        config = replace(self.config(), preset="cifar", method="siammm")  # its settings say everything
        if config.objective.cluster_loss == "none":  # how clusters would be made is of no account
            kept = ("instance_loss", "cluster_loss", "queue_size", "contrastive_temperature")
            kept += ("contrastive_temperature_end",)
            objective = ObjectiveConfig(**{name: getattr(config.objective, name) for name in kept})
            config = replace(config, objective=objective, clustering=ClusteringConfig())
        facts = json.dumps([self.image_set, how, as_plain(config)], sort_keys=True)
        return hashlib.sha256(facts.encode()).hexdigest()[:16]

    def words(self, data: Path, folder: Path) -> list[str]:
        """The call of ``train_cifar.py``; ``data`` as ``--data`` of ``study.py``."""
        own = data if self.image_set is None else data / self.image_set
        how = self.how
        words = [str(own), "--recipe", how.get("recipe", "siammm"), "--epochs", str(how["epochs"])]
        words += [
            word
            for key in ("preset", "validation", "images", "keep_at")
            if key in how
            for word in (f"--{key.replace('_', '-')}", str(how[key]))
        ]
        words += [f"--{key}" for key in ("keep", "oracle") if how.get(key)]
        words += ["--seed", str(self.seed), "--output", str(folder)]
        words += ["--evaluations", *self.evaluations] if self.evaluations else []
        if "transfer" in self.evaluations:
            there = [name for name in SETS if name != self.image_set and (data / name / "test.npz").exists()]
            words += ["--others", *(f"{name}={data / name}" for name in there)] if there else []
        words += ["--set", *(f"{name}={json_or_word(value)}" for name, value in self.settings.items())]
        return [sys.executable, "-u", str(HERE / "train_cifar.py"), *words]

    def config(self) -> TrainConfig:
        """The settings of the training, as ``train_cifar.py`` puts them together."""
        method, changes = train_cifar.RECIPES[self.how.get("recipe", "siammm")]
        preset = with_method(PRESETS[self.how.get("preset", "cifar")], method, recipe=False)
        given = train_cifar.given([f"{name}={json_or_word(value)}" for name, value in self.settings.items()])
        settings = changes | {"epochs": self.how["epochs"], "random_state": self.seed} | given
        return with_settings(preset, data="images", **settings)

    def check(self) -> None:
        """Refuse what could not be trained."""
        check_settings(self.config())

    @property
    def n_images(self) -> int:
        """The images that it trains on."""
        whole = self.how.get("images") or SETS[self.image_set or "cifar10"][1]
        return round(whole * (1 - self.how.get("validation", 0)))


def json_or_word(value: Any) -> str:
    """A value as ``train_cifar.given`` reads it."""
    return value if isinstance(value, str) else json.dumps(value)


def read_study(path: Path) -> dict[str, Any]:
    """A study, with what its base says."""
    study = json.loads(path.read_text("utf-8"))
    base = study["shared"].get("base")
    if base is not None:
        study["shared"] = _joined(json.loads((BASES / f"{base}.json").read_text("utf-8")), study["shared"])
    return study


def cells_of(study: Mapping[str, Any], seeds: Sequence[int] | None = None) -> list[Cell]:
    """All cells; those of a seed come before those of the next, so that what is there is paired."""
    found: list[Cell] = []
    for seed in seeds or study["seeds"]:
        for image_set, of_set in (study.get("sets") or {None: {}}).items():
            shared = _joined(study["shared"], of_set)
            found += [
                _cell(study["name"], name, seed, image_set, _joined(shared, own))
                for name, own in study["cells"].items()
                if image_set in own.get("sets", [image_set])
            ]
    return found


def _cell(study: str, name: str, seed: int, image_set: str | None, given: dict[str, Any]) -> Cell:
    unknown = set(given) - _KEYS - {"set", "sets", "text"}
    if unknown:
        raise SystemExit(f"{study}, {name}: unknown {', '.join(sorted(unknown))}.")
    classes = SETS[image_set or "cifar10"][0]
    settings = {key: _number(value, classes) for key, value in given.get("set", {}).items()}
    how = {key: value for key, value in given.items() if key in _KEYS - {"base"} and value is not None}
    return Cell(study, name, seed, image_set, how, settings)


def _joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """The second on top of the first, settings on top of settings."""
    return {**first, **second, "set": {**first.get("set", {}), **second.get("set", {})}}


def _number(value: Any, classes: int) -> Any:
    """A value, where "5 x classes" is a number."""
    found = re.fullmatch(r"(\d+) x classes", value) if isinstance(value, str) else None
    return int(found[1]) * classes if found else value


# -- records -----------------------------------------------------------------------------------------------------------


def record_of(output: Path, cell: Cell) -> dict[str, Any] | None:
    """What the cell's training left, if it is done and was measured by all its evaluations."""
    path = output / f"{cell.label}.json"
    if not path.exists():
        return None
    found = json.loads(path.read_text("utf-8"))
    # Records of before there were evaluations have none to be measured by.
    done = found.get("evaluations", cell.evaluations)
    return found if "failed" in found or set(cell.evaluations) <= set(done) else None


def beside(output: Path) -> list[dict[str, Any]]:
    """The records of the studies in the folders beside this one's, and its own."""
    found: list[dict[str, Any]] = []
    for path in sorted(output.parent.glob("*/*.json")):
        record = json.loads(path.read_text("utf-8"))
        if "recipe" in record and "from_study" not in record:
            found.append(record | {"folder": path.parent.name})
    return found


def adopted(output: Path, cell: Cell, others: Sequence[Mapping[str, Any]]) -> bool:
    """Take over the record of the same training in another study."""
    for found in others:
        if found.get("identity") != cell.identity or found["folder"] == output.name:
            continue
        if "failed" in found or set(cell.evaluations) <= set(found.get("evaluations", [])):
            taken = {key: value for key, value in found.items() if key != "folder"} | {"from_study": found["folder"]}
            (output / f"{cell.label}.json").write_text(json.dumps(taken, indent=1), "utf-8")
            return True
    return False


# -- time --------------------------------------------------------------------------------------------------------------


def seconds_for(cell: Cell, earlier: Sequence[Mapping[str, Any]], at_once: int) -> tuple[float, str]:
    """How long the cell takes with so many others beside it, and how that is known."""
    view = _view_size(cell)
    of_set = [run for run in earlier if run.get("image_set") == cell.image_set and _view_of(run) == view]
    alike = [run for run in of_set if run.get("recipe") == cell.how.get("recipe", "siammm")]
    evaluated = _evaluation_seconds(cell, of_set, at_once)
    for runs, why in ((alike, "records of the recipe"), (of_set, "records of the set")):
        paces = [
            (run["seconds"] - _START_SECONDS) / run["settings"]["epochs"] / run["n"] / run.get("at_once", at_once)
            for run in runs
            if "failed" not in run
        ]
        paces = [pace for pace in paces if pace > 0]
        if paces:
            epochs = statistics.median(paces) * cell.how["epochs"] * cell.n_images * at_once
            return _START_SECONDS + epochs + evaluated, why
    epoch = _EPOCH_SECONDS * cell.n_images / 50_000 * (view / 24) ** 2 * at_once
    config = cell.config()
    if config.objective.uses_mixture and config.clustering.centroids == "reinitialised":
        epoch += _SEEDING_SECONDS * config.clustering.n_init * (1 + len(config.clustering.more_components))
    return _START_SECONDS + epoch * cell.how["epochs"] + evaluated, "assumed"


def _evaluation_seconds(cell: Cell, runs: Sequence[Mapping[str, Any]], at_once: int) -> float:
    known = [
        run["evaluation_seconds"] / run.get("at_once", at_once)
        for run in runs
        if "evaluation_seconds" in run and set(run["evaluations"]) == set(cell.evaluations)
    ]
    return (statistics.median(known) if known else sum(_EVALUATION_SECONDS[e] for e in cell.evaluations) / 4) * at_once


def _view_size(cell: Cell) -> int:
    config = cell.config()
    usual = 64 if cell.image_set == "tiny" else 32
    return value_of(config, "view_size") or value_of(config, "image_size") or usual


def _view_of(run: Mapping[str, Any]) -> int:
    preset = PRESETS[run.get("preset", "cifar")]
    names = ("view_size", "image_size")
    found = next((run["settings"][name] for name in names if name in run["settings"]), None)
    return found or value_of(preset, "view_size") or value_of(preset, "image_size") or 32


def ends(lengths: Sequence[float], at_once: int) -> list[float]:
    """When each of the trainings ends, if they start in this order, so many at once."""
    lanes = [0.0] * at_once
    found: list[float] = []
    for length in lengths:
        lane = min(range(at_once), key=lanes.__getitem__)
        lanes[lane] += length
        found.append(lanes[lane])
    return found
