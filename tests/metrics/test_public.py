"""What guides teach is exported."""

from __future__ import annotations

import siammm
import siammm.audit
import siammm.metrics


def test_metrics_and_audit_are_public_names() -> None:
    assert {"audit", "metrics"} <= set(siammm.__all__)
    for name in ("knn_accuracy", "linear_accuracy", "clustering_scores", "k_means", "average_precision", "svm_map"):
        assert name in siammm.metrics.__all__
    for package in (siammm.metrics, siammm.audit):
        assert all(hasattr(package, name) for name in package.__all__)
    assert set(siammm.audit.__all__) == {"Audit", "audit", "plant_errors"}
