"""A fitted mixture as one ``.safetensors`` file: the arrays, and the settings as JSON in its header. No pickle.

Groups that are known of the mixture are in the same file, so that wherever it goes, new samples can be given theirs.
Files of earlier versions have none, and earlier versions read these files without them.
"""

from __future__ import annotations

# safetensors is only partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
import json
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from siammm.core.errors import StoredFileError
from siammm.core.files import written_whole
from siammm.mixture.group_rule import Groups
from siammm.mixture.merge_tree import Merges

_FORMAT = 1
# The arrays of each kind of mixture, with their number of axes; a spherical variance has one, a diagonal one two.
_ARRAYS: dict[str, dict[str, tuple[int, ...]]] = {
    "VonMisesFisherMixture": {"mean_directions_": (2,), "concentrations_": (1,), "weights_": (1,)},
    "GaussianMixture": {"means_": (2,), "variances_": (1, 2), "weights_": (1,), "data_mean_": (1,)},
}
_LARGEST = float(np.finfo(np.float32).max)
_NUMBERS = ("n_components_", "n_iter_", "converged_", "lower_bound_", "n_features_in_", "data_variance_")

Estimator = TypeVar("Estimator")


def save(mixture: Any, path: Path) -> None:
    """Write a fitted mixture."""
    kind = type(mixture).__name__
    arrays = {name: np.ascontiguousarray(_array(getattr(mixture, name))) for name in _ARRAYS[kind]}
    header: dict[str, Any] = {
        "format": _FORMAT,
        "kind": kind,
        "parameters": _plain(mixture.get_params()),
        "fitted": {name: getattr(mixture, name) for name in _NUMBERS if hasattr(mixture, name)},
        "merges": None,
        "groups": None,
    }
    if mixture.merges_ is not None:
        arrays["merges.linkage"] = mixture.merges_.linkage
        header["merges"] = {"n_components": mixture.merges_.n_components, "n_merges": mixture.merges_.n_merges}
    groups: Groups | None = mixture.groups_
    if groups is not None:
        parts = {"label": groups.label_K, "weight": groups.weight_GD, "offset": groups.offset_G}
        arrays |= {f"groups.{name}": np.ascontiguousarray(part) for name, part in parts.items() if part is not None}
        header["groups"] = {"ratio": float(groups.ratio), "unit": bool(groups.unit)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as scratch:
        save_file(arrays, scratch, metadata={"siammm": json.dumps(header)})


def load(kind: type[Estimator], path: Path) -> Estimator:
    """Read what ``save`` wrote, and refuse anything else."""
    if not path.is_file():
        raise StoredFileError(f"There is no file {path}; give the path of a mixture that was saved with save().")
    try:
        with safe_open(path, framework="numpy") as stored:
            header = dict(json.loads((stored.metadata() or {})["siammm"]))
            arrays = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        text = f"{path} is not a mixture saved by siammm, or it is damaged; save the mixture again."
        raise StoredFileError(text) from error
    if header.get("format") != _FORMAT:
        raise StoredFileError(
            f"{path} has format {header.get('format')!r}, but this version of siammm reads {_FORMAT}; "
            f"use the version that wrote it."
        )
    if header.get("kind") != kind.__name__:
        raise StoredFileError(f"{path} holds a {header.get('kind')}, not a {kind.__name__}; load it with that class.")
    _check_arrays(arrays, header["kind"], path)
    shape = next(arrays[name].shape for name in _ARRAYS[kind.__name__] if name.startswith("mean"))
    try:
        if (header["fitted"]["n_components_"], header["fitted"]["n_features_in_"]) != shape:
            raise ValueError("its header and its arrays are not of one mixture")
        mixture: Any = kind(**header["parameters"])
        if not isinstance(mixture.device, str):
            raise TypeError("device is no text")
        mixture.check_parameters()  # they are used by predict, too
        for name in _ARRAYS[header["kind"]]:
            setattr(mixture, name, arrays[name])
        for name, value in header["fitted"].items():
            if name in _NUMBERS:
                setattr(mixture, name, value)
        merges = header["merges"]
        mixture.merges_ = None if merges is None else Merges(arrays["merges.linkage"], **merges)
        mixture.groups_ = _groups(arrays, header.get("groups"), header["kind"], path)
    except StoredFileError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoredFileError(
            f"{path} is damaged, or from another version of siammm: its header cannot be read; save the mixture again."
        ) from error
    return mixture


def _check_arrays(arrays: dict[str, Any], kind: str, path: Path) -> None:
    for name, axes in _ARRAYS[kind].items():
        array = arrays.get(name)
        if array is None or array.ndim not in axes or not array.size or not (np.abs(array) <= _LARGEST).all():
            raise StoredFileError(f"{path} is damaged: {name} is missing, misshapen or not finite; save it again.")
    if len({arrays[name].shape[0] for name in _ARRAYS[kind] if name != "data_mean_"}) != 1:
        raise StoredFileError(f"{path} is damaged: its arrays disagree on the number of components; save it again.")


def _groups(arrays: dict[str, Any], header: dict[str, Any] | None, kind: str, path: Path) -> Groups | None:
    """The groups that are known of the mixture of these arrays; None if the file has none."""
    if header is None:
        return None
    k, d = next(arrays[name].shape for name in _ARRAYS[kind] if name.startswith("mean"))
    parts = {name: arrays.get(f"groups.{name}") for name in ("label", "weight", "offset")}
    is_found = parts["weight"] is not None or parts["offset"] is not None
    g = k if parts["weight"] is None else len(parts["weight"])
    shapes = {"label": (k,), "weight": (g, d), "offset": (g,)} if is_found else {"label": (k,)}
    for name, shape in shapes.items():
        part = parts[name]
        if part is None or part.shape != shape or not part.size or not np.isfinite(part).all():
            raise StoredFileError(
                f"{path} is damaged: groups.{name} is missing, misshapen or not finite; save it again."
            )
    label_K: Any = parts["label"].astype(np.int64)  # pyright: ignore[reportOptionalMemberAccess] - checked above
    if not 0 <= label_K.min() <= label_K.max() < g:
        raise StoredFileError(f"{path} is damaged: a component is in a group that is not there; save it again.")
    return Groups(label_K, float(header["ratio"]), parts["weight"], parts["offset"], bool(header["unit"]))


def _array(value: Any) -> np.ndarray[Any, Any]:
    return value.detach().cpu().numpy() if hasattr(value, "detach") else np.asarray(value)


def _plain(parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters that JSON can hold, numpy's numbers as Python's; not an array or a mixture given as ``init``."""
    plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in parameters.items()}
    return {name: value for name, value in plain.items() if isinstance(value, (str, int, float, type(None)))}
