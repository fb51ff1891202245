"""Selections that a person keeps in the folder of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from siammm.core.errors import InputError, StoredFileError
from siammm.runs.selections import LONGEST, Selections

IDS = ["a.jpg", "b.jpg", "c.jpg"]


def test_what_is_kept_is_read_again(tmp_path: Path) -> None:
    assert Selections(tmp_path, IDS).read() == {}
    Selections(tmp_path, IDS).keep("  two\nwords ", [2, 0, 2])
    assert Selections(tmp_path, IDS).keep("all", [0, 1, 2]) == {"two words": [0, 2], "all": [0, 1, 2]}
    assert Selections(tmp_path, IDS).read() == {"two words": [0, 2], "all": [0, 1, 2]}
    assert Selections(tmp_path, IDS).keep("all", []) == {"two words": [0, 2]}
    assert Selections(tmp_path, [*IDS, "d.jpg"]).read() == {}, "those of other images"


def test_what_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    kept = Selections(tmp_path, IDS)
    for name, images, sentence in (
        (" ", [0], "by its name"),
        ("x" * (LONGEST + 1), [0], "shorten it"),
        ("x", [3], "there is no image 3"),
        ("x", [-1], "there is no image -1"),
        ("x", ["a"], "has images that the run has not"),
        ("x", [None], "has images that the run has not"),
    ):
        with pytest.raises(InputError, match=sentence):
            kept.keep(name, images)
    assert not kept.path.exists()
    kept.path.write_text("{}")
    with pytest.raises(StoredFileError, match="remove it"):
        kept.read()
