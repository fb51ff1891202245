"""``siammm export`` on a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from siammm.runs import files
from tests.conftest import needs_command_line

pytestmark = pytest.mark.gpu


@needs_command_line
def test_on_a_gpu_it_is_the_same(here: Path) -> None:
    """Convolutions are not rounded to 10 bits, or clusters and outliers would differ from those of other tools."""
    from siammm.cli import main
    from tests.export.runs import trained_run

    made = trained_run(here)
    for device in ("cpu", "cuda"):
        command = ["export", str(made), "--output", device, "--device", device, "--formats", "encoder", "tables"]
        assert main(command) == 0
    cpu, gpu = (pq.read_table(here / device / files.IMAGES_TABLE) for device in ("cpu", "cuda"))
    rows = [np.stack(table.column("embedding").to_pylist()) for table in (cpu, gpu)]
    np.testing.assert_allclose(rows[1], rows[0], atol=1e-5)
    assert gpu.column("cluster").to_pylist() == cpu.column("cluster").to_pylist()
    assert (here / "cuda" / files.TIMM_WEIGHTS).read_bytes() == (here / "cpu" / files.TIMM_WEIGHTS).read_bytes()
