"""The builds of the compiled part that are tested, and rows to search among."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import normalize

from siammm.mixture.search import cpu_kernels


def has_compiler() -> bool:
    try:
        cpu_kernels._compiler()
    except OSError:
        return False
    return True


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="there is no C compiler here")

# As users get it; half as wide, with threads of its own and hardly any memory for sums; as on a CPU without units for
# bytes; and for any CPU at all. The flags besides the usual ones, and what SIAMMM_COMPILED is.
BUILDS: dict[str, tuple[tuple[str, ...], str]] = {
    "native": ((), "1"),
    "narrow": (("-DNARROW", "-DSHARED_THREADS=0", "-DSUMS_BYTES=1"), "1"),
    "avx2": ((), "x86-64-v3"),
    "plain": ((), "x86-64"),
}
if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
    del BUILDS["avx2"]


def rows(n: int, d: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return normalize(torch.randn(n, 10, generator=generator) @ torch.randn(10, d, generator=generator), dim=1)
