"""``siammm.embed``: embeddings of images, in Python."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import siammm
from siammm.cli import main
from siammm.core.errors import InputError
from siammm.data.embeddings import read_embeddings
from tests.clustered import QUICK, N, four_kinds, write_photos
from tests.export.runs import trained_run

pytestmark = pytest.mark.usefixtures("one_thread", "here")


def test_it_gives_what_the_command_clusters(here: Path) -> None:
    write_photos(here)
    assert main(["cluster", "photos/", *QUICK, "--image-size", "32"]) == 0
    by_command = np.asarray(read_embeddings(Path("photos-clusters/embeddings.parquet")).embeddings)
    found = siammm.embed("photos/", image_size=32, device="cpu")
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, by_command, rtol=1e-5, atol=1e-5)


def test_arrays_and_runs(tmp_path: Path) -> None:
    pixels = four_kinds()
    run = trained_run(tmp_path)
    found = siammm.embed(pixels, str(run), device="cpu")
    assert len(found) == N
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(found, siammm.SiamMM.load(run, device="cpu").embed(pixels), atol=1e-5)


def test_what_is_refused(here: Path) -> None:
    write_photos(here)
    Path("photos/kind0/broken.png").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"broken\.png"):
        siammm.embed("photos/", image_size=32, device="cpu")
    with pytest.raises(InputError, match="did you mean lite"):
        siammm.embed("photos/", "lit", device="cpu")
