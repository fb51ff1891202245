"""One door: a run's files are named and read in ``runs`` alone, also those of a run that an earlier version left."""

from __future__ import annotations

import ast
import tarfile
from pathlib import Path

import numpy as np
import pytest

from siammm import SiamMM
from siammm.cli import main
from siammm.core.errors import InputError
from siammm.learn.encode import encode
from siammm.runs import files
from siammm.runs.run import Run
from siammm.settings.training import DataConfig

SOURCE = Path(__file__).parents[2] / "src" / "siammm"


def test_the_names_of_a_runs_files_stand_in_one_module() -> None:
    """Whoever wants a part of a run asks ``Run`` for it."""
    own = files.RUN_NAMES - {"tensorboard", "losses.svg", "clusters.svg"}
    named = {
        str(file.relative_to(SOURCE))
        for file in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in own
    }
    assert named == {"runs/files.py"}


def test_nobody_else_uses_these_names_to_read() -> None:
    """``SiamMM.save`` and ``export`` write files of the same names; nothing outside ``runs`` needs the others."""
    allowed = {
        "commands/cluster.py": {"MIXTURE"},  # to refuse a result as images
        "commands/cluster_tables.py": {"ASSIGNMENTS", "EMBEDDINGS", "MIXTURE"},  # in the sentence on what was written
        "estimator.py": {"ENCODER", "MIXTURE"},
        "export/encoder.py": {"CONFIG", "MIXTURE"},
        "export/hub.py": {"CONFIG", "MIXTURE"},
        "commands/train_messages.py": {"SET_ASIDE"},  # in the sentence on images that cannot be read
    }
    of_a_run = {name for name, value in vars(files).items() if isinstance(value, str) and value in files.RUN_NAMES}
    for file in SOURCE.rglob("*.py"):
        where = str(file.relative_to(SOURCE))
        used = {
            node.attr
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "files"
        }
        if not where.startswith("runs/"):
            assert used & of_a_run <= allowed.get(where, set()), where


def test_nobody_else_asks_whether_a_run_was_trained_or_clustered() -> None:
    """``ClusteredRun`` overrides what differs; what one of the two has and the other has not is None, 0 or empty."""
    asking = {
        str(file.relative_to(SOURCE))
        for file in SOURCE.rglob("*.py")
        if "ClusteredRun" in file.read_text(encoding="utf-8")
    }
    assert asking == {"runs/run.py"}


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ``siammm train digits`` left at 91b8557, before runs had a door of their own.

    ``siammm train digits --preset demo --epochs 4 --hidden-dim 16 --embedding-dim 4 --learning-rate 0 --n-components 12
    --merge none``, with first weights rounded to five values, which the rate of 0 keeps, so that it compresses; without
    its checkpoints.
    """
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(Path(__file__).parent / "run-91b8557.tar.xz") as packed:
        packed.extractall(folder, filter="data")
    return folder / "run-91b8557"


def test_a_run_of_an_earlier_version_opens_whole(old: Path) -> None:
    run = Run.open(old)
    assert run.config.preset == "demo"
    assert run.config.optimisation.epochs == len(run.metrics) == 4
    assert run.data == "digits"
    assert run.n_images == len(run.embeddings) == len(run.label_N) == 1797
    assert run.n_clusters == 12
    assert run.label_names == [str(digit) for digit in range(10)]
    assert run.merges["n_components"] == [12]
    assert run.images.is_whole
    assert run.images.notes == []


def test_a_run_of_an_earlier_version_has_no_rule_for_groups(old: Path, here: Path) -> None:
    run = Run.open(old)
    assert run.groups is None
    assert not run.has_groups
    model = SiamMM.load(old, device="cpu")
    np.testing.assert_array_equal(model.labels_, run.cluster_N)
    np.testing.assert_array_equal(model.group_labels_, run.group_N)  # its table has them
    for name in ("groups_", "n_groups_"):
        assert not hasattr(model, name), name
    for method in (model.predict_group, model.predict_group_proba):
        with pytest.raises(InputError, match="This model was saved without groups, by an earlier version; find them"):
            method("digits")
    # What the sentence advises.
    model.mixture_.groups(model.embed("digits"))
    assert model.predict_group("digits").shape == (1797,)
    assert main(["embed", str(old), "--output", "table.npz", "--device", "cpu"]) == 0
    with np.load("table.npz") as table:
        assert "group" not in table


def test_every_door_gives_the_embeddings_that_the_run_clustered(old: Path, here: Path) -> None:
    """``encode``, ``SiamMM``, ``siammm embed`` and ``siammm export`` agree with what training left.

    Training stored float16 on another machine, whose sums may round the other way in the last bit.
    """
    run = Run.open(old)
    loader = run.loader(None, DataConfig())
    embeddings = encode(run.network, loader, "embeddings").cpu().numpy()
    loader.close()
    np.testing.assert_allclose(embeddings, run.embeddings, rtol=2**-10, atol=2e-5)
    model = SiamMM.load(old, device="cpu")
    np.testing.assert_array_equal(model.embed("digits"), embeddings)
    np.testing.assert_array_equal(model.predict("digits"), run.cluster_N)
    assert main(["embed", str(old), "--output", "table.npz", "--device", "cpu"]) == 0
    with np.load("table.npz") as table:
        np.testing.assert_array_equal(table["embeddings"], embeddings)
        np.testing.assert_array_equal(table["cluster"], run.cluster_N)
    assert main(["export", str(old), "--formats", "encoder", "--output", "exported", "--device", "cpu"]) == 0
    np.testing.assert_array_equal(SiamMM.from_pretrained("exported", device="cpu").embed("digits"), embeddings)


@pytest.mark.parametrize(
    "command",
    [["report", "--no-open"], ["audit"], ["evaluate", "--protocols", "knn", "clustering"]],
    ids=lambda command: command[0],
)
def test_every_command_takes_a_run_of_an_earlier_version(command: list[str], old: Path, here: Path) -> None:
    assert main([command[0], str(old), *command[1:], "--device", "cpu"]) == 0
