"""The stored evaluation, ``evaluation.json``: figures, and everything that is needed to compare them.

A figure is a share or a score over the seeds. Beside it stand the protocol's recipe and settings, the sets of images,
and whether the encoder had seen the test images.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from siammm.core.errors import StoredFileError
from siammm.core.version import __version__

FILE = "evaluation.json"
FORMAT = 1

_LIBRARIES = ("torch", "torchvision", "timm", "numpy", "scipy", "scikit-learn")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number of a protocol, over the seeds."""

    values: list[float]
    """One per seed, or a single one where nothing is random."""
    mean: float
    deviation: float | None
    """The standard deviation over the seeds (of a sample, n - 1); None where there is one value."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        """Mean and deviation of the values."""
        values = [float(value) for value in values]
        deviation = statistics.stdev(values) if len(values) > 1 else None
        return cls(values=values, mean=statistics.fmean(values), deviation=deviation)


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
    """Everything that was measured of one subject."""

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
    """Protocols that were requested, but not reached before the evaluation stopped."""

    def write(self, folder: Path) -> None:
        """Write ``evaluation.json`` into a folder."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1, allow_nan=False, default=str)
        (folder / FILE).write_text(text + "\n", encoding="utf-8")


def read_evaluation(path: Path) -> Evaluation:
    """Read what ``siammm evaluate`` wrote: the file, its folder, or a run with such a folder beside it."""
    file = _file(path)
    try:
        plain = json.loads(file.read_text(encoding="utf-8"))
        if plain.pop("format") != FORMAT:
            raise StoredFileError(f"{file} was written by another version of siammm; evaluate again.")
        results = [
            Result(**{**part, "figures": {name: Figure(**value) for name, value in part["figures"].items()}})
            for part in plain.pop("results")
        ]
        found = Evaluation(**plain, results=results)
        _check_types(found)
        return found
    except StoredFileError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoredFileError(f"{file} is not an evaluation, or it is damaged; write it again.") from error


def _check_types(found: Evaluation) -> None:
    """Raise if a part is not what it was when it was written."""
    dicts = [found.subject, found.data, found.test_images, found.environment]
    dicts += [found.data.get(part) or {} for part in ("train", "test", "split", "transfer", "transfer_test")]
    texts = [*found.unfinished]
    numbers: list[Any] = [*found.seeds]
    for result in found.results:
        dicts += [result.settings, result.figures, result.detail]
        texts += [result.protocol, result.recipe, *result.neutral]
        numbers.append(result.seconds)
        for figure in result.figures.values():
            numbers += [figure.mean, *figure.values, *([] if figure.deviation is None else [figure.deviation])]
    if not all(isinstance(one, dict) for one in dicts) or not all(isinstance(one, str) for one in texts):
        raise TypeError
    if not all(isinstance(one, int | float) and abs(one) < 1e300 for one in numbers):
        raise TypeError
    for part in ("train", "test", "transfer", "transfer_test"):
        one = found.data.get(part) or {}
        if not isinstance(one.get("fingerprint", ""), str | None) or not isinstance(one.get("labels", ""), str | None):
            raise TypeError
    if not all(isinstance(found.test_images.get(key), bool | None) for key in ("seen", "clustered")):
        raise TypeError


def _file(path: Path) -> Path:
    path = path.expanduser()
    here = default_output(str(path)) / FILE
    # A file that is not JSON is the subject of an evaluation, such as a table of embeddings.
    candidates = ([path, here] if path.suffix == ".json" else [here, path]) if path.is_file() else [path / FILE, here]
    if path.is_dir():
        candidates.append(path.resolve().with_name(f"{path.resolve().name}-evaluation") / FILE)
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        raise StoredFileError(f"There is no evaluation of {path}; make one with: siammm evaluate {path}.")
    return found


def default_output(subject: str) -> Path:
    """The folder an evaluation is written to by default: named after its subject, in the working directory."""
    scheme, _, rest = subject.partition(":")
    if scheme in ("timm", "torchvision") and rest:
        model, _, path = rest.partition(":")
        return Path("-".join(part for part in (model, Path(path).stem if path else "", "evaluation") if part))
    path = Path(subject).expanduser()
    return Path(f"{path.resolve().name if path.is_dir() else path.stem}-evaluation")


def environment(command: str) -> dict[str, Any]:
    """What figures depend on besides the settings."""
    import torch

    versions = {"siammm": __version__, "python": platform.python_version()}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "commit": commit(),
        "versions": versions | {name: metadata.version(name) for name in _LIBRARIES},
        "machine": {"system": platform.platform(terse=True), "gpu": gpu, "threads": torch.get_num_threads()},
    }


@cache
def commit() -> str | None:
    """The commit of this package, and whether its files were changed since; None outside a checkout.

    SIAMMM_COMMIT names it where there is no git.
    """
    if "SIAMMM_COMMIT" in os.environ:
        return os.environ["SIAMMM_COMMIT"]
    package = Path(__file__).parents[1]
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
