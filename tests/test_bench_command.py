"""``siammm bench``: what it takes, prints and writes, and what it refuses; and how soon the command answers at all."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from siammm.cli import main, parse
from siammm.commands.bench import REFERENCE, number
from siammm.settings.commands import BenchConfig

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def benched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The figures of one quick run, and what it printed."""
    import contextlib
    import io

    output = tmp_path_factory.mktemp("bench") / "here" / "figures.json"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "120")
        arguments = ["bench", "--preset", "demo", "--seconds", "2", "--device", "cpu", "--output", str(output)]
        assert main(arguments) == 0
    return output, printed.getvalue()


def test_it_prints_what_was_measured(benched: tuple[Path, str]) -> None:
    printed = benched[1]
    assert printed.splitlines()[-1] == "Next: siammm train photos/ --preset demo"
    for wanted in (
        "conv-small at 8 pixels", "images per second, full step", "without the cluster loss",
        "share of the device's peak",
        "its share of the epoch", "peak memory", "all 60 epochs, hours", "a large fp32 matrix product",
    ):  # fmt: skip
        assert wanted in printed, wanted


def test_it_writes_what_it_prints(benched: tuple[Path, str]) -> None:
    stored = json.loads(benched[0].read_text("utf-8"))
    (figures,) = stored["presets"]
    assert figures["preset"] == "demo"
    assert figures["batch_size"] == figures["preset_batch_size"] == 64
    assert figures["images_per_second"] > 0
    assert figures["epoch_seconds"] > figures["clustering_seconds"] > 0
    assert figures["clustering_scale"] >= 1
    assert stored["machine"]["peak_flops"] > 0
    assert sorted(path.name for path in benched[0].parent.iterdir()) == ["figures.json"]


def test_the_reference_is_the_one_of_the_docs() -> None:
    root = Path(__file__).parents[1]
    assert (root / REFERENCE["source"]).is_file()
    (row,) = [
        line for line in (root / "docs" / "speed.md").read_text("utf-8").splitlines() if REFERENCE["source"] in line
    ]
    for name in ("machine", "preset", "batch_size", "memory_gigabytes", "hours"):
        assert str(REFERENCE[name]) in row
    assert number(REFERENCE["images_per_second"]) in row


def test_an_earlier_file_is_kept(benched: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    before = benched[0].read_bytes()
    assert main(["bench", "--output", str(benched[0])]) == 2
    assert "exists; choose another --output, or add --overwrite." in capsys.readouterr().err
    assert benched[0].read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seconds", "0"], "--seconds is 0"),
        (["--batch-size", "1"], "--batch-size is 1"),
        (["--device", "tpu"], "The device 'tpu' is not available here"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1


def test_a_run_of_several_processes_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from siammm.core import processes

    context = processes.Context(rank=0, world_size=2, local_rank=0, device=torch.device("cpu"))
    monkeypatch.setattr(processes, "setup", lambda device: context)
    assert main(["bench"]) == 2
    assert "bench runs in one process, but 2 were started" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    arguments = ["bench", "--preset", "demo", "--seconds", "1", "--device", "cpu"]
    assert main([*arguments, "--output", str(tmp_path / "file" / "figures.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_help_answers_at_once() -> None:
    """1.5 s is asked for; a busy machine is given time. What matters is that torch is not imported."""
    code = "import sys, siammm.cli; siammm.cli.main(['--help']); sys.exit('torch' in sys.modules)"
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
    assert time.perf_counter() - started < 20


def test_defaults() -> None:
    config = parse(["bench"])
    assert isinstance(config, BenchConfig)
    assert config == BenchConfig()
