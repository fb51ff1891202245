"""``siammm cluster`` of images, stopped at random moments from outside and started again."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.nursery import Command, Nursery

N, STOPS = 96, 4
ROWS = Path("photos-clusters-unfinished/rows.npy")


def photos(folder: Path) -> None:
    (folder / "photos").mkdir()
    draw = np.random.default_rng(0)
    for number in range(N):
        pixels = draw.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((64, 48), Image.Resampling.BICUBIC).save(folder / f"photos/{number:03}.jpg")
    (folder / "photos" / "bad.jpg").write_bytes(b"no image")


def started(nursery: Nursery, folder: Path) -> Command:
    # At the encoder's own size a batch has 16 images.
    flags = ["--merge", "none", "--n-components", "3", "--device", "cpu", "--max-bad-images", "0.05"]
    return nursery.start(["cluster", "photos", *flags], cwd=folder, environment={"COLUMNS": "200"})


def n_rows(folder: Path) -> int:
    """Whole rows of the unfinished file."""
    try:
        size = (folder / ROWS).stat().st_size
    except FileNotFoundError:
        return 0
    return max(0, size - 128) // (4 * 1280)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_what_is_encoded_is_never_encoded_again(number: int, nursery: Nursery, tmp_path: Path) -> None:
    photos(tmp_path)
    moments, before = random.Random(int(number)), 0
    for stop in range(STOPS):
        command = started(nursery, tmp_path)
        while n_rows(tmp_path) <= before and command.is_running():
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.2))
        if command.is_running():
            command.signal(number)
        code = command.wait()
        if code == 0:
            break
        assert code == (130 if number == signal.SIGINT else -signal.SIGKILL), command.err
        if number == signal.SIGINT:
            assert "the same command continues from there" in command.err
        now = n_rows(tmp_path)
        assert now >= before
        before = now - now % 16  # of whole batches
        if stop == 0:  # a mark in the first row, which nobody would make again
            with (tmp_path / ROWS).open("r+b") as file:
                file.seek(128)
                file.write(np.float32(7.5).tobytes())
    command = started(nursery, tmp_path)
    assert command.wait() in (0, 2), command.err  # 2: the result was there already
    assert not (tmp_path / ROWS.parent).exists()
    table = pq.read_table(tmp_path / "photos-clusters" / "embeddings.parquet")
    assert len(table) == N
    assert table.column("embedding")[0].as_py()[0] == 7.5
    rows = np.stack(table.column("embedding").to_pylist())
    assert (np.abs(rows).sum(axis=1) > 0).all()
    facts = json.loads((tmp_path / "photos-clusters" / "summary.json").read_text())
    assert list(facts["input"]["set_aside"]) == ["bad.jpg"]
