"""``siammm train``: what it takes, what it leaves, how it stops and goes on, and what it refuses."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console

import siammm
from siammm.cli import main, parse
from siammm.commands.train_messages import announce
from siammm.core import processes
from siammm.data.sources import open_source
from siammm.learn.progress import TrainingProgress
from siammm.runs.run import Run
from siammm.settings.fields import with_settings
from siammm.settings.presets import PRESETS
from siammm.settings.training import TrainConfig
from tests.commands import TINY as SETTINGS
from tests.data.image_sets import example_images, write_folder, write_npz
from tests.learn.small_runs import TIMINGS
from tests.nursery import Nursery

LEFT = [
    "assignments.parquet", "checkpoints", "config.json", "embeddings.npy", "encoder.safetensors",
    "inventory.parquet", "merges.json", "metrics.jsonl", "mixture.safetensors",
]  # fmt: skip


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of 48 images in four classes, in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    return write_folder(Path(), example_images(48, size=(8, 8), n_classes=4))


def metrics(folder: str | Path) -> list[dict[str, Any]]:
    """What was measured, but for the clock."""
    rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in TIMINGS} for row in rows]


# -- flags


def test_values_are_parsed() -> None:
    config = parse(["train", "photos", "--epochs", "7", "--concentration-scale", "literal", "--output", "a/b"])
    assert isinstance(config, TrainConfig)
    assert (config.data, config.output) == ("photos", Path("a/b"))
    assert (config.optimisation.epochs, config.objective.concentration_scale) == (7, "literal")
    assert parse(["train", "x"]) == dataclasses.replace(PRESETS["cifar"], data="x")


def test_other_flags_start_from_the_preset() -> None:
    config = parse(["train", "x", "--epochs", "7", "--preset=imagenet-200"])
    assert isinstance(config, TrainConfig)
    assert config.optimisation.epochs == 7
    assert config.optimisation.batch_size == PRESETS["imagenet-200"].optimisation.batch_size == 4096


# -- what it leaves


def test_the_run_folder(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(images), *SETTINGS]) == 0
    printed = capsys.readouterr()
    folder = Path("images-run")
    assert sorted(path.name for path in Path().iterdir()) == ["images", "images-run"]
    assert sorted(path.name for path in folder.iterdir()) == LEFT
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["last.safetensors"]
    shown = " ".join(printed.out.split())
    for text in (
        "conv-small",
        "48 images",
        "8 x 8",
        "with labels, used only for evaluation",
        "clusters",
        "AMI",
        "images-run",
    ):
        assert text in shown
    assert "epoch 2 of 2" in printed.err

    facts = json.loads((folder / "config.json").read_text())
    assert facts["settings"]["optimisation"]["epochs"] == 2
    assert (facts["n_images"], facts["kind"]) == (48, "folder")
    assert len(facts["fingerprint"]) == 64
    assert facts["versions"].keys() == {"siammm", "torch", "numpy"}

    rows = metrics(folder)
    assert [row["epoch"] for row in rows] == [1, 2]
    assert {"loss", "instance_loss", "cluster_loss", "n_clusters", "effective_rank", "knn", "ami"} <= rows[-1].keys()

    mixture = siammm.VonMisesFisherMixture.load(folder / "mixture.safetensors")
    table = pq.read_table(folder / "assignments.parquet")
    assert table.column_names == [
        "id",
        "cluster",
        "group",
        "probability",
        "group_probability",
        "outlier_score",
        "label",
    ]
    assert table.column("id").to_pylist()[0] == "class000/00000.png"
    assert set(table.column("label").to_pylist()) == {f"class{number:03d}" for number in range(4)}
    assert table.column("cluster").to_numpy().max() < mixture.n_components_

    merges = json.loads((folder / "merges.json").read_text())
    assert merges["n_clusters_by_epoch"] == [[row["epoch"], row["n_clusters"]] for row in rows]
    assert len(merges["linkage"]) == 9
    assert merges["n_components"][0] == 10
    assert merges["n_components"][-1] == mixture.n_components_


def test_the_encoder_that_is_left_makes_the_embeddings_that_were_clustered(images: Path) -> None:
    assert main(["train", str(images), *SETTINGS, "--output", "out"]) == 0
    run = Run.open("out")
    network, view = run.network, run.view
    assert (run.config.network.hidden_dim, view.size) == (32, 8)
    from siammm.data.loader import open_loader
    from siammm.data.sources import open_source
    from siammm.learn.encode import encode

    loader = open_loader(open_source(images), (view, view), torch.device("cpu"), seed=0)
    mixture = siammm.VonMisesFisherMixture.load("out/mixture.safetensors")
    clusters = pq.read_table("out/assignments.parquet").column("cluster").to_numpy()
    np.testing.assert_array_equal(mixture.predict(encode(network, loader, "embeddings").numpy()), clusters)


@pytest.mark.parametrize(("batch", "few"), [("4", False), ("8", True), ("256", False)])
def test_an_epoch_of_few_updates_is_remarked_on(batch: str, few: bool, tmp_path: Path, capsys: Any) -> None:
    """Unless the batch size is that of the preset, which was chosen for such sets."""
    np.save(tmp_path / "x.npy", example_images(40, size=(8, 8)).images)
    words = ["train", str(tmp_path / "x.npy"), *SETTINGS, "--epochs", "1", "--output", str(tmp_path / "o")]
    assert main([*words, "--batch-size", batch]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert (f"With --batch-size {batch} an epoch is less than 10 updates; use a smaller batch size" in printed) == few


@pytest.mark.parametrize(("settings", "is_slow"), [({}, True), ({"backbone": "conv-small"}, False)])
def test_without_a_gpu_the_quicker_command_comes_first(settings: dict[str, Any], is_slow: bool, images: Path) -> None:
    config = with_settings(TrainConfig(data="my photos/"), **settings)
    stream = io.StringIO()
    with processes.setup("cpu") as context:
        announce(config, open_source(str(images)), context, Console(file=stream, width=1000))
    assert ("`siammm cluster 'my photos/'` finds the groups in minutes" in stream.getvalue()) == is_slow
    assert ("`siammm train 'my photos/' --preset laptop`" in stream.getvalue()) == is_slow


def test_without_clusters_there_is_no_mixture(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(images), *SETTINGS, "--cluster-loss", "none", "--epochs", "1"]) == 0
    left = sorted(path.name for path in Path("images-run").iterdir())
    assert left == ["checkpoints", "config.json", "encoder.safetensors", "inventory.parquet", "metrics.jsonl"]
    printed = capsys.readouterr().out
    assert "Everything is in images-run" in printed
    assert printed.splitlines()[-1] == "Next: siammm evaluate images-run"


def test_without_labels_nothing_is_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "x.npy", example_images(48, size=(8, 8)).images)
    assert main(["train", str(tmp_path / "x.npy"), *SETTINGS, "--epochs", "1", "--output", str(tmp_path / "o")]) == 0
    assert "without labels" in " ".join(capsys.readouterr().out.split())
    assert pq.read_table(tmp_path / "o" / "assignments.parquet").column_names[-1] == "outlier_score"
    assert "knn" not in metrics(tmp_path / "o")[0]


def test_a_probe_is_measured_on(images: Path, tmp_path: Path) -> None:
    probe = write_npz(tmp_path, example_images(24, size=(8, 8), n_classes=4, seed=9))
    assert main(["train", str(images), *SETTINGS, "--epochs", "1", "--probe", str(probe)]) == 0
    assert 0 <= metrics("images-run")[0]["knn"] <= 1


def test_images_that_cannot_be_read_are_listed(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (images / "class001" / "00013.png").write_bytes(b"damaged")
    arguments = ["train", str(images), *SETTINGS, "--epochs", "1"]
    assert main(arguments) == 2
    assert "1 of 48 images" in capsys.readouterr().err
    assert not Path("images-run").exists()
    assert main([*arguments, "--max-bad-images", "0.1"]) == 0
    listed = json.loads(Path("images-run/set_aside.json").read_text())
    assert [entry["image"] for entry in listed["set_aside"]] == ["class001/00013.png"]
    assert "1 image could not be read" in capsys.readouterr().out
    assert len(pq.read_table("images-run/assignments.parquet")) == 47


def test_the_same_seed_leaves_the_same_run(images: Path) -> None:
    for output in ("one", "two"):
        assert main(["train", str(images), *SETTINGS, "--output", output]) == 0
    assert metrics("one") == metrics("two")
    for name in ("assignments.parquet", "mixture.safetensors", "encoder.safetensors", "merges.json"):
        if name == "encoder.safetensors":  # its header holds the name of the output
            continue
        assert Path("one", name).read_bytes() == Path("two", name).read_bytes(), name


# -- stopping and going on


def stop_after(monkeypatch: pytest.MonkeyPatch, epoch: int, step: int, *signals: int) -> None:
    """Send this process the signals when so much is done, once."""
    pending = list(signals)
    plain = TrainingProgress.stepped

    def stepped(self: TrainingProgress, now: int, done: int, steps: int) -> None:
        plain(self, now, done, steps)
        if (now, done) == (epoch, step):
            while pending:
                signal.raise_signal(pending.pop(0))

    monkeypatch.setattr(TrainingProgress, "stepped", stepped)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_the_run_can_be_resumed(
    number: int, code: int, images: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(images), *SETTINGS, "--output", "whole"]) == 0
    before = signal.getsignal(number)
    stop_after(monkeypatch, 1, 2, number)
    assert main(["train", str(images), *SETTINGS, "--output", "a run"]) == code
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == ("siammm: stopped in epoch 2 of 2, and saved; continue with: siammm train --resume 'a run'")
    assert signal.getsignal(number) is before
    assert len(metrics("a run")) == 1
    assert not Path("a run/mixture.safetensors").exists()
    assert main(["train", "--resume", "a run", "--device", "cpu"]) == 0
    assert metrics("a run") == metrics("whole")
    assert sorted(path.name for path in Path("a run").iterdir()) == LEFT
    for name in ("assignments.parquet", "mixture.safetensors", "merges.json"):
        assert Path("a run", name).read_bytes() == Path("whole", name).read_bytes(), name


def test_a_second_interrupt_stops_at_once(
    images: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stop_after(monkeypatch, 0, 2, signal.SIGINT, signal.SIGINT)
    assert main(["train", str(images), *SETTINGS]) == 130
    assert capsys.readouterr().err.endswith("siammm: interrupted.\n")


def test_as_a_process_that_is_terminated(nursery: Nursery, images: Path) -> None:
    """The real thing: SIGTERM at some moment, exit code 143, and the same losses as without it at the end."""
    arguments = [*SETTINGS, "--epochs", "8"]
    process = nursery.start(["train", str(images), *arguments, "--output", "run"], cwd=Path())
    deadline = time.monotonic() + 60
    while not Path("run/metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.signal(signal.SIGTERM)
    assert process.wait() == 143, process.err
    assert "Traceback" not in process.err
    assert process.err.splitlines()[-1].endswith("continue with: siammm train --resume run")
    assert 1 <= len(metrics("run")) < 8
    assert main(["train", "--resume", "run"]) == 0
    assert main(["train", str(images), *arguments, "--output", "whole"]) == 0
    assert metrics("run") == metrics("whole")


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images and a run on them that was stopped in its first epoch."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        images = write_folder(Path(), example_images(48, size=(8, 8), n_classes=4))
        stop_after(patch, 0, 2, signal.SIGTERM)
        assert main(["train", str(images), *SETTINGS, "--output", "run"]) == 143
    return folder


@pytest.fixture
def begun(stopped_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run that was stopped, moved with its images into the working folder."""
    shutil.copytree(stopped_once, tmp_path, dirs_exist_ok=True)
    config = tmp_path / "run" / "config.json"
    config.write_text(config.read_text().replace(str(stopped_once.resolve()), str(tmp_path.resolve())))
    monkeypatch.chdir(tmp_path)
    return Path("run")


