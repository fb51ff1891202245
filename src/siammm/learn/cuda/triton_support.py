"""Triton, where it is: what all kernels of training share.

It comes with torch on Linux alone, so everything here can be imported without it. Triton's own types do not describe
what its compiler accepts: its names are Any.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

triton: Any
tl: Any
try:
    triton = importlib.import_module("triton")
    tl = importlib.import_module("triton.language")
except ImportError:  # pragma: no cover - Triton comes with torch on Linux; elsewhere torch's own layers serve
    triton = tl = None


def available() -> bool:
    """Whether the kernels can run in this process."""
    return triton is not None and (torch.cuda.is_available() or interpreted())


def interpreted() -> bool:
    """Whether Triton's interpreter runs them, on whatever device."""
    return triton is not None and os.environ.get("TRITON_INTERPRET") == "1"


def jit(function: Any) -> Any:
    """A kernel, or the plain function where there is no Triton to compile it."""
    return triton.jit(function) if triton is not None else function
