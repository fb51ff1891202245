"""Fused CPU kernels in C (``cpu_kernels.c``), compiled on the user's machine at the first search that is large enough.

torch needs several operations for a search, and each goes through memory; one pass in C keeps the scores in the cache.
The system's C compiler builds the library for this CPU in about a second. It is kept in the user's cache folder under a
hash of everything it depends on. Without a compiler or a folder to write to, or with ``SIAMMM_COMPILED=0``, there is no
library, and the callers use torch. For tests and benchmarks the variable also takes the compiler's ``-march`` for an
older CPU: ``SIAMMM_COMPILED=x86-64-v3`` builds what a CPU with AVX2 would get.

Legend:  N samples, K components, D dimensions, F length of the statistic, H neighbours;  x samples, w components.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import torch
from torch import Tensor

MAX_NEIGHBOURS = 32
MAX_DIMENSIONS = 2**14
MAX_SLACK = 2**29

_SOURCE = Path(__file__).with_suffix(".c")
_FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-pthread")
_COMPILE_SECONDS = 60
# Multiplications below which torch is used: it needs a few milliseconds for this many.
_LEAST_WORK = 2**28
# With fewer components most of a vector is empty, and torch's search in float32 is faster.
_FEWEST_COMPONENTS = 16
# No compiler, one that fails or hangs, no folder, no permission, a library without our functions.
_TROUBLES = (OSError, RuntimeError, ValueError, AttributeError, subprocess.SubprocessError)

_loading = threading.Lock()
_found: dict[tuple[str, str], ctypes.CDLL | None] = {}


def worthwhile(x_ND: Tensor, k: int, d: int) -> bool:
    """Whether compiled code is faster for these rows and k components of d dimensions.

    Depends on their type and sizes alone, so that the same fit gives the same bits the next time.
    """
    return x_ND.device.type == "cpu" and x_ND.dtype == torch.float32 and x_ND.shape[0] * k * d >= _LEAST_WORK


def library() -> ctypes.CDLL | None:
    """The compiled functions, or None where they are not available; compiled and loaded at the first call."""
    asked = os.environ.get("SIAMMM_COMPILED", "1")
    if asked == "0":
        return None
    cpu = asked if asked.startswith("x86-64") else "native"
    where = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(where):  # the standard for this variable ignores relative paths
        where = "~/.cache"
    with _loading:
        if (where, cpu) not in _found:
            try:
                _found[where, cpu] = _loaded(Path(where).expanduser() / "siammm" / "compiled", cpu)
            except _TROUBLES:  # torch is used instead
                _found[where, cpu] = None
        return _found[where, cpu]


def multiplies_bytes() -> bool:
    """Whether there is a library, and it uses int8 instructions."""
    return bool((compiled := library()) and compiled.siammm_multiplies_bytes())


def multiplies_floats() -> bool:
    """Whether there is a library that is faster than torch in float32: with AVX2 or AVX-512."""
    return bool((compiled := library()) and compiled.siammm_multiplies_floats())


def floats_pay(x_ND: Tensor, k: int, d: int) -> bool:
    """Whether ``nearest_by_floats`` is faster than torch for these rows and k components of d dimensions."""
    return k >= _FEWEST_COMPONENTS and worthwhile(x_ND, k, d) and multiplies_floats()


def nearest_by_bytes(
    x_ND: Tensor,
    x_code_ND: Tensor,
    w_KD: Tensor,
    w_code_KD: Tensor,
    n_neighbours: int,
    *,
    scale_N: Tensor,
    reach_N: Tensor,
    slack_N: Tensor,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The scores and numbers of the H nearest components, and which rows must be searched in full.

    A score is at most ``product * scale + reach`` for the product of the codes; products more than ``slack`` below the
    H-th highest are ignored. None where there is no library.
    """
    compiled = library()
    if compiled is None:
        return None
    (n, d), k = x_ND.shape, w_KD.shape[0]
    _check(w_KD, (k, d))
    for codes, shape in ((x_code_ND, (n, d)), (w_code_KD, (k, d))):
        _check(codes, shape, torch.int8)
    for of_rows in (scale_N, reach_N, slack_N):
        _check(of_rows, (n,))
    packed = torch.empty(compiled.siammm_packed_bytes(k, d), dtype=torch.uint8)
    score_NH = torch.empty(n, n_neighbours, dtype=torch.float32)
    index_NH = torch.empty(n, n_neighbours, dtype=torch.int64)
    doubtful_N = torch.empty(n, dtype=torch.bool)
    # Named, so that contiguous copies live until the call is over.
    x_ND, w_KD = x_ND.contiguous(), w_KD.to(x_ND).contiguous()
    x_code_ND, w_code_KD = x_code_ND.contiguous(), w_code_KD.contiguous()
    scale_N, reach_N, slack_N = scale_N.float().contiguous(), reach_N.float().contiguous(), slack_N.int().contiguous()
    compiled.siammm_pack(w_code_KD.data_ptr(), k, d, packed.data_ptr())
    inputs = (x_ND, x_code_ND, w_KD, packed, scale_N, reach_N, slack_N)
    pointers = [of.data_ptr() for of in (*inputs, score_NH, index_NH, doubtful_N)]
    failed = compiled.siammm_nearest(n, k, d, n_neighbours, *pointers, torch.get_num_threads())
    return None if failed else (score_NH, index_NH, doubtful_N)


