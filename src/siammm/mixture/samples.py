"""The rows that a mixture is fitted to, in chunks on the compute device, wherever they are stored.

A matrix may be a tensor, an array, or a memory-mapped file larger than memory. If it fits, it stays on the device,
normalised once; otherwise it is read, moved and normalised chunk by chunk in every pass.

Under ``torch.distributed`` every rank holds its own shard. Rows are numbered across ranks, so that a draw of rows does
not depend on the number of ranks.
"""

from __future__ import annotations

# torch is only partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from siammm.core import ranks
from siammm.core.errors import InputError, ZeroRowWarning
from siammm.mixture.search.eightbit import Bytes

# A memory-mapped file, or any matrix larger than this share of the device's free memory, is streamed.
_RESIDENT_SHARE = 0.5
_STREAM_BYTES = 64 * 2**20
# Up to this many rows, a draw is the start of a permutation of all rows.
_PERMUTED_ROWS = 2**24


class Samples:
    """Rows of a matrix as floating-point chunks on one device, each scaled to unit length if ``unit``."""

    def __init__(self, X: Tensor | np.ndarray[Any, Any], *, device: torch.device, unit: bool, name: str = "X") -> None:
        self._source, self._unit, self._name = X, unit, name
        self.device = device
        # Parameters are float64, which Apple's GPUs do not have.
        self.parameter_device = torch.device("cpu") if device.type == "mps" else device
        self.n_rows, self.n_columns = int(X.shape[0]), int(X.shape[1])
        self.dtype = _compute_dtype(X, device)
        self._warned = False
        self._shift: Tensor | None = None
        self._bytes: Bytes | None = None
        self._resident: Tensor | None = None
        if _fits(X, self.dtype, device):
            self._resident = self._prepared(X, 0)
        else:
            for _ in self.chunks(self._stream_rows()):
                pass  # one pass finds unusable rows before any other work is done
        self.n_total, self.first_row = self.n_rows, 0

    def join_ranks(self) -> None:
        """Make these rows a shard of all ranks' rows. Every rank must take part."""
        counts = ranks.all_gather_counts(self.n_rows, self.device)
        columns = ranks.all_gather_counts(self.n_columns, self.device)
        widths = ranks.all_gather_counts(self.dtype.itemsize, self.device)
        if len(set(columns)) > 1 or len(set(widths)) > 1 or not sum(counts):
            sizes = zip(counts, columns, widths, strict=True)
            kinds = ", ".join(f"{rows} x {d} float{8 * width}" for rows, d, width in sizes)
            raise InputError(
                f"{self._name} is {kinds} by rank, but the shards must have the same number of features, the same "
                f"precision, and at least one row in all."
            )
        self.n_total = sum(counts)
        self.first_row = sum(counts[: ranks.rank()])

    @property
    def resident(self) -> Tensor | None:
        """All rows at once, if they stay on the device."""
        return self._resident

    def rows(self) -> Tensor:
        """All rows, prepared: for small matrices."""
        return torch.cat([chunk for _, chunk in self.chunks(self.n_rows)])

    def low_precision(self, start: int, count: int) -> Bytes | None:
        """Some rows as int8, if all rows stay on the device; they need a quarter of the rows' memory."""
        if self._resident is None:
            return None
        if self._bytes is None:
            self._bytes = Bytes.of(self._resident)
        return self._bytes[start : start + count]

    def centre(self, shift_D: Tensor) -> None:
        """Subtract this from every row from now on, which avoids differences of large numbers."""
        self._shift = shift_D.to(self.device, self.dtype)
        if self._resident is not None:
            self._resident, self._bytes = self._resident - self._shift, None

    def chunks(self, rows: int) -> Iterator[tuple[int, Tensor]]:
        """All rows in order, in chunks of at most ``rows``, each with the number of its first row."""
        if self._resident is not None:
            for start in range(0, self.n_rows, rows):
                yield start, self._resident[start : start + rows]
            return
        for outer in range(0, self.n_rows, self._stream_rows()):
            block = self._prepared(self._source[outer : outer + self._stream_rows()], outer)
            for start in range(0, block.shape[0], rows):
                yield outer + start, block[start : start + rows]

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """A random subset of all ranks' rows without replacement, the same on every rank."""
        count = min(count, self.n_total)
        if count == self.n_total:
            chosen = torch.arange(count)
        elif self.n_total <= _PERMUTED_ROWS:
            chosen = torch.randperm(self.n_total, generator=generator)[:count].sort().values
        else:  # a permutation would be far larger than the draw: draw some more, without repeats
            chosen = torch.randint(self.n_total, (count + count // 4 + 16,), generator=generator).unique()
            chosen = chosen[torch.randperm(chosen.numel(), generator=generator)[:count]].sort().values
        mine = chosen[(chosen >= self.first_row) & (chosen < self.first_row + self.n_rows)] - self.first_row
        return ranks.all_gather_rows(self._take(mine), self.device)

    def _take(self, index: Tensor) -> Tensor:
        if self._resident is not None:
            return self._resident[index.to(self.device)]
        source = self._source
        return self._prepared(source[index.to(source.device) if isinstance(source, Tensor) else index.numpy()], 0)

    def _stream_rows(self) -> int:
        return max(1, _STREAM_BYTES // max(1, self.n_columns * 4))

    def _prepared(self, block: Tensor | np.ndarray[Any, Any], first: int) -> Tensor:
        """One block on the device in the compute type, checked, unit length if asked, centred if asked."""
        if isinstance(block, Tensor):
            rows = block.detach().to(self.device, self.dtype)
        else:
            plain = np.ascontiguousarray(block)
            plain = plain if plain.flags.writeable else plain.copy()  # torch does not share read-only memory
            rows = torch.from_numpy(plain).to(self.device, self.dtype)
        _refuse_not_finite(rows, first, self._name)
        if self._unit:
            length = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
            if bool(((length > 1e18) | (length < 1e-18)).any()):  # the squares of such numbers are out of range
                rows = rows / rows.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
                length = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
            if bool((length == 0).any()) and not self._warned:
                self._warned = True
                _warn_of_zeros(length, first, self._name)
            rows = rows / length.clamp_min(torch.finfo(length.dtype).tiny)
        else:
            _refuse_too_large(rows, first, self._name)
        return rows if self._shift is None else rows - self._shift


def _compute_dtype(X: Tensor | np.ndarray[Any, Any], device: torch.device) -> torch.dtype:
    """float64 for float64 input, if the device has it; float32 for everything else."""
    double = X.dtype == torch.float64 if isinstance(X, Tensor) else X.dtype == np.float64
    return torch.float64 if double and device.type != "mps" else torch.float32


def _fits(X: Tensor | np.ndarray[Any, Any], dtype: torch.dtype, device: torch.device) -> bool:
    need = int(X.shape[0]) * int(X.shape[1]) * dtype.itemsize
    if device.type == "cuda":
        return need <= _RESIDENT_SHARE * torch.cuda.mem_get_info(device)[0]
    mapped = isinstance(X, np.ndarray) and _is_memory_mapped(X)
    return not mapped or need <= _STREAM_BYTES


def _is_memory_mapped(X: np.ndarray[Any, Any]) -> bool:
    """Whether an array, or the array it is a view of, is a file."""
    base: Any = X
    while base is not None:
        if isinstance(base, np.memmap):
            return True
        base = getattr(base, "base", None)
    return False


def _refuse_not_finite(rows: Tensor, first: int, name: str) -> None:
    if bool(torch.isfinite(rows.sum())):  # one cheap pass; a sum that overflows is looked at more closely
        return
    bad = (~torch.isfinite(rows)).any(dim=1).nonzero()
    if bad.numel():
        raise InputError(
            f"{name} holds NaN or infinity in {_count(bad)}, the first being row {first + int(bad[0])}: "
            f"every value must be finite; remove or repair these rows."
        )


def _refuse_too_large(rows: Tensor, first: int, name: str) -> None:
    """Sums of squares over many rows and columns must stay within the type's range."""
    limit = 1e14 if rows.dtype == torch.float32 else 1e140
    size_N = rows.abs().amax(dim=1) if rows.numel() else rows.new_zeros(0)
    if bool((size_N > limit).any()):
        row = int((size_N > limit).nonzero()[0])
        raise InputError(
            f"Row {first + row} of {name} holds a value of size {float(size_N[row]):.3g}, but the squares of numbers "
            f"above {limit:g} are too large to add up; divide all of {name} by a constant."
        )


def _warn_of_zeros(length: Tensor, first: int, name: str) -> None:
    """Not an error, because scikit-learn's checks of estimators fit zero rows."""
    bad = (length[:, 0] == 0).nonzero()
    text = (
        f"{name} has a length of 0 in {_count(bad)}, the first being row {first + int(bad[0])}: a zero vector has no "
        f"direction; remove these rows, or use GaussianMixture, which takes embeddings of any length."
    )
    warnings.warn(text, ZeroRowWarning, stacklevel=2)


def _count(bad: Tensor) -> str:
    return f"{bad.shape[0]:,} row{'s' if bad.shape[0] > 1 else ''}"
