"""``summary.json`` of ``siammm cluster``: what is written into it, and what is read from it again.

The encoder of such a run is not in its folder. The summary names it, with a digest by which it is known again.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from siammm.cluster.find_clusters import Found, spread_of_components
from siammm.core.errors import StoredFileError
from siammm.core.text import one_line, shown
from siammm.core.version import __version__
from siammm.data.sources import from_anywhere
from siammm.mixture.shard import gathered
from siammm.runs import files
from siammm.settings.commands import ClusterConfig
from siammm.settings.stored import reading_from_plain
from siammm.settings.training import ClusteringConfig, DataConfig

# Nobody has more, and a list of so many names still fits into memory.
_MOST_CLUSTERS = 2**24


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What ``siammm cluster`` noted of its result, as far as anybody reads it."""

    data: str
    """The images, or the table of embeddings, as they are found from any folder."""
    fingerprint: str | None
    """Of the images or of the table."""
    n_samples: int
    n_dimensions: int
    n_clusters: int
    n_components: list[int]
    """Components after each round of merging, those at the start first; empty where none were merged."""
    n_merged: int | None
    """The clusters that merging ended with, where these were fewer than the groups and were replaced by finer ones."""
    encoder: dict[str, Any] | None
    """What is to be known of the encoder; None where a table was clustered."""
    n_set_aside: int
    """Images that could not be read."""
    settings: dict[str, Any]
    """All settings of the command, as JSON holds them."""
    reading: DataConfig
    versions: dict[str, Any]

    @property
    def encoder_name(self) -> str | None:
        """The encoder as the user named it."""
        return None if self.encoder is None else shown(self.encoder["name"])

    @property
    def sentence(self) -> str:
        """How the run came about, to begin a sentence with: it was clustered and not trained."""
        if self.encoder is None:
            return f"was clustered from the table of embeddings {shown(self.data)}, without an encoder"
        kind = "run" if self.encoder["kind"] == "run" else "pretrained encoder"
        return f"was clustered with the {kind} {self.encoder_name}, and not trained"

    @property
    def merging(self) -> ClusteringConfig:
        """How clusters were merged, in the words of the settings of training."""
        names = ("n_components", "n_groups", "merge", "merge_threshold", "merge_floor", "merge_share")
        return ClusteringConfig(**{name: self.settings[name] for name in names if name in self.settings})

    @property
    def family(self) -> str:
        """The kind of its components."""
        return str(self.settings.get("family"))


def is_clustered(folder: Path) -> bool:
    """Whether ``siammm cluster`` wrote this folder."""
    return all((folder / name).is_file() for name in (files.SUMMARY, files.MIXTURE, files.ASSIGNMENTS))


def read_summary(path: Path) -> Summary:
    """Read the summary of a result."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        given, settings, encoder = stored["input"], stored["settings"], stored["input"].get("encoder")
        found = Summary(
            data=given.get("path", given["file"]),
            fingerprint=given.get("fingerprint"),
            n_samples=int(given["n_samples"]),
            n_dimensions=int(given["n_dimensions"]),
            n_clusters=int(stored["n_components"]),
            n_components=[int(k) for k in stored.get("n_components_by_round") or []],
            n_merged=None if stored.get("n_merged") is None else int(stored["n_merged"]),
            encoder=encoder,
            n_set_aside=len(given.get("set_aside") or {}),
            settings=settings,
            reading=reading_from_plain(settings.get("reading") or {}, path),
            versions=dict(stored.get("versions") or {}),
        )
        texts = [found.data, *([] if encoder is None else [encoder["kind"], encoder["name"], encoder["backbone"]])]
        if not all(isinstance(text, str) for text in texts) or not isinstance(found.fingerprint, str | None):
            raise TypeError("a name is no text")
        if not 1 <= found.n_clusters <= _MOST_CLUSTERS:
            raise ValueError(f"n_components is {found.n_clusters}")
        if not isinstance(settings.get("random_state"), int):
            raise TypeError("random_state is no number")
    except StoredFileError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise StoredFileError(f"{path} cannot be read ({one_line(error)}); cluster again.") from error
    return found


def summary_of(found: Found, config: ClusterConfig, given: dict[str, Any]) -> dict[str, Any]:
    """The result and its settings as plain values; ``given`` is what is noted of the images or the table."""
    mixture, merges = found.mixture, found.mixture.merges_
    n, d = found.table.n_samples, found.table.embeddings.shape[1]
    spread = "concentrations" if config.family == "von-mises-fisher" else "variances"
    return {
        "input": {"file": str(found.table.source), "n_samples": n, "n_dimensions": d} | given,
        "n_components": int(mixture.n_components_),
        "n_groups": found.groups.n_groups,
        "groups": found.groups.label_K.tolist(),
        "ratio_of_groups": found.groups.ratio,
        "n_merged": found.n_merged,
        "converged": bool(mixture.converged_),
        "n_iter": int(mixture.n_iter_),
        "lower_bound": float(mixture.lower_bound_),
        "sizes": found.sizes.tolist(),
        "weights": np.asarray(mixture.weights_, dtype=float).tolist(),
        spread: spread_of_components(mixture).tolist(),
        "n_components_by_round": None if merges is None else [int(k) for k in merges.n_components],
        "scores": None if found.scores is None else dataclasses.asdict(found.scores),
        "scores_of_groups": None if found.group_scores is None else dataclasses.asdict(found.group_scores),
        "seconds": found.seconds,
        "settings": dataclasses.asdict(config) | {"n_components": found.n_start},
        "versions": {"siammm": __version__, "torch": str(torch.__version__), "numpy": np.__version__},
    }


def noted_of_table(found: Found, config: ClusterConfig) -> dict[str, Any]:
    """By what a table is found and known again; every rank must call this."""
    return {"path": table_path(config.data), "fingerprint": found.table.fingerprint(gathered)}


def table_path(data: str) -> str:
    """A table of embeddings as it is found from any folder."""
    return os.path.abspath(os.path.expanduser(data))


def noted_of_images(facts: dict[str, Any], data: str, encoder: dict[str, Any]) -> dict[str, Any]:
    """The same of images, by the ``facts`` by which ``unfinished_embeddings`` knows embeddings to be of the same."""
    return {
        "path": from_anywhere(data),
        "fingerprint": facts["images"],
        "files": facts["files"],
        "encoder": encoder | {"digest": facts["network"]},
        "set_aside": facts["set_aside"],
    }


def facts_of_images(folder: Path) -> dict[str, Any]:
    """These facts, as an earlier result noted them; empty if it noted none that can be read."""
    try:
        given = json.loads((folder / files.SUMMARY).read_text(encoding="utf-8"))["input"]
        facts = {"images": given["fingerprint"], "files": given["files"], "network": given["encoder"]["digest"]}
        return facts | {"set_aside": given.get("set_aside")}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """Write what ``summary_of`` gives into an existing folder."""
    text = json.dumps(summary, indent=2, allow_nan=False, default=str)
    (folder / files.SUMMARY).write_text(text + "\n", encoding="utf-8")