def test_data_may_have_moved(begun: Path) -> None:
    Path("images").rename("elsewhere")
    assert main(["train", "elsewhere", "--resume", str(begun)]) == 0
    assert len(metrics("run")) == 2


def test_large_photographs_are_shrunken_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "photos", example_images(24, size=(270, 360), n_classes=2))
    tiny = ["--preset", "demo", "--image-size", "8", "--augmentation", "32", "--epochs", "1", "--batch-size", "8"]
    more = ["--n-components", "4", "--workers", "0", "--device", "cpu", "--image-cache", "small"]
    assert main(["train", "photos", *tiny, *more, "--output", "one"]) == 0
    copies = sorted(Path("small").rglob("*.jpg"))
    assert len(copies) == 24
    before = [path.stat().st_mtime_ns for path in copies]
    assert main(["train", "photos", *tiny, *more, "--output", "two"]) == 0
    assert [path.stat().st_mtime_ns for path in sorted(Path("small").rglob("*.jpg"))] == before
    losses = [json.loads(Path(name, "metrics.jsonl").read_text())["loss"] for name in ("one", "two")]
    assert losses[0] == losses[1]
    assert "--image-cache" not in capsys.readouterr().out
    assert main(["train", "photos", *tiny, *more[:-2], "--output", "without"]) == 0
    assert "much larger" in capsys.readouterr().out
    write_folder(tmp_path / "small-photos", example_images(24, size=(24, 30), n_classes=2))
    assert main(["train", "small-photos", *tiny, *more[:-2], "--output", "small-run"]) == 0
    assert "--image-cache" not in capsys.readouterr().out, "copies of so small images gain nothing"
    Path("file").write_text("no folder")
    for wrong in ("photos/copies", "photos", "file"):
        assert main(["train", "photos", *tiny, *more[:-1], wrong, "--output", "three"]) == 2
        assert not Path("three").exists()
    assert not Path("photos/copies").exists()


