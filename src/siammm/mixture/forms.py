"""The forms in which a mixture takes rows and gives results: arrays, data frames and tensors, and where it computes.

numpy in, numpy out; tensors in, tensors out, on their device.
"""

from __future__ import annotations

# torch and scikit-learn are only partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportMissingTypeStubs=false
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import validate_data
from torch import Tensor

from siammm.core import ranks
from siammm.core.errors import InputError

Matrix = Any
"""An array, a memory-mapped array, a data frame, or a tensor."""


def device_for(X: Matrix, given: str) -> torch.device:
    """Tensors stay where they are; arrays go to the device asked for, or to the GPU if there is one."""
    if isinstance(X, Tensor) and given == "auto":
        return X.device
    if given == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(given)
        torch.empty(0, device=device)
        usable = device.type in ("cpu", "cuda", "mps")
    except (RuntimeError, AssertionError):
        usable, device = False, torch.device("cpu")
    if not usable:
        raise InputError(f"device={given!r} cannot be used here; use 'auto' or 'cpu'.")
    return device


def checked_form(mixture: Any, X: Matrix, *, unit: bool, reset: bool) -> Matrix:
    """Rows of the right shape and type, of any values; ``reset`` takes their number of features as the mixture's.

    ``unit``: whether only directions count, for which a fit needs two features.
    """
    least = 2 if unit else 1
    least_rows = 0 if ranks.active() else 1  # a rank may have no rows, as long as another has some
    if not isinstance(X, Tensor):
        types = [np.float32, np.float64, np.float16]  # float16 is widened chunk by chunk
        sizes: dict[str, Any] = {"ensure_min_samples": least_rows, "ensure_min_features": least if reset else 1}
        try:  # Samples looks for numbers that are not finite, in the same pass that normalises
            return validate_data(mixture, X, reset=reset, dtype=types, ensure_all_finite=False, **sizes)
        except ValueError as error:
            raise InputError(str(error)) from error
    if X.ndim != 2 or X.shape[0] < least_rows or X.shape[1] < least:
        raise InputError(
            f"X has shape {tuple(X.shape)}, but a mixture needs (n_samples, n_features) "
            f"with at least 1 sample and {least} feature{'s' if least > 1 else ''}."
        )
    if X.is_complex() or X.dtype == torch.bool:
        raise InputError(f"X is a tensor of {X.dtype}, but embeddings are real; pass a floating-point tensor.")
    if reset:
        mixture.n_features_in_ = int(X.shape[1])
    elif X.shape[1] != mixture.n_features_in_:
        raise InputError(
            f"X has {X.shape[1]} features, but {type(mixture).__name__} is expecting {mixture.n_features_in_} features "
            f"as input."
        )
    return X


def as_parameter(value: Any, device: torch.device) -> Tensor:
    """A fitted attribute as the components want it."""
    return torch.as_tensor(value, dtype=torch.float64).to(device)


def in_the_form_of(value: Tensor, X: Matrix) -> Any:
    """A result in the form the user works in: a tensor on X's device, or an array."""
    if isinstance(X, Tensor):
        if X.device.type == "mps" and value.dtype == torch.float64:
            value = value.float()
        return value.contiguous().to(X.device)
    return np.array(value.cpu().numpy())  # a copy: a column would keep the whole table alive