def nearest_by_floats(
    x_ND: Tensor, w_KD: Tensor, b_K: Tensor | None, n_neighbours: int
) -> tuple[Tensor, Tensor] | None:
    """The scores x.w + b and numbers of the H nearest components, best first; of equals the first comes first.

    None where there is no library, H is above ``MAX_NEIGHBOURS`` or K, or a row has fewer than H finite scores.
    """
    compiled = library()
    (n, d), k = x_ND.shape, w_KD.shape[0]
    if compiled is None or n_neighbours > min(k, MAX_NEIGHBOURS):
        return None
    _check(x_ND, (n, d), torch.float32)
    _check(w_KD, (k, d))
    if b_K is not None:
        _check(b_K, (k,))
    packed = torch.empty(compiled.siammm_packed_floats(k, d), dtype=torch.float32)
    score_NH = torch.empty(n, n_neighbours, dtype=torch.float32)
    index_NH = torch.empty(n, n_neighbours, dtype=torch.int64)
    # Named, so that contiguous copies live until the call is over.
    x_ND, w_KD = x_ND.contiguous(), w_KD.to(x_ND).contiguous()
    b_K = None if b_K is None else b_K.to(x_ND).contiguous()
    compiled.siammm_pack_floats(w_KD.data_ptr(), None if b_K is None else b_K.data_ptr(), k, d, packed.data_ptr())
    pointers = [of.data_ptr() for of in (x_ND, packed, score_NH, index_NH)]
    failed = compiled.siammm_nearest_by_floats(n, k, d, n_neighbours, *pointers, torch.get_num_threads())
    return None if failed else (score_NH, index_NH)


def sums_by_component(t_NF: Tensor, index_NH: Tensor, weight_NH: Tensor, k: int) -> tuple[Tensor, Tensor] | None:
    """The sum of weights of each component, count_K float64, and the weighted sum of its rows, total_KF.

    None where there is no library or an index is out of range. The last bits depend on the number of threads.
    """
    compiled = library()
    if compiled is None:
        return None
    (n, f), n_neighbours = t_NF.shape, index_NH.shape[1]
    _check(index_NH, (n, n_neighbours), torch.int64)
    _check(weight_NH, (n, n_neighbours))
    total_KF = torch.zeros(k, f, dtype=torch.float32)
    count_K = torch.zeros(k, dtype=torch.float64)
    t_NF, index_NH, weight_NH = t_NF.contiguous(), index_NH.contiguous(), weight_NH.float().contiguous()
    pointers = [of.data_ptr() for of in (t_NF, index_NH, weight_NH, total_KF, count_K)]
    failed = compiled.siammm_sums(n, k, f, n_neighbours, *pointers, torch.get_num_threads())
    return None if failed else (count_K, total_KF)


def shares(logit_NH: Tensor) -> tuple[Tensor, Tensor] | None:
    """The softmax and the logsumexp of every row; None where there is no library."""
    compiled = library()
    if compiled is None:
        return None
    logit_NH = logit_NH.contiguous()
    share_NH, log_sum_N = torch.empty_like(logit_NH), torch.empty_like(logit_NH[:, 0])
    pointers = (logit_NH.data_ptr(), share_NH.data_ptr(), log_sum_N.data_ptr())
    compiled.siammm_shares(*logit_NH.shape, *pointers, torch.get_num_threads())
    return share_NH, log_sum_N


