"""The run folder: made once, read back as it was written, whole whenever the machine goes down."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from siammm.core.errors import InputError, StoredFileError
from siammm.runs import files as run
from siammm.runs.records import read_metrics
from siammm.runs.run import Run
from tests.learn.small_runs import small_config
from tests.runs.parts import begun


def test_what_is_opened_is_what_was_created(tmp_path: Path) -> None:
    config = small_config(data="photos", output=tmp_path / "run")
    begun(tmp_path / "deep" / "run", config, {"fingerprint": "abc", "n_images": 3})
    found = Run.unfinished(tmp_path / "deep" / "run")
    assert found.config == config
    assert found.facts == {"fingerprint": "abc", "n_images": 3}
    assert [path.name for path in found.path.iterdir()] == [run.CONFIG]


def test_an_earlier_run_is_replaced_only_if_asked(tmp_path: Path) -> None:
    first = begun(tmp_path / "run", small_config())
    first.add_metrics({"epoch": 1, "loss": 2.0})
    with pytest.raises(InputError, match="--overwrite"):
        begun(tmp_path / "run", small_config())
    assert read_metrics(first.path) == [{"epoch": 1, "loss": 2.0}]
    for name in ("names.json", "selections.json"):
        (first.path / name).write_text("somebody's")
    second = begun(tmp_path / "run", small_config(overwrite=True))
    assert read_metrics(second.path) == []
    for name in ("names.json", "selections.json"):
        assert (first.path / name).read_text() == "somebody's", "what a person has made stays"


def test_metrics_are_lines_of_json(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", small_config())
    rows: list[dict[str, Any]] = [{"epoch": epoch, "loss": 1 / 3 + epoch, "n_clusters": 7} for epoch in (1, 2, 3)]
    for row in rows:
        folder.add_metrics(row)
    assert read_metrics(folder.path) == rows  # to the last bit
    assert (folder.path / run.METRICS).read_text().count("\n") == 3
    folder.truncate_metrics(2)
    assert read_metrics(folder.path) == rows[:2]


def test_a_line_that_was_being_written_is_left_out(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", small_config())
    (folder.path / run.METRICS).write_text('{"epoch": 1}\n{"epoch": 2, "lo')
    assert read_metrics(folder.path) == [{"epoch": 1}]


@pytest.mark.parametrize("text", ["", "[]", "5", '"text"', "{}", '{"settings": {"unheard_of": 1}}'])
def test_a_damaged_config_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / run.CONFIG).write_text(text)
    with pytest.raises(StoredFileError, match=r"config\.json"):
        _ = Run.unfinished(tmp_path).config


def test_tensorboard_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    folder = begun(tmp_path / "run", small_config(tensorboard=True))
    for epoch in (1, 2):
        folder.add_metrics({"epoch": epoch, "loss": 1.0})
    folder.close()
    assert sorted(path.name for path in folder.path.iterdir()) == [run.CONFIG, run.METRICS]


def test_tensorboard_gets_every_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[Any, ...]] = []

    class Writer:
        def __init__(self, path: str, purge_step: int) -> None:
            written.append(("opened", Path(path).name, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def flush(self) -> None: ...

        def close(self) -> None:
            written.append(("closed",))

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    folder = begun(tmp_path / "run", small_config(tensorboard=True))
    folder.add_metrics({"epoch": 1, "loss": 2.0, "n_clusters": 5})
    folder.tensorboard = False
    folder.add_metrics({"epoch": 2, "loss": 1.0})
    folder.tensorboard = True
    folder.add_metrics({"epoch": 3, "loss": 0.5})
    folder.close()
    folder.close()
    assert written == [
        ("opened", "tensorboard", 1), ("loss", 2.0, 1), ("n_clusters", 5, 1), ("loss", 0.5, 3), ("closed",),
    ]  # fmt: skip
    assert len(json.loads(f"[{','.join((folder.path / run.METRICS).read_text().splitlines())}]")) == 3
