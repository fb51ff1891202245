"""The record of an evaluation: figures with all that they depend on, written to and read from ``evaluation.json``.

A figure is a share or a score over the seeds; a protocol's recipe, its settings, the sets of images and whether the
encoder had seen the test images stand beside it, because without these two figures cannot be compared.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import siammm
from siammm.core.errors import StoredFileError

FILE = "evaluation.json"
FORMAT = 1

_LIBRARIES = ("torch", "torchvision", "timm", "numpy", "scipy", "scikit-learn")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number of a protocol, over the seeds."""

    values: list[float]
    """One for each seed, or one alone where chance has no part in it."""
    mean: float
    deviation: float | None
    """The standard deviation over the seeds (of a sample, n - 1); None where there is one value."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        """The figure that these values make."""
        values = [float(value) for value in values]
        return cls(
            values=values,
            mean=statistics.fmean(values),
            deviation=statistics.stdev(values) if len(values) > 1 else None,
        )


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one protocol found."""

    protocol: str
    recipe: str
    """How it was measured, in words."""
    settings: dict[str, Any]
    """The numbers of the recipe."""
    figures: dict[str, Figure]
    """By name; shares and scores, of which more is better unless ``neutral`` says otherwise."""
    neutral: list[str] = field(default_factory=list)
    """Figures that are neither good nor bad by themselves, such as a number of clusters."""
    detail: dict[str, Any] = field(default_factory=dict)
    """What does not fit in a table: curves, purities."""
    seconds: float = 0.0
    """How long it took, over all seeds."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """All that was measured of one subject."""

    subject: dict[str, Any]
    """What was measured."""
    data: dict[str, Any]
    """The sets of images: ``train``, ``test``, ``split``, and ``transfer`` where there is one."""
    test_images: dict[str, Any]
    """Whether the test images were seen in training or clustered: yes, no or unknown (null), and why."""
    seeds: list[int]
    results: list[Result]
    environment: dict[str, Any]
    """Date, command, commit, versions of the libraries, machine."""
    unfinished: list[str] = field(default_factory=list)
    """Protocols that were asked for, but not reached before the evaluation was stopped."""

    def write(self, folder: Path) -> None:
        """Write it into a folder."""
        plain = {"format": FORMAT, **asdict(self)}
        text = json.dumps(plain, indent=1, allow_nan=False, default=str)
        (folder / FILE).write_text(text + "\n", encoding="utf-8")


def read_evaluation(path: Path) -> Evaluation:
    """Read what ``siammm evaluate`` wrote: the file, its folder, or a run with such a folder beside it."""
    file = _file(path)
    try:
        plain = json.loads(file.read_text(encoding="utf-8"))
        if plain.pop("format") != FORMAT:
            raise StoredFileError(f"{file} is of another version of siammm; evaluate again.")
        results = [
            Result(**{**part, "figures": {name: Figure(**value) for name, value in part["figures"].items()}})
            for part in plain.pop("results")
        ]
        return Evaluation(**plain, results=results)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, StoredFileError):
            raise
        raise StoredFileError(f"{file} is not an evaluation, or it is damaged; write it again.") from error


def _file(path: Path) -> Path:
    path = path.expanduser()
    here = default_output(str(path)) / FILE
    # A file of another kind is the subject of an evaluation, such as a table of embeddings.
    candidates = ([path, here] if path.suffix == ".json" else [here, path]) if path.is_file() else [path / FILE, here]
    if path.is_dir():
        candidates.append(path.resolve().with_name(f"{path.resolve().name}-evaluation") / FILE)
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        raise StoredFileError(f"There is no evaluation of {path}; make one with: siammm evaluate {path}.")
    return found


def default_output(subject: str) -> Path:
    """The folder that an evaluation goes to when nobody said: here, by the name of its subject."""
    scheme, _, rest = subject.partition(":")
    if scheme in ("timm", "torchvision") and rest:
        model, _, path = rest.partition(":")
        return Path("-".join(part for part in (model, Path(path).stem if path else "", "evaluation") if part))
    path = Path(subject).expanduser()
    return Path(f"{path.resolve().name if path.is_dir() else path.stem}-evaluation")


def environment(command: str) -> dict[str, Any]:
    """What figures depend on besides the settings."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "commit": commit(),
        "versions": {
            "siammm": siammm.__version__,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in _LIBRARIES},
        },
        "machine": {"system": platform.platform(terse=True), "gpu": gpu, "threads": torch.get_num_threads()},
    }


