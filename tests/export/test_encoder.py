"""The encoder in a folder: timm loads it, SiamMM loads it, the hub is given it; and the card holds no traps."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import timm.data
import torch
import yaml
from huggingface_hub import HfApi, ModelHubMixin, constants

from siammm import SiamMM
from siammm.core.errors import InputError, SiamMMError
from siammm.data.augment import clean
from siammm.export.as_timm import repeated
from siammm.export.card import as_code, is_edited, model_card
from siammm.export.encoder import write_encoder
from siammm.runs import files
from siammm.runs.run import Run
from tests.export.runs import made_run, pictures, write_images
from tests.runs.parts import changed

HOSTILE = '"><img src=x onerror=alert(1)>\n---\nlicense: mit\n```\n</script>\u202e`\\'


@pytest.mark.parametrize(
    ("backbone", "size", "choice"),
    [
        ("conv-small", 8, "online"),
        ("conv-small", 8, "momentum"),
        ("resnet18", 16, "momentum"),
        ("vit_tiny_patch16_224", 32, "online"),
    ],
)
def test_timm_loads_the_folder(backbone: str, size: int, choice: Any, tmp_path: Path) -> None:
    own = made_run(backbone, size)
    momentum = own.network.momentum_encoder
    assert momentum is not None
    with torch.no_grad():  # as training leaves them: two networks
        for parameter in momentum.parameters():
            parameter.mul_(1.05)
    written = write_encoder(tmp_path, own, choice=choice)
    assert written is not None
    model = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = clean(torch.from_numpy(pictures(4, size)).permute(0, 3, 1, 2), size, own.view)
    encoder = own.network.encoder if choice == "online" else momentum
    with torch.no_grad():
        torch.testing.assert_close(model(repeated(x, written.repeat)), encoder.features(x), rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """A ResNet for small images."""
    own, folder = made_run("resnet18", 32), tmp_path_factory.mktemp("written")
    write_encoder(folder, own)
    return own, folder


def test_timm_reads_how_images_are_prepared(written: tuple[Run, Path]) -> None:
    own, folder = written
    model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    timm_data: Any = timm.data  # only partly typed
    data = timm_data.resolve_data_config(model=model)
    assert tuple(data["input_size"]) == (3, 128, 128)
    assert data["interpolation"] == "nearest"
    assert (data["crop_pct"], tuple(data["mean"]), tuple(data["std"])) == (1.0, own.view.mean, own.view.std)
    # timm's own transform of an image of 32 pixels repeats its pixels, and so gives our features.
    from PIL import Image

    image = pictures(1, 32)[0]
    x = timm_data.create_transform(**data, is_training=False)(Image.fromarray(image))
    ours = clean(torch.from_numpy(image).permute(2, 0, 1)[None], 32, own.view)
    with torch.no_grad():
        features = own.network.encoder.features(ours)
        torch.testing.assert_close(model.eval()(torch.as_tensor(x)[None]), features, rtol=1e-5, atol=1e-5)


def test_timm_can_add_a_classifier_to_train(written: tuple[Run, Path]) -> None:
    own, folder = written
    model = timm.create_model(f"local-dir:{folder}", pretrained=True, num_classes=10).eval()
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert model(repeated(x, 4)).shape == (2, 10)
        pooled = model.forward_head(model.forward_features(repeated(x, 4)), pre_logits=True)  # pyright: ignore[reportCallIssue]
        torch.testing.assert_close(pooled, own.network.encoder.features(x), rtol=1e-5, atol=1e-5)


def test_a_backbone_that_timm_cannot_describe_is_for_siammm_alone(tmp_path: Path) -> None:
    own = made_run("test_resnet", 32)
    assert write_encoder(tmp_path, own) is None
    assert not (tmp_path / files.TIMM_WEIGHTS).exists()
    assert "timm.create_model" not in (tmp_path / files.CARD).read_text("utf-8")
    loaded = SiamMM.from_pretrained(tmp_path, device="cpu")
    assert loaded.predict(pictures(3, 32)).shape == (3,)


def test_nothing_tells_of_the_folders_of_the_machine(tmp_path: Path) -> None:
    own = made_run("conv-small", 8)
    own = changed(own, config=replace(own.config, output=Path("/home/me/secret"), resume=Path("/home/me/secret")))
    write_encoder(tmp_path, own)
    for path in tmp_path.iterdir():
        assert b"/home/me" not in path.read_bytes(), path.name


# -- SiamMM ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images"), n=40, seed=3)


def test_what_was_saved_predicts_the_same(run_folder: Path, images: Path, tmp_path: Path) -> None:
    model = SiamMM.load(run_folder, device="cpu")
    model.save_pretrained(tmp_path / "saved")
    assert {path.name for path in (tmp_path / "saved").iterdir()} == set(files.PRETRAINED_NAMES)
    loaded = SiamMM.from_pretrained(tmp_path / "saved", device="cpu")
    assert isinstance(loaded, ModelHubMixin)
    np.testing.assert_array_equal(loaded.embed(images), model.embed(images))
    np.testing.assert_array_equal(loaded.transform(images), model.transform(images))
    np.testing.assert_array_equal(loaded.predict(images), model.predict(images))
    np.testing.assert_array_equal(loaded.score_samples(images), model.score_samples(images))
    assert loaded.n_clusters_ == model.n_clusters_
    assert loaded.get_params() == model.get_params()


def test_groups_go_with_the_encoder(grouped_folder: Path, images: Path, tmp_path: Path) -> None:
    model = SiamMM.load(grouped_folder, device="cpu")
    model.save_pretrained(tmp_path / "saved")
    loaded = SiamMM.from_pretrained(tmp_path / "saved", device="cpu")
    assert (loaded.n_groups_, loaded.groups_.is_found) == (model.n_groups_, True)
    np.testing.assert_array_equal(loaded.predict_group(images), model.predict_group(images))
    np.testing.assert_array_equal(loaded.predict_group_proba(images), model.predict_group_proba(images))
    text = (tmp_path / "saved" / files.CARD).read_text("utf-8")
    assert f"**10 clusters in {model.n_groups_} groups**" in text
    assert "on 120 images of" in text
    assert 'groups = model.predict_group("a/folder/of/images")' in text
    config = json.loads((tmp_path / "saved" / files.CONFIG).read_text("utf-8"))
    assert config["siammm"]["n_groups"] == model.n_groups_


def test_saving_again_keeps_a_card_that_was_edited(run_folder: Path, tmp_path: Path) -> None:
    model = SiamMM.load(run_folder, device="cpu")
    model.save_pretrained(tmp_path)
    first = (tmp_path / files.CARD).read_text("utf-8")
    model.save_pretrained(tmp_path)
    assert (tmp_path / files.CARD).read_text("utf-8") == first
    edited = first.replace("# Fill in the licence, as in: license: mit", "license: cc-by-4.0")
    (tmp_path / files.CARD).write_text(edited, "utf-8")
    model.save_pretrained(tmp_path)
    assert (tmp_path / files.CARD).read_text("utf-8") == edited


def test_a_run_is_never_written_over(run_folder: Path) -> None:
    before = (run_folder / files.CONFIG).read_bytes()
    with pytest.raises(InputError, match=r"is a run folder, whose config\.json would be replaced"):
        SiamMM.load(run_folder, device="cpu").save_pretrained(run_folder)
    assert (run_folder / files.CONFIG).read_bytes() == before


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder, r"is not a run folder: it has no encoder\.safetensors"),
        (lambda folder: folder / "nowhere", "is neither a folder nor a model on the hub"),
    ],
)
def test_what_is_no_export_is_refused(make: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(SiamMMError, match=message) as error:
        SiamMM.from_pretrained(make(tmp_path), local_files_only=True)
    assert "\n" not in str(error.value)


def test_the_hub_is_given_the_folder(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mixin's own code up to the two calls that reach the network."""
    pushed: dict[str, Any] = {}

    class Address:
        repo_id = "me/birds"

    def create_repo(self: HfApi, repo_id: str, **kwargs: Any) -> Address:
        pushed["created"] = repo_id
        return Address()

    def upload_folder(self: HfApi, *, folder_path: Path, repo_id: str, **kwargs: Any) -> str:
        shutil.copytree(folder_path, tmp_path / "hub")
        pushed["repo_id"] = repo_id
        return "https://huggingface.co/me/birds"

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    model = SiamMM.load(run_folder, device="cpu")
    assert model.push_to_hub("me/birds") == "https://huggingface.co/me/birds"
    assert pushed == {"created": "me/birds", "repo_id": "me/birds"}
    assert {path.name for path in (tmp_path / "hub").iterdir()} == set(files.PRETRAINED_NAMES)
    assert SiamMM.from_pretrained(tmp_path / "hub", device="cpu").n_clusters_ == model.n_clusters_


