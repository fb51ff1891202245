"""Weights from other people's checkpoints: found wherever they lie in the file, and never unpickled.

A checkpoint nests its weights in its own way: {"state_dict": {"module.encoder_q.conv1.weight": ...}}. The file is laid
flat, and of all places in it that hold the model's first tensors the one is taken that holds the most of them, by name
and shape. Weights of an ``nn.Sequential`` of the model's children, which are called by number, are found too.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from siammm.core.errors import InputError, StoredFileError

SUFFIXES = (".safetensors", ".pth", ".pt", ".tar", ".ckpt", ".bin")

# Tensors of the model that are looked for to find out where in a file it lies.
_ANCHORS = 8
# What the slow copy of an encoder is called, which most papers do not evaluate.
_SLOW = ("momentum", "encoder_k", "target", "teacher", "ema")
# A network with more random layers than that measures nothing that anybody means.
LEAST_SHARE = 0.9
_SHOWN = 4
# Counted by BatchNorm and used by nothing that is measured.
COUNTER = "num_batches_tracked"


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """How well a checkpoint fitted a model."""

    prefix: str
    """Where in the file the weights were, such as ``state_dict.module.encoder_q.``."""
    tensors_matched: int
    """Tensors of the model that were found."""
    tensors_missing: list[str]
    """Tensors of the model that were not found, or have another shape there; they keep their random values."""
    tensors_unused: list[str]
    """Tensors in the same place of the file that the model has no use for, such as its heads."""

    def sentence(self, path: Path) -> str | None:
        """What the user should know before believing the figures; None where all is well."""
        if not self.tensors_missing:
            return None
        n, names = len(self.tensors_missing), _listed(self.tensors_missing)
        return f"{n} of the model's {self.tensors_matched + n} tensors are not in {path} and stay random: {names}."


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, by the keys that lead to them, joined with dots."""
    if not path.is_file():
        raise StoredFileError(f"There is no file {path}; check the path of the weights.")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise StoredFileError(
            f"{path} holds objects other than tensors, which are never unpickled; save only its state_dict."
        ) from error
    except (SafetensorError, OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
        raise StoredFileError(f"{path} is not a complete file of weights ({reason}); write it again.") from error
    tensors = dict(_flat(stored, ""))
    if not tensors:
        raise StoredFileError(f"{path} holds no tensors; give a checkpoint, or its state_dict.")
    return tensors


def _flat(value: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield prefix.removesuffix("."), value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _flat(part, f"{prefix}{key}.")


def load_matching(
    model: nn.Module, tensors: Mapping[str, Tensor], *, name: str, path: Path, prefer_slow: bool = False
) -> Loaded:
    """Give a model the weights that fit it; refuse where most of its tensors are not there.

    Of two places that fit equally well the online encoder's is taken, or with ``prefer_slow`` the momentum encoder's.
    """
    wanted = {key: tensor for key, tensor in model.state_dict().items() if not key.endswith(COUNTER)}
    best: tuple[int, bool, str, dict[str, str]] | None = None
    for spelling in ({key: key for key in wanted}, _by_number(model, wanted)):
        for prefix in _prefixes(spelling, tensors):
            found = {
                key: prefix + there
                for key, there in spelling.items()
                if prefix + there in tensors and tensors[prefix + there].shape == wanted[key].shape
            }
            suits = any(word in prefix.lower() for word in _SLOW) == prefer_slow
            if best is None or (len(found), suits) > best[:2]:
                best = (len(found), suits, prefix, found)
    found = {} if best is None else best[3]
    missing = [key for key in wanted if key not in found]
    if len(found) < LEAST_SHARE * len(wanted):
        raise InputError(
            f"Only {len(found)} of the {len(wanted)} tensors of {name} are in {path} with the same name and shape "
            f"(not {_listed(missing)}; the file has {_listed(list(tensors))}); give a checkpoint of {name}, or name "
            "the model that it is of."
        )
    assert best is not None
    model.load_state_dict({key: tensors[there] for key, there in found.items()}, strict=False)
    used = set(found.values())
    unused = [key for key in tensors if key.startswith(best[2]) and key not in used and not key.endswith(COUNTER)]
    return Loaded(prefix=best[2], tensors_matched=len(found), tensors_missing=missing, tensors_unused=unused)


def shape_of(tensors: Mapping[str, Tensor], ending: str) -> tuple[int, ...] | None:
    """The shape of the first tensor whose name ends so."""
    return next((tuple(t.shape) for key, t in tensors.items() if f".{key}".endswith(f".{ending}")), None)


def _by_number(model: nn.Module, wanted: Mapping[str, Tensor]) -> dict[str, str]:
    """The names that the tensors have in a Sequential of the model's children."""
    number = {child: str(i) for i, (child, _) in enumerate(model.named_children())}
    parts = {key: key.partition(".") for key in wanted}
    return {key: f"{number[first]}.{rest}" for key, (first, _, rest) in parts.items() if rest and first in number}


def _prefixes(spelling: Mapping[str, str], tensors: Mapping[str, Tensor]) -> list[str]:
    """The places in the file at which one of the first tensors is found, in the order of the file."""
    anchors = list(spelling.values())[:_ANCHORS]
    found = (key.removesuffix(anchor) for key in tensors for anchor in anchors if f".{key}".endswith(f".{anchor}"))
    return list(dict.fromkeys(found))


def _listed(keys: list[str]) -> str:
    more = f" and {len(keys) - _SHOWN:,} more" if len(keys) > _SHOWN else ""
    return ", ".join(keys[:_SHOWN]) + more
