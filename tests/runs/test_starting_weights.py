"""Weights that training starts from: which of them are used, how pixels are normalised, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from siammm import SiamMM
from siammm.cli import main, parse
from siammm.core.errors import InputError
from siammm.data.sources import open_source
from siammm.export.encoder import write_encoder
from siammm.learn import build
from siammm.learn.backbones import build_backbone
from siammm.learn.encode import encode
from siammm.learn.loop import Training
from siammm.runs import lite
from siammm.runs.models import open_model
from siammm.runs.run import Run
from siammm.runs.starting_weights import open_start, public_name, settings_of
from siammm.settings.presets import PRESETS
from tests.commands import TINY, refused
from tests.data.image_sets import example_images, write_folder
from tests.learn.small_runs import CPU, resumed, run_through, small_config, small_images, stopped
from tests.runs.parts import begun

pytestmark = pytest.mark.usefixtures("one_thread")

BACKBONE = ("--backbone", "conv-small")
REST = [word for word in TINY if word not in BACKBONE]
"""The small training, whose backbone is that of the weights."""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("images"), example_images(48, size=(8, 8), n_classes=4))


@pytest.fixture(scope="module")
def first(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run from random weights."""
    path = tmp_path_factory.mktemp("first") / "run"
    assert main(["train", str(images), *TINY, "--epochs", "1", "--output", str(path)]) == 0
    return path


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in module.state_dict().items() if "num_batches" not in key}


def training_of(given: str, source: np.ndarray, **settings: Any) -> Training:
    config = small_config(**(settings_of(given) | settings))
    found = open_source(source)
    return Training(config, found, CPU, start=open_start(config, found))


# -- what is used


def test_both_encoders_begin_with_the_weights_and_the_heads_anew(first: Path) -> None:
    training, run = training_of(str(first), small_images()), Run.open(first)
    assert training.network.momentum_encoder is not None
    for encoder in (training.network.encoder, training.network.momentum_encoder):
        known, found = tensors_of(run.network.encoder.backbone), tensors_of(encoder.backbone)
        assert all(torch.equal(known[key], found[key]) for key in known)
        heads = [next(one.projector.parameters()) for one in (encoder, run.network.encoder)]
        assert not torch.equal(*heads)


@pytest.mark.parametrize("fused", [False, True])
def test_at_a_rate_of_0_the_features_stay_what_they_were(fused: bool, first: Path, tmp_path: Path) -> None:
    """BatchNorm keeps the statistics that the weights were trained with, also after a stop."""
    settings: dict[str, Any] = settings_of(str(first)) | {"learning_rate": 0.0, "fused": fused, "compile": False}
    config, source = small_config(**settings), open_source(small_images())
    recorder = begun(tmp_path / "run", config, {"fingerprint": source.fingerprint()})
    training = Training(config, source, CPU, recorder=recorder, start=open_start(config, source))
    before = encode(training.network, training.loader, "features")
    stopped(training, 5)
    again = run_through(resumed(config, tmp_path / "run"))
    assert again.epoch == config.optimisation.epochs
    assert torch.equal(encode(again.network, again.loader, "features"), before)
    projector = again.network.encoder.projector
    assert all(layer.training for layer in projector.modules())  # whose statistics are those of its own embeddings


def test_where_a_layer_is_new_statistics_are_too(tmp_path: Path) -> None:
    torch.save(build_backbone("resnet18", image_size=224).state_dict(), tmp_path / "w.pth")
    given, source = f"timm:resnet18:{tmp_path / 'w.pth'}", open_source(small_images())
    for image_size, is_new in ((32, True), (128, False)):
        config = small_config(weights=given, backbone="resnet18", image_size=image_size)
        network = build.new_network(config, image_size, image_size, open_start(config, source)).train()
        backbone: Any = network.encoder.backbone
        assert backbone.bn1.training == backbone.layer4[1].bn2.training == is_new


