"""What an audit writes: the table of suspects and the summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from siammm.audit.group_labels import GroupLabels
from siammm.audit.images import AuditedImages
from siammm.audit.suspects import Audit
from siammm.core.version import __version__
from siammm.settings.commands import AuditConfig


@dataclass(frozen=True, kw_only=True)
class Planted:
    """Labels that were made wrong to see whether they are found."""

    is_planted: np.ndarray
    """Which labels, of all images."""
    count: int
    found: int
    """How many of them are among as many first suspects."""

    @classmethod
    def of(cls, is_planted: np.ndarray, found: Audit) -> Planted:
        """Count the planted errors among the first suspects."""
        count = int(is_planted.sum())
        first = found.image_N[found.order[:count]]
        return cls(is_planted=is_planted, count=count, found=int(is_planted[first].sum()))

    @property
    def precision(self) -> float:
        """The share of these suspects that were planted, which is also the share of the planted that is found."""
        return self.found / self.count


def group_labels(images: AuditedImages, found: Audit) -> GroupLabels | None:
    """The labels of each group, if groups are known."""
    if images.groups is None or images.n_groups is None:
        return None
    return GroupLabels.of(images.groups[found.image_N], found.label_N, images.n_groups, len(found.classes))


def suspects_table(images: AuditedImages, found: Audit, planted: Planted | None) -> pa.Table:
    """One row per labelled image, the worst first."""
    order = found.order
    image = found.image_N[order]
    columns: dict[str, Any] = {
        "rank": found.rank_N[order],
        "id": images.ids[image],
        "label": _named(found.classes, found.label_N[order]),
        "suggested": _named(found.classes, found.suggested_N[order]),
        "probability": found.probability_N[order],
        "score": found.score_N[order],
        **{name: witness_N[order] for name, witness_N in found.witness_N.items()},
    }
    if images.clusters is not None:
        columns["cluster"] = images.clusters[image].astype(np.int32)
    groups = group_labels(images, found)
    if groups is not None:
        columns["group"] = groups.group_N[order].astype(np.int32)
        columns["group_label"] = _named(found.classes, groups.commonest_N[order])
        columns["group_disagrees"] = groups.disagrees_N[order]
    if planted is not None:
        columns["planted"] = planted.is_planted[image]
        columns["label_before"] = _named(images.classes, images.labels[image])
    return pa.table({name: pa.array(values) for name, values in columns.items()})


def _named(classes: Sequence[Any], codes: np.ndarray) -> list[Any]:
    return [classes[code] for code in codes.tolist()]


def summary(
    config: AuditConfig, images: AuditedImages, found: Audit, planted: Planted | None, seconds: dict[str, float]
) -> dict[str, Any]:
    """Everything about the audit as plain values."""
    return {
        "input": {
            "subject": str(config.subject),
            "data": images.name,
            "n_images": len(images.labels),
            "n_labelled": len(found.label_N),
            "n_unlabelled": found.n_unlabelled,
            "n_unreadable": images.n_unreadable,
        },
        "n_clusters": images.n_clusters,
        "n_groups": images.n_groups,
        "groups": _groups(images, found),
        "threshold": found.threshold,
        "n_suspects": found.n_suspects,
        "error_rate": found.error_rate,
        "classes": [
            {"label": name, "n": int(n), "suspects": int(few), "error_rate": float(rate)}
            for name, n, few, rate in zip(
                found.classes, found.count_C, found.suspects_C, found.error_rate_C, strict=True
            )
        ],
        "noise": found.noise,
        "weights": dict(found.weights),
        "planted": None
        if planted is None
        else {"count": planted.count, "found": planted.found, "precision": planted.precision},
        "seconds": {step: round(value, 3) for step, value in seconds.items()},
        "settings": asdict(config),
        "versions": {"siammm": __version__, "torch": str(torch.__version__), "numpy": np.__version__},
    }


def _groups(images: AuditedImages, found: Audit) -> dict[str, Any] | None:
    """How the labels go with the groups."""
    groups = group_labels(images, found)
    if groups is None:
        return None
    listed = zip(groups.count_G.tolist(), groups.commonest_G.tolist(), groups.purity_G.tolist(), strict=True)
    return {
        "disagree": int(groups.disagrees_N.sum()),
        "suspects_disagree": int(groups.disagrees_N[found.probability_N < found.threshold].sum()),
        "labels": [
            {"group": group, "n": n, "label": found.classes[label] if n else None, "purity": purity}
            for group, (n, label, purity) in enumerate(listed)
        ],
    }