@cache
def commit() -> str | None:
    """The commit of this package, and whether its files were changed since; None outside a checkout.

    SIAMMM_COMMIT names it where there is no git.
    """
    if "SIAMMM_COMMIT" in os.environ:
        return os.environ["SIAMMM_COMMIT"]
    package = Path(siammm.__file__).parent
    try:
        # An installed package may lie within somebody else's repository, which does not know its files.
        _git(package, "ls-files", "--error-unmatch", "__init__.py")
        head = _git(package, "rev-parse", "--short", "HEAD")
        changed = _git(package, "status", "--porcelain", "--untracked-files=no", ".")
    except (OSError, subprocess.SubprocessError):
        return None
    return head + (" with changes" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.strip()


# -- comparing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure of several evaluations, side by side."""

    protocol: str
    name: str
    figures: list[Figure | None]
    """One for each evaluation; None where it was not measured."""
    best: list[bool]
    """Which are the best; none where they are alone or cannot be compared."""
    neutral: bool = False
    """Whether none is better than another, as with a number of clusters."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Evaluations side by side, and why some of their figures cannot be compared."""

    names: list[str]
    rows: list[Row]
    warnings: list[str]


_DIGITS = 4


def compare(evaluations: Sequence[Evaluation]) -> Comparison:
    """Put evaluations side by side.

    The best of a figure is marked where at least two were measured in the same way on the same images: with the same
    recipe and settings, and the same training and test images. Otherwise nothing is marked, and a warning says why.
    """
    warnings = _warnings_about_data(evaluations)
    order: dict[tuple[str, str], None] = {}
    for evaluation in evaluations:
        for result in evaluation.results:
            order.update(dict.fromkeys((result.protocol, name) for name in result.figures))
    # All figures of a protocol together, in the order in which the protocols were first seen.
    protocols = list(dict.fromkeys(protocol for protocol, _ in order))
    rows: list[Row] = []
    for protocol in protocols:
        found = [next((r for r in one.results if r.protocol == protocol), None) for one in evaluations]
        warning = _warning_about_recipe(protocol, evaluations, found)
        if warning is not None:
            warnings.append(warning)
        parts = ("transfer", "transfer_test") if protocol == "transfer" else ("train", "test")
        having = [one for one, result in zip(evaluations, found, strict=True) if result is not None]
        same = not any(_differ(having, part) for part in parts)
        if protocol == "transfer" and not same:
            warnings.append("The images of transfer differ: its figures cannot be compared, and none is marked.")
        comparable = warning is None and same
        neutral = {name for result in found if result is not None for name in result.neutral}
        for name in (name for owner, name in order if owner == protocol):
            figures = [None if result is None else result.figures.get(name) for result in found]
            marked = _best(figures) if comparable and name not in neutral else [False] * len(figures)
            rows.append(Row(protocol=protocol, name=name, figures=figures, best=marked, neutral=name in neutral))
    return Comparison(names=_names(evaluations), rows=rows, warnings=warnings)


def _best(figures: Sequence[Figure | None]) -> list[bool]:
    """The highest mean, and all that equal it to the last digit that is shown."""
    means = [None if figure is None else round(figure.mean, _DIGITS) for figure in figures]
    measured = [mean for mean in means if mean is not None]
    if len(measured) < 2:
        return [False] * len(means)
    return [mean == max(measured) for mean in means]


def _differ(evaluations: Sequence[Evaluation], part: str) -> bool:
    """Whether a set is not of the same images with the same labels in all of them."""
    sets: list[Mapping[str, Any]] = [one.data.get(part) or {} for one in evaluations]
    labels = {one["labels"] for one in sets if "labels" in one}
    return len({one.get("fingerprint") for one in sets}) > 1 or len(labels) > 1


def _warnings_about_data(evaluations: Sequence[Evaluation]) -> list[str]:
    found: list[str] = []
    for part, what in (("train", "training images"), ("test", "test images")):
        if _differ(evaluations, part):
            names = {str((one.data.get(part) or {}).get("name")) for one in evaluations}
            said = f" ({', '.join(sorted(names))})" if len(names) > 1 else ""
            found.append(f"The {what} or their labels differ{said}: figures cannot be compared, and none is marked.")
    for key, what in (("seen", "were seen in training"), ("clustered", "were among those clustered")):
        answers = {one.test_images.get(key) for one in evaluations}
        if len(answers) > 1:
            said = "; ".join(
                f"{name}: {_answer(one.test_images.get(key))}"
                for name, one in zip(_names(evaluations), evaluations, strict=True)
            )
            found.append(f"Whether the test images {what} differs ({said}).")
    if len({tuple(one.seeds) for one in evaluations}) > 1:
        found.append("The seeds differ: deviations are over different numbers or choices of them.")
    return found


def _warning_about_recipe(
    protocol: str, evaluations: Sequence[Evaluation], found: Sequence[Result | None]
) -> str | None:
    measured = [result for result in found if result is not None]
    recipes = {result.recipe for result in measured}
    settings = {json.dumps(result.settings, sort_keys=True, default=str) for result in measured}
    if len(recipes) == 1 and len(settings) == 1:
        return None
    keys = sorted({key for result in measured for key in result.settings})
    odd = [key for key in keys if len({json.dumps(r.settings.get(key), default=str) for r in measured}) > 1]
    said = f" ({', '.join(odd)})" if odd else ""
    return f"The recipes of {protocol} differ{said}: its figures cannot be compared, and none is marked."


def _names(evaluations: Sequence[Evaluation]) -> list[str]:
    """What to call them: their subjects, with a number where two are of the same."""
    names = [str(one.subject.get("name")) for one in evaluations]
    if any(one.subject.get("encoder") == "momentum" for one in evaluations):
        names = [
            f"{name} (momentum)" if one.subject.get("encoder") == "momentum" else name
            for name, one in zip(names, evaluations, strict=True)
        ]
    return [f"{name} #{names[: i + 1].count(name)}" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _answer(value: object) -> str:
    return {True: "yes", False: "no"}.get(value, "unknown")  # pyright: ignore[reportArgumentType, reportCallIssue]