def test_a_repository_of_the_hub(
    run_folder: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both libraries read the hub's cache by a repository's name, as they would after a download."""
    model = SiamMM.load(run_folder, device="cpu")
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--me--birds"
    model.save_pretrained(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    loaded = SiamMM.from_pretrained("me/birds", cache_dir=tmp_path, local_files_only=True, device="cpu")
    np.testing.assert_array_equal(loaded.predict(images), model.predict(images))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    encoder = timm.create_model("hf-hub:me/birds", pretrained=True, cache_dir=tmp_path).eval()
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model.network_.encoder.features(x)
        torch.testing.assert_close(encoder(repeated(x, 4)), ours, rtol=1e-5, atol=1e-5)


# -- the card ----------------------------------------------------------------------------------------------------------


def test_the_card_says_what_it_is() -> None:
    own = made_run("conv-small", 8)
    text = model_card(own, None, "online")
    assert "`noise`" in text
    assert "**7 clusters**" in text
    assert "groups" not in text
    assert "60 images" in text
    assert not is_edited(text)
    assert is_edited(text.replace("7 clusters", "8 clusters"))
    assert is_edited("# mine\n")


def named(data: str) -> Run:
    own = made_run("conv-small", 8)
    return changed(own, config=replace(own.config, data=data))


def test_hostile_names_stay_names(tmp_path: Path) -> None:
    own = named(f"/home/me/{HOSTILE}")
    write_encoder(tmp_path, own)
    text = (tmp_path / files.CARD).read_text("utf-8")
    _, front, body = re.split(r"^---$", text, maxsplit=2, flags=re.MULTILINE)
    assert set(yaml.safe_load(front)) == {"library_name", "pipeline_tag", "tags"}
    assert "onerror" in model_card(named('<img src=x onerror="x">'), None, "online")
    # What is outside code and our own comment holds no markup of theirs.
    outside = re.sub(r"(?s)(`+).*?\1(?!`)", "", body)
    outside = re.sub(r"<!-- written by siammm: \w+ -->", "", outside)
    assert "<" not in outside
    assert "\u202e" not in text
    assert json.loads((tmp_path / files.CONFIG).read_text("utf-8"))["num_classes"] == 0


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("photos", "`photos`"),
        ("a`b", "`` a`b ``"),
        ("a``b`", "``` a``b` ```"),
        ("two\nlines", "`two\\nlines`"),
        ("left\u202eright", "`left\\u202eright`"),
        ("", "`  `"),
        ("Größe 写真", "`Größe 写真`"),
    ],
)
def test_names_as_code(name: str, code: str) -> None:
    assert as_code(name) == code