def _check(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
    """Refuse tensors that C would read beyond their end, or as another type."""
    if tuple(tensor.shape) != shape or dtype not in (None, tensor.dtype):
        raise ValueError(f"{tensor.dtype} of shape {tuple(tensor.shape)} was given where {shape} is expected.")


def _loaded(folder: Path, cpu: str) -> ctypes.CDLL:
    if os.name != "posix":
        raise OSError("compiled kernels need POSIX")
    compiler = [*_compiler(), f"-march={cpu}"]
    name = _name(compiler)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_what_others_could_have_written(folder)
    path = _whole(folder, name) or _build(compiler, folder, name)
    _refuse_what_others_could_have_written(path)
    return _declared(ctypes.CDLL(str(path)))


def _whole(folder: Path, name: str) -> Path | None:
    """The library of this name, if its content is as it was built: loading a damaged one would end the process."""
    for path in sorted(folder.glob(f"{name}-*.so")):
        if path.name == _named_by_content(name, path.read_bytes()):
            return path
        path.unlink(missing_ok=True)
    return None


def _named_by_content(name: str, content: bytes) -> str:
    return f"{name}-{hashlib.sha256(content).hexdigest()[:16]}.so"


def _compiler() -> list[str]:
    """The command that compiles C."""
    named = shlex.split(os.environ.get("CC", ""))
    for candidate in [named] if named else [["cc"], ["gcc"], ["clang"]]:
        found = shutil.which(candidate[0])
        if found:
            return [found, *candidate[1:]]
    raise FileNotFoundError("there is no C compiler")


def _name(compiler: list[str]) -> str:
    """A hash of everything that the library depends on."""
    version = _output_of([*compiler, "--version"])
    parts = (_SOURCE.read_bytes(), " ".join((*compiler, *_FLAGS)).encode(), version, _cpu().encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]


def _cpu() -> str:
    """The CPU's model and features: a home folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    told = [line for line in lines if line.startswith(("vendor_id", "cpu family", "model", "flags", "Features"))]
    return "\n".join([platform.system(), platform.machine(), platform.processor(), *sorted(set(told))])


def _build(compiler: list[str], folder: Path, name: str) -> Path:
    """Compile in a private folder, then move the library into place: nobody sees half of it."""
    with tempfile.TemporaryDirectory(dir=folder) as private:
        unnamed = Path(private) / "library.so"
        _output_of([*compiler, *_FLAGS, str(_SOURCE), "-o", str(unnamed), "-lm"])
        unnamed.chmod(0o700)
        with unnamed.open("rb") as file:
            os.fsync(file.fileno())
            path = folder / _named_by_content(name, file.read())
        return unnamed.replace(path)


def _output_of(command: list[str]) -> bytes:
    return subprocess.run(
        command, capture_output=True, timeout=_COMPILE_SECONDS, check=True, stdin=subprocess.DEVNULL
    ).stdout


def _refuse_what_others_could_have_written(path: Path) -> None:
    """A library runs with the rights of the user who loads it."""
    state = path.stat()
    if state.st_uid not in (0, os.getuid()) or state.st_mode & 0o022:
        raise PermissionError(f"{path} could have been written by others")


def _declared(compiled: ctypes.CDLL) -> ctypes.CDLL:
    """The library with the types of its functions."""
    size, pointer, threads = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
    for packed_size in (compiled.siammm_packed_bytes, compiled.siammm_packed_floats):
        packed_size.restype, packed_size.argtypes = size, [size, size]
    compiled.siammm_pack.argtypes = [pointer, size, size, pointer]
    compiled.siammm_nearest.argtypes = [size] * 4 + [pointer] * 10 + [threads]
    compiled.siammm_pack_floats.argtypes = [pointer, pointer, size, size, pointer]
    compiled.siammm_nearest_by_floats.argtypes = [size] * 4 + [pointer] * 4 + [threads]
    compiled.siammm_sums.argtypes = [size] * 4 + [pointer] * 5 + [threads]
    compiled.siammm_shares.argtypes = [size] * 2 + [pointer] * 3 + [threads]
    return compiled
