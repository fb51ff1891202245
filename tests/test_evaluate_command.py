"""``siammm evaluate`` and ``siammm compare``: what they take, what they write, and how they end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from siammm.cli import main, parse
from siammm.data.sources import open_source
from siammm.learn.backbones import build_backbone
from siammm.runs.evaluation import read_evaluation
from siammm.settings.commands import CompareConfig, EvaluateConfig
from tests.data.image_sets import encoded, example_images, write_folder, write_npz
from tests.test_train_command import SETTINGS

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on 80 images of four classes, which lie beside it."""
    folder = tmp_path_factory.mktemp("evaluate")
    images = write_npz(folder, example_images(80, size=(8, 8), n_classes=4))
    assert main(["train", str(images), "--output", str(folder / "run"), *SETTINGS]) == 0
    return folder / "run"


def evaluate(*arguments: object) -> int:
    return main(["evaluate", *map(str, arguments), "--device", "cpu"])


# -- flags


def test_values_are_parsed() -> None:
    config = parse(["evaluate", "r", "--protocols", "knn", "k", "--seeds", "1", "2", "--k-means", "10", "25000"])
    assert isinstance(config, EvaluateConfig)
    assert (config.subject, config.protocols, config.seeds) == ("r", ("knn", "k"), (1, 2))
    assert config.k_means == (10, 25_000)
    assert parse(["evaluate", "r"]) == EvaluateConfig(subject="r")
    assert parse(["compare", "a", "b"]) == CompareConfig(evaluations=(Path("a"), Path("b")))


# -- runs


