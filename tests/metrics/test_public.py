"""What guides teach is exported, and importing the package alone stays light."""

from __future__ import annotations

import subprocess
import sys

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


def test_they_are_imported_when_first_used() -> None:
    code = "import sys, siammm; print('torch' in sys.modules, callable(siammm.metrics.knn_accuracy))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