def test_a_run_is_resumed_from_any_folder(begun: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert main(["train", "--resume", f"../{begun}"]) == 0


@pytest.mark.parametrize(
    ("flags", "before"),
    [
        ("--batch-size 24", "12"), ("--n-components 9", "10"), ("--output other", "run"), ("--random-state 1", "0"),
        ("--loader streaming", "auto"),
    ],
)  # fmt: skip
def test_a_resumed_run_refuses_other_settings(
    flags: str, before: str, begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = {path: path.read_bytes() for path in begun.rglob("*") if path.is_file()}
    assert main(["train", "--resume", "run", *flags.split()]) == 2
    error = capsys.readouterr().err
    flag, given = flags.split()
    assert f"{flag} cannot be changed by --resume ({before} in the run, {given} given)" in error
    assert error.count("\n") == 1
    assert {path: path.read_bytes() for path in begun.rglob("*") if path.is_file()} == contents


def test_a_run_may_become_longer(begun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for epochs in (4, 5):  # the second time from its end
        assert main(["train", "--resume", "run", "--epochs", str(epochs), "--learning-rate", "0.05"]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert f"--epochs from {epochs - 1 if epochs == 5 else 2} to {epochs}" in printed
        assert "the result differs from that of a run that was started with these settings" in printed
        assert [row["epoch"] for row in metrics("run")] == list(range(1, epochs + 1))
        stored = json.loads((begun / "config.json").read_text())
        assert stored["settings"]["optimisation"]["epochs"] == epochs
    assert [list(change["epochs"]) for change in stored["changes"]] == [[2, 4], [4, 5]]
    assert len(Run.open("run").metrics) == 5
    assert main(["train", "--resume", "run", "--epochs", "3"]) == 2
    assert "--epochs is 3, but the run is already in epoch 5" in capsys.readouterr().err


def test_clusters_begin_when_they_would_have(begun: Path) -> None:
    """At a quarter of two epochs, which is at once; a quarter of 40 epochs would be in the eleventh."""
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 1, 1, signal.SIGTERM)
        assert main(["train", "--resume", "run", "--epochs", "40"]) == 143
    assert "cluster_loss" in metrics("run")[0]


def test_a_resumed_run_may_be_given_its_own_settings_again(begun: Path) -> None:
    assert main(["train", "images", *SETTINGS, "--output", "run", "--resume", str(begun), "--save-every", "1"]) == 0


def test_a_resumed_run_refuses_other_images(begun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_npz(tmp_path, example_images(48, size=(8, 8), n_classes=4, seed=5))
    assert main(["train", str(other), "--resume", str(begun)]) == 2
    assert "does not contain the images that run was trained on" in capsys.readouterr().err
    next(iter(sorted(Path("images").rglob("*.png")))).unlink()
    assert main(["train", "--resume", str(begun)]) == 2
    assert "does not contain the images" in capsys.readouterr().err


def test_a_run_without_a_checkpoint_is_refused(begun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (begun / "checkpoints" / "last.safetensors").unlink()
    assert main(["train", "--resume", str(begun)]) == 2
    assert "There is no checkpoint in run/checkpoints" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{}", "5", '{"settings": 3}', '{"settings": {"unheard_of": 1}}', "{"])
def test_a_damaged_config_is_refused(text: str, begun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (begun / "config.json").write_text(text)
    assert main(["train", "--resume", str(begun)]) == 2
    error = capsys.readouterr().err
    assert "config.json" in error
    assert error.count("\n") == 1


def test_a_folder_that_is_no_run_is_refused(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, sentence in (
        (str(images), "is not a run folder"),
        ("missing", "missing does not exist; give the folder"),
    ):
        assert main(["train", "--resume", path]) == 2
        assert sentence in capsys.readouterr().err


# -- refusals


def test_an_existing_folder_is_refused(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(images), *SETTINGS, "--epochs", "1"]) == 0
    before = Path("images-run/config.json").read_bytes()
    assert main(["train", str(images), *SETTINGS, "--epochs", "2"]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert Path("images-run/config.json").read_bytes() == before
    assert main(["train", str(images), *SETTINGS, "--epochs", "2", "--overwrite"]) == 0
    assert len(metrics("images-run")) == 2


def test_a_folder_with_something_else_is_never_replaced(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(images), *SETTINGS, "--output", "images", "--overwrite"]) == 2
    assert "not replaced" in capsys.readouterr().err
    assert len(list(images.rglob("*.png"))) == 48


REFUSED: dict[str, tuple[list[str], str]] = {
    "no data": ([], "There is nothing to train on"),
    "a path that is not there": (["missing"], "missing"),
    "no epochs": (["images", "--epochs", "0"], "--epochs is 0, but it must be at least 1"),
    "a batch of one": (["images", "--batch-size", "1"], "--batch-size is 1"),
    "a rate below 0": (["images", "--learning-rate", "-1"], "--learning-rate is -1.0"),
    "a rate that is none": (["images", "--learning-rate", "nan"], "--learning-rate is nan"),
    "no temperature": (["images", "--temperature", "0"], "--temperature is 0"),
    "momentum above 1": (["images", "--encoder-momentum", "1.5"], "--encoder-momentum is 1.5, but it must be from 0"),
    "no share": (["images", "--merge-share", "0"], "--merge-share is 0"),
    "a share above 1": (["images", "--max-bad-images", "2"], "--max-bad-images is 2"),
    "a threshold that is none": (["images", "--merge-threshold", "nan"], "--merge-threshold is nan"),
    "no neighbours": (["images", "--n-neighbours", "0"], "--n-neighbours is 0"),
    "too many clusters": (["images", "--n-components", "49"], "--n-components is 49"),
    "no clusters": (["images", "--n-components", "0"], "--n-components is 0"),
    "no loss": (["images", "--instance-loss", "none", "--cluster-loss", "none"], "nothing to learn"),
    "nothing before the clusters": (
        ["images", "--instance-loss", "none", "--cluster-after", "0.5"],
        "--cluster-after is 0.5",
    ),
    "a negative seed": (["images", "--random-state", "-1"], "--random-state is -1"),
    "no such backbone": (["images", "--backbone", "resnet999"], "resnet999"),
    "no such device": (["images", "--device", "abacus"], "abacus"),
    "too many parts": (["images", "--accumulate", "30"], "fewer than 2 images a part"),
    "a probe that is not there": (["images", "--probe", "missing"], "missing"),
    "a probe without labels": (["images", "--probe", "plain.npy"], "has no labels"),
    "an image of no pixels": (["images", "--image-size", "0"], "--image-size is 0"),
    "a view of no pixels": (["images", "--view-size", "0"], "--view-size is 0"),
    "an image key in a folder": (["images", "--image-key", "pixels"], "pixels"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_one_sentence_and_leaves_nothing(
    name: str, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, says = REFUSED[name]
    np.save("plain.npy", example_images(48, size=(8, 8)).images)
    assert main(["train", *SETTINGS, *given]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.startswith("siammm: ")
    assert (error.count("\n"), "Traceback" in error) == (1, False)
    assert sorted(path.name for path in Path().iterdir()) == ["images", "plain.npy"]


def test_a_wrong_setting_does_not_cost_an_earlier_run(images: Path) -> None:
    assert main(["train", str(images), *SETTINGS, "--epochs", "1"]) == 0
    before = {path.name for path in Path("images-run").iterdir()}
    for flags in (["--n-components", "49"], ["--backbone", "resnet999"], ["--accumulate", "30"]):
        assert main(["train", str(images), *SETTINGS, "--overwrite", *flags]) == 2
    assert {path.name for path in Path("images-run").iterdir()} == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "x", "--preset", "enormous"],
        ["train", "x", "--instance-loss", "some"],
        ["train", "x", "--epochs", "many"],
        ["train", "x", "--frobnicate"],
    ],
)
def test_wrong_arguments_end_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_collapse_is_one_sentence(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--learning-rate", "1e30", "--warmup-epochs", "0", "--optimiser", "sgd", "--epochs", "6"]
    assert main(["train", str(images), *SETTINGS, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("siammm: The ")
    assert "--learning-rate" in error.splitlines()[-1]
    assert "Traceback" not in error
