"""The ONNX file computes what the model computes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as functional
from PIL import Image, ImageOps

from siammm import SiamMM
from siammm.core.errors import InputError
from siammm.data import decode
from siammm.data.augment import clean, clean_side
from siammm.data.sources import open_source
from siammm.export import onnx_file
from siammm.export.onnx_file import OPSET, OUTPUTS, InferenceModel, write_onnx
from siammm.export.outlier_scale import OutlierScale
from siammm.mixture.group_rule import Groups
from siammm.runs.run import Run
from tests.borders import is_clear
from tests.export.runs import made_run, pictures
from tests.runs.parts import changed


def answers(path: Path, images: np.ndarray) -> dict[str, np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session: Any = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {"image": images}), strict=True))


def densities(own: Run, images: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        x = clean(torch.from_numpy(images).permute(0, 3, 1, 2), own.view.size, own.view)
        rows = functional.normalize(own.embedding_encoder(x), dim=1)
    return np.asarray(own.mixture.score_samples(rows.numpy()))


def check_scores(found: np.ndarray, expected: np.ndarray, n_reference: int) -> None:
    """A score is a rank among the reference, and an image whose density is another's but for rounding may be a place
    off; all others agree to 1e-4.
    """
    off = np.abs(found - expected)
    assert off.max() < 1.1 / (n_reference - 1)
    assert (off > 1e-4).mean() <= 0.03


def test_it_agrees_with_the_model_of_a_trained_run(run_folder: Path, tmp_path: Path) -> None:
    """Must show 4: to 1e-4 on 100 images, clusters equal; here beside SiamMM and beside the run's own table."""
    own = Run.open(run_folder)
    assert own.data is not None
    source = open_source(own.data)
    images = np.stack([source.image(i) for i in range(len(source))])
    reference = densities(own, images)
    write_onnx(tmp_path / "run.onnx", own, reference)
    found = answers(tmp_path / "run.onnx", images[:100])
    assert tuple(found) == OUTPUTS[:5]  # no groups were found
    model = SiamMM.load(run_folder, device="cpu")
    np.testing.assert_allclose(found["embedding"], model.embed(images[:100]), atol=1e-4)
    proba = model.predict_proba(images[:100])
    clear, shares = is_clear(proba), proba.max(axis=1).toarray().ravel()
    np.testing.assert_array_equal(found["cluster"][clear], model.predict(images[:100])[clear])
    np.testing.assert_allclose(found["probability"], shares, atol=1e-4)
    with torch.no_grad():
        x = clean(torch.from_numpy(images[:100]).permute(0, 3, 1, 2), own.view.size, own.view)
        np.testing.assert_allclose(found["features"], own.embedding_encoder.features(x).numpy(), rtol=1e-4, atol=1e-4)
    scores = OutlierScale.of(reference)(model.score_samples(images[:100]))
    check_scores(found["outlier_score"], scores, len(images))
    table = pq.read_table(run_folder / "assignments.parquet").slice(0, 100).to_pandas()
    np.testing.assert_array_equal(found["cluster"][clear], table["cluster"][clear])
    np.testing.assert_allclose(found["probability"], table["probability"], atol=1e-4)
    check_scores(found["outlier_score"], np.asarray(table["outlier_score"]), len(images))


def test_groups_are_those_of_the_run(grouped_folder: Path, tmp_path: Path) -> None:
    own = Run.open(grouped_folder)
    assert own.data is not None
    source = open_source(own.data)
    images = np.stack([source.image(i) for i in range(len(source))])
    write_onnx(tmp_path / "run.onnx", own, densities(own, images))
    found = answers(tmp_path / "run.onnx", images)
    assert tuple(found) == OUTPUTS
    model = SiamMM.load(grouped_folder, device="cpu")
    share = model.predict_group_proba(images)
    np.testing.assert_allclose(found["group_probability"], share.max(axis=1), atol=1e-4)
    clear = is_clear(share)
    np.testing.assert_array_equal(found["group"][clear], own.group_N[clear])
    np.testing.assert_array_equal(found["group"][clear], model.predict_group(images)[clear])
    assert found["group"].dtype == np.int64
    assert len(np.unique(found["group"])) == model.n_groups_
    facts = {entry.key: entry.value for entry in onnx.load(tmp_path / "run.onnx").metadata_props}
    assert facts["n_groups"] == str(model.n_groups_)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("n_groups", [2, 40])
def test_groups_of_any_number(n_groups: int, scaled: bool) -> None:
    """In torch, with scores whose common part is large, as it may be, and with an outlier scale or without."""
    own, random = made_run("conv-small", 8), np.random.default_rng(0)
    weight_GD = 30 * random.normal(size=(n_groups, 16)) + 1e6 * random.normal(size=16)
    groups = Groups(np.zeros(7, int), 0.5, weight_GD, random.normal(size=n_groups) + 1e5, True)
    mixture = own.mixture
    mixture.groups_ = groups
    images = pictures(200, 8, seed=4)
    model = InferenceModel(
        own.embedding_encoder, own.view, mixture, OutlierScale.of(densities(own, images)) if scaled else None
    )
    with torch.no_grad():
        found = dict(zip(model.outputs, model(torch.from_numpy(images)), strict=True))
    assert ("outlier_score" in found) == scaled
    share = groups.predict_proba(found["embedding"])
    np.testing.assert_allclose(found["group_probability"], share.max(axis=1), atol=1e-3)
    assert (found["group"].numpy() == share.argmax(axis=1)).mean() > 0.99


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """An untrained one, and the file of it, with 100 images as the reference."""
    own = made_run("resnet18", 12)  # the stem is that of 32 pixels, and the work a seventh
    path = tmp_path_factory.mktemp("resnet") / "run.onnx"
    write_onnx(path, own, densities(own, pictures(100, 12)))
    return own, path


