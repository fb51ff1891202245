"""The command line: what it takes, what it writes, what it prints, and how it ends."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from benchmarks import merge_families
from PIL import Image

import siammm
from siammm.cli import _COMMANDS, main, parse
from siammm.commands import demo
from siammm.mixture.seeding import default_n_components
from siammm.settings.commands import ClusterConfig, DemoConfig
from siammm.settings.fields import with_settings
from siammm.settings.presets import PRESETS
from siammm.settings.usage import fault
from tests.commands import refused
from tests.digits import fewer_digits
from tests.nursery import Nursery

N, K, D = 240, 4, 16


@pytest.fixture(scope="module")
def blobs() -> tuple[np.ndarray, np.ndarray]:
    """Four well separated directions."""
    rng = np.random.default_rng(0)
    labels = np.arange(N) % K
    return (np.eye(K, D)[labels] + 0.05 * rng.normal(size=(N, D))).astype(np.float32), labels


@pytest.fixture
def table(blobs: tuple[np.ndarray, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with ids and labels, in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    embeddings, labels = blobs
    names = np.array(["ant", "bee", "cat", "dog"])[labels]
    np.savez("table.npz", embeddings=embeddings, labels=names, ids=[f"{i}.png" for i in range(N)])
    return Path("table.npz")


# -- flags


@pytest.mark.parametrize("kind", ["VonMisesFisherMixture", "GaussianMixture"])
def test_settings_are_the_estimators(kind: str) -> None:
    """The same names and the same defaults, but for the few that mean something else to a command."""
    own = {"n_components", "merge", "random_state", "warm_start", "progress"}
    parameters = getattr(siammm, kind)().get_params()
    settings = {field.name: field.default for field in dataclasses.fields(ClusterConfig)}
    for name in parameters.keys() - own:
        assert settings[name] == parameters[name], name


def test_values_are_parsed() -> None:
    config = parse(
        [
            "cluster",
            "x.npy",
            "--merge",
            "none",
            "--n-components",
            "7",
            "--concentration",
            "12.5",
            "--init",
            "a/b",
            "--overwrite",
        ]
    )
    assert isinstance(config, ClusterConfig)
    assert (config.data, config.init) == ("x.npy", Path("a/b"))
    assert (config.merge, config.n_components, config.concentration, config.overwrite) == ("none", 7, 12.5, True)
    assert parse(["cluster", "x.npy"]) == ClusterConfig(data="x.npy")
    assert parse(["demo"]) == DemoConfig()


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["frobnicate"],
        ["cluster"],
        ["cluster", "x.npy", "--merge", "sometimes"],
        ["cluster", "x.npy", "--tol", "much"],
    ],
)
def test_wrong_arguments_end_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"siammm {siammm.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("trian x", "There is no command 'trian'; did you mean train?"),
        ("Cluster x", "There is no command 'Cluster'; did you mean cluster?"),
        ("--verison", "There is no command '--verison'; did you mean --version?"),
        ("frobnicate", "There is no command 'frobnicate'; siammm --help lists them."),
        ("photos", "photos is not a command; to find the groups in it, use: siammm cluster photos"),
    ],
)
def test_did_you_mean(arguments: str, sentence: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("photos").mkdir()
    assert refused(arguments.split(), capsys) == f"siammm: {sentence}\n"


USAGE = {
    "train x --epoch 3": "siammm train has no flag --epoch; did you mean --epochs?",
    "train x --prest cifar": "siammm train has no flag --prest; did you mean --preset?",
    "cluster x -n 3": "siammm cluster has no flag -n; siammm cluster --help-all lists them.",
    "cluster x --help-al": "siammm cluster has no flag --help-al; did you mean --help-all?",
    "cluster x --no-merge": "siammm cluster has no flag --no-merge; did you mean --merge?",
    "cluster x --merge foo": "--merge takes auto, paper or none, not 'foo'.",
    "cluster x --n-components=3.5": "--n-components takes a whole number, not '3.5'.",
    "cluster x --init-x 3": "siammm cluster has no flag --init-x; did you mean --init?",
    "cluster x --device --tol 1": "--device needs a value; siammm cluster --help-all says which.",
    "cluster x --merge": "--merge needs a value: auto, paper or none.",
    "train x --epochs --fused": "--epochs needs a value: a whole number.",
    "evaluate x --seeds 1 two": "--seeds takes a whole number, not 'two'.",
    "cluster x --concentration y": "--concentration takes per-component, closed-form, shared or a number, not 'y'.",
    f"train x --epochs {80 * 'n'}": f"--epochs takes a whole number, not '{40 * 'n'}...'.",
    "cluster a b": "siammm cluster takes one DATA, not also b; put quotes around a pattern or a name with spaces.",
    "demo x": "siammm demo takes flags only, not also x; put quotes around a pattern or a name with spaces.",
    "cluster": "siammm cluster needs DATA; siammm cluster --help says what it is.",
    "compare": "siammm compare needs EVALUATION; siammm compare --help says what it is.",
    "train x --compile True": "--compile takes no value; use --compile or --no-compile alone.",
    "cluster x --no-overwrite=yes": "--no-overwrite takes no value; use --overwrite or --no-overwrite alone.",
    "evaluate x --seeds 0,1": "--seeds takes a whole number, not '0,1'; put spaces between several values.",
    "train x --epochs None": "--epochs takes a whole number, not 'None'.",
    "cluster x --output=": "--output is empty; give a path.",
    "sort run": "siammm sort also needs --to; siammm sort --help says what it is.",
}


def test_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(r"give a command: demo, train, .*, bench; siammm --help says", refused([], capsys))


def test_an_empty_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(["cluster", ""], capsys) == (
        "siammm: siammm cluster was given an empty word; name the data or the run.\n"
    )


@pytest.mark.parametrize("arguments", USAGE)
def test_wrong_words_are_named_in_a_sentence(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(arguments.split(), capsys) == f"siammm: {USAGE[arguments]}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        "cluster x --merge paper --merge-threshold -1.2 --no-overwrite",
        "cluster x --n_components None --concentration 3",
        "evaluate x --k-means --seeds 1 2 --protocols knn",
        "compare a b c",
        "train --resume run",
        "train x --more-components",
        "train x --compile --no-fused --concentration-dims None",
    ],
)
def test_words_that_are_right_are_left_alone(arguments: str) -> None:
    command, *words = arguments.split()
    assert fault(command, _COMMANDS[command], words) is None
    parse([command, *words])


def test_the_help_names_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "--version" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ("train table.npy", "if these are embeddings, use siammm cluster"),
        (
            "train table.npz",
            "no array that could be images (3-D or 4-D), but holds embeddings (6 x 4) float32; if these are",
        ),
        ("train table.parquet", "if it holds embeddings, use siammm cluster"),
        ("audit images.npz", "if these are images, use siammm embed first"),
        ("evaluate images.npy", "if these are images, use siammm embed first"),
        ("report photos", "or make one with: siammm cluster photos"),
        ("explore table.npy", "or make one with: siammm cluster table.npy"),
        ("embed photos", "photos holds images, but embed takes a model first; use: siammm embed lite --data photos"),
        ("report empty", "give one that siammm train or siammm cluster wrote.\n"),
    ],
)
def test_images_for_a_table_and_a_table_for_images(
    arguments: str, hint: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, pixels = np.eye(6, 4, dtype=np.float32), np.zeros((6, 8, 8, 3), np.uint8)
    np.save("table.npy", table)
    np.savez("table.npz", embeddings=table)
    pq.write_table(pa.table({"embedding": list(table)}), "table.parquet")
    np.save("images.npy", pixels)
    np.savez("images.npz", x=pixels)
    for folder in ("photos/deeper", "empty"):
        Path(folder).mkdir(parents=True)
    Image.fromarray(pixels[0]).save("photos/deeper/1.png")
    assert hint in refused([*arguments.split(), "--device", "cpu"], capsys)


@pytest.mark.parametrize(
    ("n_samples", "start"), [(1, 1), (2, 2), (20, 2), (1000, 80), (50_000, 1000), (1_000_000, 4000)]
)
def test_the_default_start(n_samples: int, start: int) -> None:
    assert default_n_components(n_samples) == start


# -- cluster


def test_cluster_writes_the_three_files(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", str(table)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert sorted(path.name for path in Path().iterdir()) == ["table-clusters", "table.npz"]
    output = Path("table-clusters")
    assert sorted(p.name for p in output.iterdir()) == ["assignments.parquet", "mixture.safetensors", "summary.json"]

    rows = pq.read_table(output / "assignments.parquet")
    assert rows.column_names == ["id", "cluster", "group", "probability", "group_probability", "outlier_score", "label"]
    assert rows.column("id").to_pylist() == [f"{i}.png" for i in range(N)]
    assert rows.column("label").to_pylist()[:4] == ["ant", "bee", "cat", "dog"]
    numbers = [name for name in rows.column_names[1:6] if name != "group_probability"]
    clusters, group, probability, outlier = (rows.column(name).to_numpy() for name in numbers)
    np.testing.assert_array_equal(group, clusters)  # four that lie about are no coarser groups
    assert ((probability > 0) & (probability <= 1)).all()
    assert (outlier.min(), outlier.max()) == (0, 1)

    summary = json.loads((output / "summary.json").read_text())
    assert summary["n_components"] == len(summary["sizes"]) == len(summary["concentrations"])
    assert summary["sizes"] == np.bincount(clusters, minlength=summary["n_components"]).tolist()
    given = {"file": "table.npz", "n_samples": N, "n_dimensions": D, "path": str(table.absolute())}
    assert summary["input"] == given | {"fingerprint": summary["input"]["fingerprint"]}
    assert summary["n_groups"] == summary["n_components"]
    assert summary["scores_of_groups"] is None
    assert "groups" not in printed.out
    assert summary["settings"]["merge"] == "auto"
    assert summary["settings"]["n_components"] == default_n_components(N)
    assert summary["n_components_by_round"][-1] == summary["n_components"]
    assert summary["seconds"].keys() == {"read", "fit", "group", "describe", "score"}
    assert summary["versions"]["siammm"] == siammm.__version__
    for word in ("clusters", "AMI", "NMI", "ARI", "Hungarian", "majority", "purity", "concentration"):
        assert word in printed.out


def test_clusters_of_clusters_are_groups(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, which, _ = merge_families.make("close hierarchy 5 x 8, d 24", 0)
    np.savez("nested.npz", embeddings=x, labels=which // 8)
    assert main(["cluster", "nested.npz", "--n-components", "80"]) == 0
    printed = capsys.readouterr().out
    said = " ".join(printed.split())
    assert said.index("5 groups in ") < said.index("There are also 40 clusters, merged from 80:")
    summary = json.loads(Path("nested-clusters/summary.json").read_text())
    assert (summary["n_groups"], len(summary["groups"])) == (5, 40)
    assert summary["scores_of_groups"]["ari"] > 0.99 > 0.5 > summary["scores"]["ari"]
    rows = pq.read_table("nested-clusters/assignments.parquet")
    groups = np.array(summary["groups"])[rows.column("cluster").to_numpy()]
    np.testing.assert_array_equal(rows.column("group").to_numpy(), groups)


def test_the_saved_mixture_predicts_the_written_clusters(table: Path, blobs: tuple[np.ndarray, np.ndarray]) -> None:
    assert main(["cluster", str(table), "--output", "out", "--merge", "none", "--n-components", str(K)]) == 0
    mixture = siammm.VonMisesFisherMixture.load("out/mixture.safetensors")
    clusters = pq.read_table("out/assignments.parquet").column("cluster").to_numpy()
    np.testing.assert_array_equal(mixture.predict(blobs[0]), clusters)
    scores = json.loads(Path("out/summary.json").read_text())["scores"]
    assert (scores["ari"], scores["hungarian_accuracy"]) == (1, 1)


def test_the_same_seed_writes_the_same_assignments(table: Path) -> None:
    for output in ("one", "two"):
        assert main(["cluster", str(table), "--output", output]) == 0
    assert Path("one/assignments.parquet").read_bytes() == Path("two/assignments.parquet").read_bytes()


def test_outliers_come_last(blobs: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> None:
    embeddings = blobs[0].copy()
    embeddings[17] = -embeddings[17]
    np.save(tmp_path / "t.npy", embeddings)
    arguments = ["cluster", str(tmp_path / "t.npy"), "--output", str(tmp_path / "out")]
    assert main([*arguments, "--merge", "none", "--n-components", str(K)]) == 0
    rows = pq.read_table(tmp_path / "out" / "assignments.parquet")
    assert rows.column_names == ["id", "cluster", "group", "probability", "group_probability", "outlier_score"]
    assert rows.column("id").to_pylist() == list(range(N))
    assert int(np.argmax(rows.column("outlier_score").to_numpy())) == 17


def test_columns_of_parquet_are_carried_through(blobs: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> None:
    columns: dict[str, Any] = {
        "path": [f"{i}.png" for i in range(N)],
        "embedding": pa.array(blobs[0].tolist(), pa.list_(pa.float32())),
        "cluster": np.arange(N),
        "split": ["train", "test"] * (N // 2),
        "y": [None, *blobs[1][1:].tolist()],
    }
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    assert main(["cluster", str(tmp_path / "t.parquet"), "--output", str(tmp_path / "out"), "--n-components", "9"]) == 0
    rows = pq.read_table(tmp_path / "out" / "assignments.parquet")
    of_ours = ["id", "cluster", "group", "probability", "group_probability", "outlier_score"]
    expected = [*of_ours, "label", "input_cluster", "split"]
    assert rows.column_names == expected
    assert rows.column("input_cluster").to_pylist() == list(range(N))
    assert rows.column("split").to_pylist() == columns["split"]
    assert rows.column("label").to_pylist() == columns["y"]
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["scores"]["n_unlabelled"] == 1


def test_one_cluster_is_said_to_be_nothing_found(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save("cloud.npy", (np.random.default_rng(0).normal(size=(300, 8)) + 3).astype(np.float32))
    assert main(["cluster", "cloud.npy", "--device", "cpu"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "1 cluster in 300 embeddings" in said
    assert "add --n-groups NUMBER --overwrite, or look at the merge tree of the report" in said


@pytest.mark.parametrize("covariance", ["spherical", "diag"])
def test_the_gaussian_family(covariance: str, table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["cluster", str(table), "--family", "gaussian", "--covariance", covariance, "--n-components", "12"]
    assert main(arguments) == 0
    summary = json.loads(Path("table-clusters/summary.json").read_text())
    assert len(summary["variances"]) == summary["n_components"]
    assert "variance" in capsys.readouterr().out


def test_starting_from_an_earlier_result(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", str(table), "--output", "one", "--merge", "none", "--n-components", str(K)]) == 0
    start = ["--init", "one/mixture.safetensors", "--merge", "none"]
    assert main(["cluster", str(table), "--output", "two", *start]) == 0
    first, second = (pq.read_table(f"{name}/assignments.parquet").column("cluster") for name in ("one", "two"))
    assert first == second
    capsys.readouterr()
    assert main(["cluster", str(table), "--output", "three", *start, "--n-components", "9"]) == 2
    assert "leave out one of the two" in capsys.readouterr().err


def test_overwrite(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", str(table), "--n-components", "8"]) == 0
    before = Path("table-clusters/summary.json").read_text()
    assert main(["cluster", str(table), "--n-components", "9"]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert Path("table-clusters/summary.json").read_text() == before
    assert main(["cluster", str(table), "--n-components", "9", "--overwrite"]) == 0
    assert json.loads(Path("table-clusters/summary.json").read_text())["settings"]["n_components"] == 9


def test_labels_that_look_like_markup(blobs: tuple[np.ndarray, np.ndarray], tmp_path: Path, capsys: Any) -> None:
    np.savez(tmp_path / "t.npz", X=blobs[0], y=np.array(["[/red]", "[bold]", "a[0]", "ü"])[blobs[1]])
    assert main(["cluster", str(tmp_path / "t.npz"), "--output", str(tmp_path / "out[1]"), "--n-components", "9"]) == 0
    printed = capsys.readouterr().out
    assert "[/red]" in printed
    assert "out[1]" in printed.replace("\n", "")


def test_interrupted(table: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(siammm.VonMisesFisherMixture, "save", interrupt)
    assert main(["cluster", str(table)]) == 130
    assert capsys.readouterr().err == "siammm: interrupted.\n"
    assert [path.name for path in Path().iterdir()] == ["table.npz"]


# -- the real thing


def test_as_a_process_on_a_terminal_without_unicode(table: Path) -> None:
    """The one test that starts Python anew, which takes seconds; the others fork a process that has torch."""
    done = subprocess.run(
        [sys.executable, "-m", "siammm", "cluster", str(table), "--n-components", "8"],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Written to table-clusters" in done.stdout
    assert done.stdout.isascii()


def test_as_a_process(nursery: Nursery, table: Path) -> None:
    done = nursery.start(["cluster", str(table), "--n-components", "8"], cwd=Path())
    assert (done.wait(), done.err) == (0, "")
    assert "Written to table-clusters" in done.out
    assert not done.out.isascii()
    failed = nursery.start(["cluster", "missing.npy"], cwd=Path())
    assert (failed.wait(), failed.out) == (2, "")
    assert failed.err == "siammm: missing.npy does not exist; check the path.\n"


def test_demo(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    short = with_settings(PRESETS["demo"], epochs=1, cluster_after=0, warmup_epochs=0)
    monkeypatch.setitem(PRESETS, "demo", short)
    fewer_digits(monkeypatch, 3, demo)
    assert main(["demo"]) == 0
    printed = capsys.readouterr()
    assert re.fullmatch(r"epoch 1 of 1: loss .*\n", printed.err)
    for text in ("599 images", "clusters", "48", "AMI", "Hungarian", "siammm train photos/"):
        assert text in printed.out


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_finds_the_digits(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    assert main(["demo", "--random-state", str(seed)]) == 0
    printed = capsys.readouterr().out
    assert time.monotonic() - started < 180
    assert 9 <= int(re.findall(r"It finds (\d+) clusters", printed)[0]) <= 11
    ami, _, _, _, majority = (float(value) for value in re.findall(r"│ +(\d\.\d{3}) +", printed)[-5:])
    assert ami >= 0.85
    assert majority >= 0.90
