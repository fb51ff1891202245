"""One trained run for all."""

from __future__ import annotations

from pathlib import Path

import pytest

from siammm.runs.run import Run
from tests.export.runs import trained_run


@pytest.fixture(autouse=True)
def on_one_thread(one_thread: None) -> None:
    """Every test of exports is."""


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_run(tmp_path_factory.mktemp("exported"))


@pytest.fixture(scope="session")
def grouped_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, with ten clusters in fewer groups."""
    folder = trained_run(tmp_path_factory.mktemp("grouped"), "--merge-floor", "10")
    assert Run.open(folder).has_groups
    return folder