def test_a_resnet_for_small_images(resnet: tuple[Run, Path]) -> None:
    own, path = resnet
    images = pictures(100, 12)
    with torch.no_grad():
        x = clean(torch.from_numpy(images).permute(0, 3, 1, 2), 12, own.view)
        rows = functional.normalize(own.embedding_encoder(x), dim=1)
    cluster, share, density = (part.numpy() for part in own.mixture.assign(rows))
    found = answers(path, images)
    np.testing.assert_allclose(found["embedding"], rows.numpy(), atol=1e-4)
    np.testing.assert_array_equal(found["cluster"], cluster)
    np.testing.assert_allclose(found["probability"], share, atol=1e-4)
    check_scores(found["outlier_score"], OutlierScale.of(density)(density), len(images))
    # One at a time, or all at once.
    alone = answers(path, images[3:4])
    for name, values in found.items():
        np.testing.assert_allclose(alone[name][0], values[3], atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"n_neighbours": 1},
        {"n_neighbours": 99},
        {"size_weighting": True, "temperature": 0.3},
        {"assignment": "posterior"},
        {"assignment": "posterior", "n_neighbours": 2, "temperature": 0.5},
    ],
)
def test_every_way_of_assigning(settings: dict[str, Any]) -> None:
    """The graph in torch beside the mixture's own, for every rule that a mixture can have."""
    own = made_run("conv-small", 8)
    mixture = own.mixture.set_params(**settings)
    images = pictures(200, 8, seed=4)
    model = InferenceModel(own.embedding_encoder, own.view, mixture, OutlierScale.of(densities(own, images)))
    with torch.no_grad():
        embedding, _, cluster, probability, outlier = model(torch.from_numpy(images))
        expected = mixture.assign(embedding)
    assert torch.equal(cluster, expected[0])
    torch.testing.assert_close(probability, expected[1].float(), rtol=0, atol=1e-5)
    assert float(outlier.min()) >= 0
    assert float(outlier.max()) <= 1


def test_the_centre_of_a_large_image_is_cut_out_inside() -> None:
    own = made_run("conv-small", 8)
    own = changed(own, view=replace(own.view, size=160))
    model = InferenceModel(own.embedding_encoder, own.view, None, None)
    assert model.side == clean_side(160) == 183
    images = torch.from_numpy(pictures(2, 183))
    with torch.no_grad():
        embedding, features = model(images)
        x = clean(images.permute(0, 3, 1, 2), 160, own.view)
        torch.testing.assert_close(features, own.embedding_encoder.features(x))
        torch.testing.assert_close(embedding, functional.normalize(own.embedding_encoder(x), dim=1))


def test_pillow_prepares_an_image_as_siammm_does() -> None:
    """The line of the guide that brings any image to the side that the file wants."""
    for height, width in ((300, 200), (40, 77), (183, 183)):
        image = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
        fitted = ImageOps.fit(Image.fromarray(image), (183, 183), Image.Resampling.BILINEAR)
        np.testing.assert_array_equal(np.asarray(fitted), decode.fit(image, (183, 183)))


def test_what_the_file_says_about_itself(resnet: tuple[Run, Path]) -> None:
    own, path = resnet
    model = onnx.load(path)
    facts = {entry.key: entry.value for entry in model.metadata_props}
    assert json.loads(facts["mean"]) == list(own.view.mean)
    assert (facts["model"], facts["n_clusters"]) == ("SiamMM", "7")
    assert (facts["image_size"], facts["input_side"]) == ("12", "12")
    assert facts["n_reference_images"] == "100"
    assert "n_groups" not in facts
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", OPSET)]
    # No folder of the machine that made it.
    assert b"siammm/export" not in path.read_bytes()


def test_a_run_without_clusters_gives_an_encoder(tmp_path: Path) -> None:
    own = changed(made_run("conv-small", 8), has_clusters=False)
    write_onnx(tmp_path / "run.onnx", own, None)
    assert list(answers(tmp_path / "run.onnx", pictures(2, 8))) == ["embedding", "features"]
    # A wrong size is refused, and not guessed at.
    with pytest.raises(Exception, match="INVALID_ARGUMENT"):
        answers(tmp_path / "run.onnx", pictures(2, 16))


def test_a_file_that_differs_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = changed(made_run("conv-small", 8), has_clusters=False)
    session = onnxruntime.InferenceSession

    class Liar:
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            self.session = session(*arguments, **settings)

        def run(self, names: Any, feed: Any) -> Any:
            values: list[Any] = list(self.session.run(names, feed))
            return [value + 1 for value in values]

    monkeypatch.setattr(onnxruntime, "InferenceSession", Liar)
    with pytest.raises(InputError, match="gives another embedding than the model, so it was not kept"):
        write_onnx(tmp_path / "run.onnx", own, None)
    assert not (tmp_path / "run.onnx").exists()


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_file, "PACKAGES", ("onnx", "no_such_package"))
    with pytest.raises(InputError, match=r"needs no_such_package, not installed here; pip install no_such_package\."):
        write_onnx(tmp_path / "run.onnx", made_run("conv-small", 8), None)
