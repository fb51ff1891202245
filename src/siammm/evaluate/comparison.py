"""Evaluations side by side: which figures can be compared, and which of them is the best."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from siammm.runs.evaluation import Evaluation, Figure, Result

_DIGITS = 4


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure of several evaluations."""

    protocol: str
    name: str
    figures: list[Figure | None]
    """One per evaluation; None where it was not measured."""
    best: list[bool]
    """Which are the best; none of them where there is one figure only, or where they cannot be compared."""
    neutral: bool = False
    """Whether larger is neither better nor worse, as for a number of clusters."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Evaluations side by side, and why some of their figures cannot be compared."""

    names: list[str]
    rows: list[Row]
    warnings: list[str]


def compare(evaluations: Sequence[Evaluation]) -> Comparison:
    """Put evaluations side by side.

    The best figure is marked where at least two were measured in the same way on the same images: with the same recipe
    and settings, and the same training and test images. Otherwise nothing is marked, and a warning says why.
    """
    warnings = _warnings_about_data(evaluations)
    rows: list[Row] = []
    for protocol in dict.fromkeys(result.protocol for one in evaluations for result in one.results):
        found = [next((r for r in one.results if r.protocol == protocol), None) for one in evaluations]
        measured = [result for result in found if result is not None]
        warning = _warning_about_recipe(protocol, measured)
        if warning is not None:
            warnings.append(warning)
        parts = ("transfer", "transfer_test") if protocol == "transfer" else ("train", "test")
        having = [one for one, result in zip(evaluations, found, strict=True) if result is not None]
        same = not any(_differ(having, part) for part in parts)
        if protocol == "transfer" and not same:
            warnings.append("The images of transfer differ: its figures cannot be compared, and none is marked.")
        neutral = {name for result in measured for name in result.neutral}
        for name in dict.fromkeys(name for result in measured for name in result.figures):
            figures = [None if result is None else result.figures.get(name) for result in found]
            comparable = warning is None and same and name not in neutral
            best = _best(figures) if comparable else [False] * len(figures)
            rows.append(Row(protocol=protocol, name=name, figures=figures, best=best, neutral=name in neutral))
    return Comparison(names=_names(evaluations), rows=rows, warnings=warnings)


def _best(figures: Sequence[Figure | None]) -> list[bool]:
    """The highest mean, and all that equal it to the last digit shown."""
    means = [None if figure is None else round(figure.mean, _DIGITS) for figure in figures]
    measured = [mean for mean in means if mean is not None]
    return [len(measured) > 1 and mean == max(measured) for mean in means]


def _differ(evaluations: Sequence[Evaluation], part: str) -> bool:
    """Whether the images of a set, or their labels, are not the same in all evaluations."""
    sets: list[dict[str, Any]] = [one.data.get(part) or {} for one in evaluations]
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
        answers = [one.test_images.get(key) for one in evaluations]
        if len(set(answers)) > 1:
            words = ["unknown" if answer is None else "yes" if answer else "no" for answer in answers]
            said = "; ".join(f"{name}: {word}" for name, word in zip(_names(evaluations), words, strict=True))
            found.append(f"Whether the test images {what} differs ({said}).")
    if len({tuple(one.seeds) for one in evaluations}) > 1:
        found.append("The seeds differ: deviations are over different numbers or choices of them.")
    return found


def _warning_about_recipe(protocol: str, measured: Sequence[Result]) -> str | None:
    def values(key: str) -> set[str]:
        return {json.dumps(result.settings.get(key), sort_keys=True, default=str) for result in measured}

    odd = [key for key in sorted({key for result in measured for key in result.settings}) if len(values(key)) > 1]
    if not odd and len({result.recipe for result in measured}) == 1:
        return None
    said = f" ({', '.join(odd)})" if odd else ""
    return f"The recipes of {protocol} differ{said}: its figures cannot be compared, and none is marked."


def _names(evaluations: Sequence[Evaluation]) -> list[str]:
    """The names of the subjects, with a number where two are the same."""
    names = [
        f"{one.subject.get('name')}{' (momentum)' if one.subject.get('encoder') == 'momentum' else ''}"
        for one in evaluations
    ]
    return [f"{name} #{names[: i + 1].count(name)}" if names.count(name) > 1 else name for i, name in enumerate(names)]
