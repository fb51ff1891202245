"""Checkpoints: atomic, verified, no pickle.

One ``.safetensors`` file holds every tensor of a run, its numbers as JSON in the header, and a digest of both. It is
written beside its name, read back, and only then moved into place; the one before is kept until the next, if it is
whole. So a run that is killed at any moment, also while saving, leaves a checkpoint that loads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from siammm.core.errors import StoredFileError
from siammm.core.files import is_leftover, unwritable, written_whole

LAST, PREVIOUS = "last.safetensors", "previous.safetensors"
_FORMAT = 1

# Files that this process has read to the end, by what changes when somebody writes to them.
_whole: dict[Path, tuple[int, ...]] = {}


class NewerFormatError(StoredFileError):
    """A checkpoint of a later version: whole, but not for this version to read or replace."""


def save(folder: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Path:
    """Write a checkpoint as the folder's last one; the last one becomes the previous."""
    stored = {name: tensor.detach().to("cpu").contiguous().clone() for name, tensor in tensors.items()}
    text = json.dumps(dict(facts), allow_nan=True)
    header = {"format": str(_FORMAT), "facts": text, "digest": digest(stored, text)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in list(folder.iterdir()):  # by a process that was killed while it saved
            if is_leftover(left.name, {LAST}):
                left.unlink(missing_ok=True)
        # A damaged file is replaced. In the place of the one before it would cost the only good one.
        previous = folder / PREVIOUS if _is_whole(folder / LAST) else None
        with written_whole(folder / LAST, previous=previous) as scratch:
            save_file(stored, scratch, metadata=header)
            read(scratch)
        _whole[folder / LAST] = _state(folder / LAST)
    except (OSError, SafetensorError) as error:  # a full disk is either, depending on who was writing
        raise unwritable(f"The checkpoint in {folder}", error, "make room and resume") from error
    return folder / LAST


class Loaded(NamedTuple):
    """A checkpoint that is whole."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    path: Path
    skipped: str | None = None
    """Why the last one was not taken, where it was not."""


def exists(folder: Path) -> bool:
    """Whether there is a checkpoint, whole or not."""
    return any((folder / name).is_file() for name in (LAST, PREVIOUS))


def load(folder: Path) -> Loaded:
    """The last checkpoint that is whole. One of a later version is refused: the one before it would be a step back."""
    problems: list[StoredFileError] = []
    for path in (folder / LAST, folder / PREVIOUS):
        if not path.is_file():
            continue
        try:
            state = _state(path)
            tensors, facts = read(path)
            _whole[path] = state
            return Loaded(tensors, facts, path, skipped=str(problems[0]) if problems else None)
        except NewerFormatError:
            raise
        except StoredFileError as error:
            problems.append(error)
    if problems:
        raise problems[0]
    raise StoredFileError(
        f"There is no checkpoint in {folder}; the run was stopped before its first one: start a new run."
    )


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """One checkpoint, refused unless every byte is as it was written."""
    try:
        with safe_open(path, framework="pt") as stored:
            header = stored.metadata() or {}
            _check_format(path, header)
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - not a mapping
        text = header["facts"]
        facts = dict(json.loads(text))
    except StoredFileError:
        raise
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise StoredFileError(f"{path} is not a checkpoint of siammm, or it is damaged.") from error
    if header.get("digest") != digest(tensors, text):
        raise StoredFileError(f"{path} is damaged: its contents are not what was written.")
    return tensors, facts


def _check_format(path: Path, header: Mapping[str, str]) -> None:
    stored = header.get("format", "")
    if stored == str(_FORMAT):
        return
    if stored.isascii() and stored.isdigit() and int(stored) > _FORMAT:
        raise NewerFormatError(
            f"{path} has format {stored}, but this version of siammm reads {_FORMAT}; resume with the version that "
            "wrote it."
        )
    raise StoredFileError(f"{path} is not a checkpoint of siammm, or it is damaged: its format is {stored!r}.")


def _is_whole(path: Path) -> bool:
    """Whether a checkpoint is there and whole; read again only if this process has not, or somebody changed it."""
    if not path.is_file():
        return False
    if _whole.get(path) == _state(path):
        return True
    try:
        read(path)
    except NewerFormatError:
        raise
    except StoredFileError:
        return False
    return True


def _state(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def optimiser_tensors(optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state, one tensor per name: <number of the parameter>.<name of the buffer>."""
    state = optimiser.state_dict()["state"]
    return {
        f"{number}.{name}": value if isinstance(value, Tensor) else torch.tensor(value)
        for number, buffers in state.items()
        for name, value in buffers.items()
        if value is not None
    }


def restore_optimiser(optimiser: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put back what ``optimiser_tensors`` took, in place; rates and other settings stay the optimiser's own.

    In place, because the fused optimisers need the memory layout of the parameters, which a file does not keep, and
    because a captured update keeps reading the tensors it was captured with.
    """
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    try:
        for key, value in tensors.items():
            number, name = key.split(".", 1)
            optimiser.state[parameters[int(number)]][name].copy_(value)
    except (KeyError, IndexError, ValueError, RuntimeError) as error:
        raise StoredFileError(
            "The checkpoint is of another optimiser; resume with the settings it was made with."
        ) from error


def restore_module(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put back a module's parameters and buffers, all of them."""
    try:
        module.load_state_dict(dict(tensors), strict=True)
    except RuntimeError as error:
        raise StoredFileError(
            "The checkpoint is of another network; resume with the settings it was made with."
        ) from error


def grouped(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors under ``prefix/``, without it."""
    return {name[len(prefix) + 1 :]: value for name, value in tensors.items() if name.startswith(f"{prefix}/")}


def with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors named ``prefix/...``."""
    return {f"{prefix}/{name}": value for name, value in tensors.items()}


def digest(tensors: Mapping[str, Tensor], text: str) -> str:
    """A sha256 of tensors on the CPU, with their names, and of a text."""
    state = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        state.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()