def test_a_run_on_its_own_images(run: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(run, "--seeds", "0", "1") == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    for text in ("72 training and 8 test images", "it saw them", "k = 200, T = 0.07", "AMI", "±", "Weighted vote"):
        assert text in " ".join(printed.out.split())
    assert [path.name for path in Path("run-evaluation").iterdir()] == ["evaluation.json"]
    plain = json.loads(Path("run-evaluation/evaluation.json").read_text())
    assert [result["protocol"] for result in plain["results"]] == ["knn", "linear", "clustering", "k"]
    assert all(result["recipe"] for result in plain["results"])
    assert plain["seeds"] == [0, 1]
    assert plain["data"]["split"] == {"kind": "held out", "share": 0.1, "seed": 0}
    assert (plain["test_images"]["seen"], plain["test_images"]["clustered"]) == (True, True)
    assert plain["subject"]["trained_on"]["fingerprint"] == open_source(run.parent / "images.npz").fingerprint()
    assert {"date", "command", "commit", "versions", "machine"} <= plain["environment"].keys()
    found = read_evaluation(Path("run-evaluation"))
    knn, linear, clustering, k = found.results
    assert knn.figures["top-1, k = 20, T = 0.1"].mean > 0.8
    assert len(linear.figures["top-1"].values) == 2
    assert clustering.figures["mixture, train: AMI"].deviation is None  # the run's own clusters have no chance in them
    assert len(clustering.figures["k-means 4, train: AMI"].values) == 2
    assert k.figures["classes"].mean == 4
    assert [row["epoch"] for row in k.detail["curve"]] == [1, 2]


def test_the_mixture_gives_the_clusters_that_the_run_wrote(run: Path, here: Path) -> None:
    import pyarrow.parquet as pq

    from siammm.metrics.clustering import clustering_scores

    images = run.parent / "images.npz"
    assert evaluate(run, "--data", images, "--test", images, "--protocols", "clustering") == 0
    written = pq.read_table(run / "assignments.parquet")
    scores = clustering_scores(written.column("label").to_pylist(), written.column("cluster").to_numpy())
    found = read_evaluation(Path("run-evaluation"))
    figures = found.results[0].figures
    assert figures["mixture, train: AMI"].mean == pytest.approx(scores.ami)
    assert figures["mixture, test: majority"].mean == pytest.approx(scores.majority_accuracy)
    assert found.test_images["in_train"] == 80
    assert found.test_images["seen"] is True


def test_other_test_images_are_unseen(run: Path, here: Path) -> None:
    test = write_folder(here, example_images(20, size=(8, 8), n_classes=4, seed=0))
    other = example_images(40, size=(8, 8), n_classes=4, seed=1)
    np.savez("other.npz", images=other.images, labels=other.labels, names=np.array(other.names))
    assert evaluate(run, "--test", "other.npz", "--protocols", "knn") == 0
    found = read_evaluation(Path("run-evaluation"))
    assert (found.test_images["seen"], found.test_images["clustered"], found.test_images["in_train"]) == (
        False,
        False,
        0,
    )
    assert found.data["split"] == {"kind": "given"}
    assert evaluate(run, "--data", test, "--test", "other.npz", "--protocols", "knn", "--overwrite") == 0


def test_training_protocols_on_a_run(run: Path, here: Path) -> None:
    other = example_images(40, size=(8, 8), n_classes=4, seed=3)
    np.savez("other.npz", images=other.images, labels=other.labels)
    arguments = ["--protocols", "linear-paper", "semi", "transfer", "--transfer", "other.npz", "--epochs", "2"]
    assert evaluate(run, *arguments, "--label-shares", "0.1", "0.5", "--batch-size", "16") == 0
    paper, semi, transfer = read_evaluation(Path("run-evaluation")).results
    assert paper.settings["training"]["epochs"] == 2
    assert paper.settings["training"]["learning_rate"] == 0.1
    assert "seed" not in paper.settings["training"]
    assert list(semi.figures) == ["10 %: top-1", "50 %: top-1"]
    assert semi.settings["10 %"]["batch_size"] == 16
    assert 0 <= transfer.figures["top-1"].mean <= 1
    assert transfer.detail["training"]["n_train"] == 36


def test_labels_from_a_list_of_files(run: Path, here: Path) -> None:
    images = run.parent / "images.npz"
    Path("few.txt").write_text("\n".join(str(row) for row in range(0, 80, 5)))
    arguments = ["--data", images, "--test", images, "--protocols", "semi", "--epochs", "1"]
    assert evaluate(run, *arguments, "--label-lists", "few.txt") == 0
    result = read_evaluation(Path("run-evaluation")).results[0]
    assert list(result.figures) == ["few: top-1"]
    assert result.detail["few"]["n_train"] == 16


Objects = list[tuple[int, bool]]
"""The classes that an annotation names, by number, and whether each is a difficult one."""


def write_voc(root: Path, names: list[str], splits: dict[str, list[tuple[set[int], Objects]]]) -> Path:
    """Pictures with a bright patch for each class that they show, in its colour and at its place, and annotations."""
    rng = np.random.default_rng(0)
    colours = np.array([[220, 60, 60], [60, 220, 60], [60, 60, 220]])
    for part in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (root / part).mkdir(parents=True, exist_ok=True)
    for split, images in splits.items():
        listed = [f"{split}{i:03d}" for i in range(len(images))]
        (root / "ImageSets" / "Main" / f"{split}.txt").write_text("\n".join(listed))
        for name, (shown, objects) in zip(listed, images, strict=True):
            pixels = rng.integers(0, 60, (24, 24, 3), dtype=np.uint8)
            for label in shown:
                pixels[2:22, 8 * label + 1 : 8 * label + 7] = colours[label]
            (root / "JPEGImages" / f"{name}.jpg").write_bytes(encoded(pixels, "JPEG", quality=95))
            things = "".join(
                f"<object><name>{names[label]}</name><difficult>{int(difficult)}</difficult></object>"
                for label, difficult in objects
            )
            (root / "Annotations" / f"{name}.xml").write_text(f"<annotation>{things}</annotation>")
    return root


@pytest.mark.parametrize("names", [["red", "green", "blue"], ["cat", "dog", "bird"]])
def test_voc(names: list[str], run: Path, here: Path) -> None:
    """Images of no, one, two and three classes; and difficult objects, which count neither way.

    Two of these are plain to see, and would be false alarms if they counted as absent; of three nothing can be seen,
    and they would be missed if they counted as there.
    """
    several: list[set[int]] = [set(), {0}, {1}, {2}, {0, 1}, {0, 2}, {1, 2}, {0, 1, 2}]
    # The same class twice in an image is one class, also where one of the two objects is difficult.
    plain = [(shown, [(label, hard) for label in sorted(shown) for hard in (False, True)]) for shown in several]
    seen, unseen = [{0, 1}, {0, 2}], [{1}, {2}, {1, 2}]
    hard = [(shown, [(0, True), *((label, False) for label in sorted(shown - {0}))]) for shown in seen + unseen]
    root = write_voc(here / "VOC2007", names, {"trainval": 4 * plain + hard, "test": 2 * plain + hard})
    assert evaluate(run, "--protocols", "transfer", "--transfer", root) == 0
    found = read_evaluation(Path("run-evaluation"))
    (result,) = found.results
    assert result.detail["average_precision"] == dict.fromkeys(names, 1.0)
    assert result.figures["mAP"].mean == result.figures["mAP, 11 points"].mean == 1
    assert (result.detail["n_train"], result.detail["n_test"]) == (37, 21)
    assert (found.data["transfer"]["n_images"], found.data["transfer_test"]["n_classes"]) == (37, 3)
    # Of VOC's own twenty classes three are there, which the record says.
    assert len(found.data["transfer_split"].get("absent_classes", [])) == (17 if "dog" in names else 0)
    # Where they are not marked, those that cannot be seen are missed; where they are not named, the others are found.
    named = [(shown, [(label, False) for label, _ in objects]) for shown, objects in hard]
    left_out = [(shown, [(label, False) for label, difficult in objects if not difficult]) for shown, objects in hard]
    for counted in (named, left_out):
        write_voc(root, names, {"test": 2 * plain + counted})
        assert evaluate(run, "--protocols", "transfer", "--transfer", root, "--overwrite") == 0
        (result,) = read_evaluation(Path("run-evaluation")).results
        first, *others = (result.detail["average_precision"][name] for name in names)
        assert first < 0.99
        assert others == [1, 1]
        assert result.figures["mAP"].mean == pytest.approx((first + 2) / 3)


def test_images_with_a_table_of_their_classes(run: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = example_images(40, size=(8, 8), n_classes=2)
    (here / "several").mkdir()
    lines = ["image,first,second,both"]
    for i, (image, label) in enumerate(zip(given.images, given.labels, strict=True)):
        (here / "several" / f"{i:03d}.png").write_bytes(encoded(image, "PNG"))
        lines.append(f"{i:03d},{int(label == 0)},{int(label == 1)},1")
    Path("classes.csv").write_text("\n".join(lines))
    data = "several::classes.csv"
    arguments = ["--protocols", "knn", "transfer", "--transfer", data]
    # What cannot be learned is refused before anything is measured; here, a class that all training images show.
    assert evaluate(run, *arguments) == 2
    assert "No training image is without the class 'both'" in capsys.readouterr().err
    Path("classes.csv").write_text("\n".join(line.rpartition(",")[0] for line in lines))
    assert evaluate(run, *arguments) == 0
    found = read_evaluation(Path("run-evaluation"))
    assert found.results[1].figures["mAP"].mean > 0.9
    assert (found.data["transfer"]["n_images"], found.data["transfer_test"]["n_images"]) == (36, 4)
    assert evaluate(run, *arguments, "--transfer-test", data, "--overwrite") == 0
    assert read_evaluation(Path("run-evaluation")).data["transfer_test"]["n_images"] == 40
    assert evaluate(run, *arguments, "--transfer-test", "several", "--output", "o") == 2
    assert "several names no table of classes; give --transfer-test as FOLDER::TABLE" in capsys.readouterr().err


def test_whoever_gives_a_set_for_transfer_gets_transfer(run: Path, here: Path, capsys: Any) -> None:
    other = example_images(40, size=(8, 8), n_classes=4, seed=3)
    np.savez("other.npz", images=other.images, labels=other.labels)
    assert evaluate(run, "--transfer", "other.npz", "--protocols", "knn") == 2
    assert "--transfer is given, but transfer is not among --protocols" in capsys.readouterr().err
    assert evaluate(run, "--transfer", "other.npz", "--epochs", "1") == 0
    found = read_evaluation(Path("run-evaluation"))
    assert [result.protocol for result in found.results] == ["knn", "linear", "transfer", "clustering", "k"]


def test_lists_that_are_refused_before_the_work(run: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = run.parent / "images.npz"
    Path("all.txt").write_text("\n".join(str(row) for row in range(80)))
    assert evaluate(run, "--protocols", "knn", "semi", "--label-lists", "all.txt") == 2
    assert "The list all.txt names images that are held out for testing; give a test set with --test." in (
        capsys.readouterr().err
    )
    labels = np.load(images)["labels"]
    Path("one.txt").write_text("\n".join(map(str, np.flatnonzero(labels != 2))))
    assert evaluate(run, "--test", images, "--protocols", "knn", "semi", "--label-lists", "one.txt") == 2
    printed = capsys.readouterr()
    assert "The list one.txt has no image of the class 'class002', but each of the 4 classes needs one" in printed.err
    assert not printed.out


def test_images_that_cannot_be_compared_may_have_been_seen(
    run: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of the run's images is another set by fingerprint, and has been seen all the same."""
    with np.load(run.parent / "images.npz") as stored:
        np.savez("part.npz", **{name: stored[name][:40] for name in stored.files if len(stored[name]) == 80})
    assert evaluate(run, "--data", "part.npz", "--protocols", "knn") == 0
    assert read_evaluation(Path("run-evaluation")).test_images["seen"] is True
    monkeypatch.setattr("siammm.evaluate.split._COMPARED", 1)
    assert evaluate(run, "--data", "part.npz", "--protocols", "knn", "--overwrite") == 0
    found = read_evaluation(Path("run-evaluation")).test_images
    assert (found["seen"], found["clustered"], found["in_train"]) == (None, None, None)


# -- other people's models, and tables


def test_a_checkpoint_of_timm(run: Path, here: Path) -> None:
    torch.save({"state_dict": build_backbone("resnet10t", image_size=32).state_dict()}, "w.pth")
    images = run.parent / "images.npz"
    assert evaluate("timm:resnet10t:w.pth", "--data", images, "--image-size", "32", "--protocols", "knn") == 0
    found = read_evaluation(Path("resnet10t-w-evaluation"))
    assert found.subject["prefix"] == "state_dict."
    assert found.test_images["seen"] is None


def table(path: Path, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    labels = np.arange(120) % 3
    rows = np.eye(3, 8)[labels] + 0.1 * rng.normal(size=(120, 8))
    np.savez(path, embeddings=rows.astype(np.float32), labels=np.array(["ant", "bee", "cat"])[labels])
    return path


def test_tables_side_by_side(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, name in enumerate(("one", "two")):
        assert evaluate(table(here / f"{name}.npz", seed)) == 0
    capsys.readouterr()
    assert main(["compare", "one-evaluation", "two-evaluation/evaluation.json", "--output", "t.md"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "differ" not in printed.out  # the same samples, whatever encoder embedded them
    assert "*" in printed.out
    assert printed.out.splitlines()[-1] == "Next: siammm report RUN --compare OTHER"
    text = Path("t.md").read_text()
    assert text.startswith("| protocol | figure | ")
    assert "**1.0000**" in text
    assert main(["compare", "one-evaluation", "two-evaluation", "--output", "t.md"]) == 2
    assert "add --overwrite" in capsys.readouterr().err
    assert main(["compare", "one-evaluation", "two-evaluation", "--output", "t.md", "--overwrite"]) == 0
    assert main(["compare", "one-evaluation"]) == 2
    assert "siammm compare needs at least two evaluations, but 1 was given." in capsys.readouterr().err
    assert main(["compare", "one-evaluation", "three"]) == 2
    assert "There is no evaluation of three" in capsys.readouterr().err


def test_an_earlier_evaluation_is_kept(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(here / "t.npz")
    assert evaluate(path, "--protocols", "knn") == 0
    before = Path("t-evaluation/evaluation.json").read_bytes()
    assert evaluate(path, "--protocols", "knn") == 2
    assert "add --overwrite" in capsys.readouterr().err
    assert Path("t-evaluation/evaluation.json").read_bytes() == before
    assert evaluate(path, "--protocols", "linear", "--overwrite") == 0
    Path("t-evaluation/mine.txt").write_text("x")
    assert evaluate(path, "--overwrite") == 2
    assert "'mine.txt', which is not part of an earlier result" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "nothing does not exist"),
        (["t.npz", "--data", "digits"], "leave --data digits out"),
        (["t.npz", "--seeds", "1", "1"], "The seeds 1, 1 repeat"),
        (["t.npz", "--seeds", "-1"], "--seeds is -1, but it must be from 0 to"),
        (["t.npz", "--protocols", "semi"], "needs an encoder"),
        (["t.npz", "--k-means", "25000"], "k-means was asked for 25,000 clusters of 108 samples"),
        (["t.npz", "--transfer", "digits"], "leave --transfer out"),
        (["t.npz", "--transfer-test", "digits"], "without --transfer"),
        (["RUN", "--data", "bare.npy"], "bare.npy has no labels, or some are missing"),
        (["RUN", "--protocols", "transfer"], "give it with --transfer"),
        (["RUN", "--test", "digits"], "which the training set lacks"),
        (["RUN", "--image-size", "9"], "leave --image-size out"),
        (
            ["RUN", "--protocols", "knn", "linear-paper", "--epochs", "0"],
            "epochs is 0, but it must be",
        ),
        (["RUN", "--protocols", "knn", "semi", "--label-shares", "2"], "The fraction of labels is 2.0"),
        (["RUN", "--protocols", "knn", "semi", "--label-lists", "none.txt"], "none.txt"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_sentence(
    arguments: list[str], message: str, run: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table(here / "t.npz")
    np.save("bare.npy", example_images(30, size=(8, 8)).images)
    assert evaluate(*(str(run) if word == "RUN" else word for word in arguments)) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not list(here.glob("*-evaluation"))


def test_the_limit_on_bad_images_holds_for_every_protocol(run: Path, here: Path, capsys: Any) -> None:
    root = write_folder(here, example_images(60, size=(8, 8), n_classes=4, seed=5))
    next(root.rglob("*.png")).write_bytes(b"no image")
    arguments = ["--data", root, "--test", root, "--epochs", "1", "--label-shares", "0.5"]
    for protocol in ("knn", "linear-paper", "semi"):
        assert evaluate(run, *arguments, "--protocols", protocol, "--output", protocol) == 2
        assert "raise --max-bad-images" in capsys.readouterr().err
        assert evaluate(run, *arguments, "--protocols", protocol, "--output", protocol, "--max-bad-images", "0.1") == 0


def test_what_was_measured_survives_an_interruption(
    run: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C in the second protocol: the first is written, the rest is named, and the exit code is that of Ctrl-C."""
    from siammm.evaluate import measure

    real = measure.measure

    def interrupted(protocol: Any, *rest: Any) -> Any:
        if protocol.name == "linear":
            raise KeyboardInterrupt
        return real(protocol, *rest)

    monkeypatch.setattr(measure, "measure", interrupted)
    assert evaluate(run, "--protocols", "knn", "linear", "k") == 130
    stored = json.loads((here / "run-evaluation" / "evaluation.json").read_text())
    assert [result["protocol"] for result in stored["results"]] == ["knn"]
    assert stored["unfinished"] == ["linear", "k"]
    assert "linear, k not measured" in " ".join(capsys.readouterr().out.split())