def test_fused_updates_train_from_the_weights_too(first: Path) -> None:
    """Both views in one batch: the same losses as one after the other."""
    losses: list[float] = []
    for fused in (False, True):
        training = training_of(str(first), small_images(), fused=fused, compile=False, epochs=1)
        assert bool(training.network.fused) == fused
        run_through(training)
        losses.append(training.metrics[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_features_before_training_are_those_of_lite() -> None:
    """The whole way: weights, size and normalisation are those with which the encoder is measured."""
    pictures = np.random.default_rng(0).integers(0, 255, (6, 64, 64, 3), dtype=np.uint8)
    training = training_of("lite", pictures, image_size=64, batch_size=6, n_components=2, embedding_dim=8)
    model = open_model("lite", image_size=64)
    assert training.clean_view.normalisation == model.view.normalisation == (lite.MEAN, lite.STD)
    assert all(view.normalisation == (lite.MEAN, lite.STD) for view in training.views)
    ours = encode(training.network, training.loader, "features")
    with torch.no_grad():
        x = next(training.loader.clean(0, 6))[1]
        theirs = torch.nn.functional.normalize(model.backbone(x), dim=1)
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_a_stem_for_small_images_starts_anew_and_is_named(tmp_path: Path) -> None:
    torch.save(build_backbone("resnet10t", image_size=224).state_dict(), tmp_path / "w.pth")
    given = f"timm:resnet10t:{tmp_path / 'w.pth'}"
    source = open_source(small_images())
    config = small_config(weights=given, backbone="resnet10t", image_size=32)
    start = open_start(config, source)
    assert start is not None
    # Its deep stem is 3 x 3 already, so that only the strides change and all fits.
    assert start.sentence == "The backbone starts from timm:resnet10t:w.pth; the heads start from random weights."
    torch.save(build_backbone("resnet18", image_size=224).state_dict(), tmp_path / "v.pth")
    config = small_config(weights=f"timm:resnet18:{tmp_path / 'v.pth'}", backbone="resnet18", image_size=32)
    start = open_start(config, source)
    assert start is not None
    assert "conv1.weight" not in start.tensors
    assert start.sentence == (
        "The backbone starts from timm:resnet18:v.pth, except for what does not fit: conv1.weight (64 x 3 x 7 x 7 "
        "there, 64 x 3 x 3 x 3 here); the heads start from random weights too."
    )


def test_what_a_checkpoint_lacks_is_not_taken_for_known(tmp_path: Path) -> None:
    state = build_backbone("resnet18", image_size=224).state_dict()
    del state["bn1.weight"]
    torch.save(state, tmp_path / "w.pth")
    config = small_config(weights=f"timm:resnet18:{tmp_path / 'w.pth'}", backbone="resnet18", image_size=128)
    start = open_start(config, open_source(small_images()))
    assert start is not None
    assert "bn1.weight" not in start.tensors
    assert "bn1.weight (not there)" in start.sentence


def test_torchvision_calls_the_layers_of_a_resnet_as_timm_does(tmp_path: Path) -> None:
    from torchvision.models import resnet18

    torch.save(resnet18().state_dict(), tmp_path / "w.pth")
    given = f"torchvision:resnet18:{tmp_path / 'w.pth'}"
    config = small_config(weights=given, backbone="resnet18", image_size=128)
    start = open_start(config, open_source(small_images()))
    assert start is not None
    assert start.sentence == "The backbone starts from torchvision:resnet18:w.pth; the heads start from random weights."


# -- normalisation


def test_a_run_keeps_the_normalisation_of_its_weights(tmp_path: Path, capsys: Any) -> None:
    """In its checkpoint, in its file, in an export, and in a run that starts from it."""
    few = write_folder(tmp_path, example_images(12, size=(8, 8), n_classes=2))
    run, shorter = tmp_path / "run", ["--image-size", "32", "--batch-size", "6", "--n-components", "4", "--epochs", "1"]
    assert main(["train", str(few), "--weights", "lite", *REST, *shorter, "--output", str(run)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "The backbone starts from lite; the heads start from random weights." in said
    assert Run.open(run).config.network.weights == "lite"
    assert Run.open(run).view.normalisation == (lite.MEAN, lite.STD)
    facts = Run.unfinished(run).checkpoint().facts
    assert facts["normalisation"] == [list(lite.MEAN), list(lite.STD)]
    # Resumed without the weights, of which the checkpoint needs nothing.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lite, "_file", lambda: pytest.fail("the weights were opened again"))
        assert main(["train", "--resume", str(run), "--epochs", "2", "--device", "cpu"]) == 0
    assert Run.open(run).view.normalisation == (lite.MEAN, lite.STD)
    assert open_model(str(run)).record["started_from"] == "lite"
    second = training_of(str(run), example_images(32, size=(8, 8), n_classes=4).images)
    assert second.clean_view.normalisation == (lite.MEAN, lite.STD)
    assert second.clean_view.size == 32
    folder = tmp_path / "exported"
    folder.mkdir()
    write_encoder(folder, Run.open(run))
    assert json.loads((folder / "config.json").read_text())["pretrained_cfg"]["mean"] == list(lite.MEAN)
    assert "It started from `lite`;" in (folder / "README.md").read_text()
    assert Run.open(folder).view.normalisation == (lite.MEAN, lite.STD)


def test_new_weights_see_pixels_as_before(first: Path) -> None:
    assert Run.open(first).view.mean == (0.5, 0.5, 0.5)  # the augmentation of digits
    source = open_source(np.zeros((8, 32, 32, 3), dtype=np.uint8))
    assert build.clean_view(small_config(), source).mean == (0.485, 0.456, 0.406)


# -- settings


def test_the_backbone_is_that_of_the_weights_unless_given(first: Path) -> None:
    config = parse(["train", "x", "--weights", "timm:resnet34.a1_in1k", "--epochs", "3"])
    assert config.preset == "photos"  # made for known weights
    assert (config.network.backbone, config.network.weights) == ("resnet34", "timm:resnet34.a1_in1k")
    assert config.optimisation.epochs == 3
    config = parse(["train", "x", "--weights", "lite", "--preset", "cifar"])
    assert (config.preset, config.network.backbone) == ("cifar", "tf_efficientnet_lite0")
    config = parse(["train", "x", f"--weights={first}"])
    assert (config.network.backbone, config.views.image_size) == ("conv-small", 8)
    config = parse(["train", "x", "--weights", "none", "--preset", "photos"])
    assert (config.network.backbone, config.network.weights) == ("tf_efficientnet_lite0", "none")
    assert parse(["train", "x", "--weights", "none"]).preset == "cifar"


def test_the_estimator_takes_weights(first: Path) -> None:
    small = {"hidden_dim": 32, "embedding_dim": 16, "optimiser": "sgd", "warmup_epochs": 0, "cluster_after": 0.0}
    model = SiamMM(weights=str(first), epochs=1, batch_size=12, n_components=6, settings=small, device="cpu")
    model.fit(small_images())
    assert (model.config_.preset, model.config_.network.backbone) == ("photos", "conv-small")
    assert model.config_.network.weights == str(first)
    assert model.config_.views.image_size == 8


def test_names_without_folders() -> None:
    for given, name in {
        "none": "none", "lite": "lite", "timm:resnet18": "timm:resnet18", "/home/me/run": "run",
        "timm:resnet18:/home/me/w.pth": "timm:resnet18:w.pth",
    }.items():  # fmt: skip
        assert public_name(given) == name


def test_a_run_may_be_moved_and_found_from_any_folder(
    first: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(first, tmp_path / "earlier")
    monkeypatch.chdir(tmp_path)
    command = ["train", str(images), "--weights", "earlier", *REST, "--output", "later"]
    assert main(command) == 0
    assert Run.open("later").config.network.weights == str(tmp_path / "earlier")
    shutil.rmtree("earlier")
    assert main(["train", "--resume", "later", "--epochs", "3"]) == 0  # the checkpoint wins
    assert main([*command, "--epochs", "3", "--resume-if-exists"]) == 0


# -- what is refused


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--weights", "nowhere"], "nowhere, but there is no such run; give the folder of one, lite"),
        (["--weights", "lite", "--backbone", "resnet18"], "is of the backbone tf_efficientnet_lite0, but"),
        (["--weights", "timm:resnet18x"], "timm has no model 'resnet18x'; did you mean timm:resnet18"),
        (["--weights", "timm:resnet18:no.pth"], "There is no file"),
    ],
)  # fmt: skip
def test_one_sentence(
    arguments: list[str], sentence: str, images: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sentence in refused(["train", str(images), *REST, *arguments], capsys)
    assert not list(tmp_path.iterdir())


def test_layers_of_another_name_are_refused(tmp_path: Path) -> None:
    from torchvision.models import efficientnet_b0

    torch.save(efficientnet_b0().state_dict(), tmp_path / "w.pth")
    given = f"torchvision:efficientnet_b0:{tmp_path / 'w.pth'}"
    config = small_config(weights=given, backbone="efficientnet_b0", image_size=64)
    with pytest.raises(InputError, match=r"Only 0 of the \d+ tensors of timm's efficientnet_b0 .*; give timm:effic"):
        open_start(config, open_source(small_images()))


def test_weights_that_nobody_opened_are_not_forgotten() -> None:
    with pytest.raises(InputError, match="weights is lite, but they were not opened"):
        Training(PRESETS["photos"], open_source(small_images()), CPU)


def test_a_resumed_run_refuses_other_weights(first: Path, capsys: Any) -> None:
    said = refused(["train", "--resume", str(first), "--weights", "lite"], capsys)
    assert "--weights cannot be changed by --resume (none in the run, lite given)" in said


def test_without_a_network_one_sentence(images: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    said = refused(["train", str(images), "--weights", "timm:resnet10t", *REST], capsys)
    assert "The weights of timm:resnet10t cannot be downloaded (no network); give their file, https://" in said
    assert "/model.safetensors, as timm:resnet10t:FILE, or use lite" in said
    assert len(said) < 260, "short"
