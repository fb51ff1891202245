"""Random numbers that depend on nothing but what they are for: the seed, epoch, sample, stream and slot.

A number is a hash of its five coordinates, not the next state of a generator. So a sample's augmentation is the same
in any batch, on any rank, in any worker, after a resumed run, on the CPU and on a GPU; and because nothing is read back
to the host, a captured CUDA graph draws afresh whenever the epoch or the samples in its input tensors change.

The hash is the finaliser of splitmix64 (Steele, Lea and Flood, 2014), one round a coordinate. Int64 arithmetic wraps
around in torch as unsigned arithmetic does; only the right shift needs a mask, since it copies the sign. Coordinates
are joined by exclusive or, not by sums and products: the compiler would fold these into 32-bit indices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_WORD = 2**64
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)

# float32 holds 24 bits exactly, so that a number is below 1 on every device.
_BITS = 24

# Streams that are given are not negative: this one never meets them.
_ORDER_STREAM = -1
# The views have streams 0 and 1.
NOISE_STREAMS = (2, 3)


def uniforms(seed: int, epoch: int | Tensor, index_N: Tensor, stream: int, count: int) -> Tensor:
    """``count`` numbers for each sample, float32 in [0, 1), N x count, on the device of ``index_N``.

    ``index_N`` holds the samples' numbers in the whole data set. ``stream`` tells apart those who draw for the same
    sample, such as the two views. ``epoch`` may be an int64 tensor of no dimensions on the same device, for graphs that
    are captured once and replayed in every epoch; it gives what the same int gives.
    """
    bits_NU = _hash(seed, epoch, index_N, stream, count)
    return _shifted(bits_NU, 64 - _BITS).to(torch.float32).mul_(2.0**-_BITS)


def normals(seed: int, epoch: int | Tensor, index_N: Tensor, stream: int, count: int) -> Tensor:
    """``count`` standard normal numbers for each sample, float32, N x count; otherwise as ``uniforms``."""
    u_NU = uniforms(seed, epoch, index_N, stream, 2 * count)
    radius_NU = (-2 * (1 - u_NU[:, :count]).log()).sqrt()  # 1 - u is above 0
    return radius_NU * (2 * math.pi * u_NU[:, count:]).cos()


def permutation(seed: int, epoch: int, n: int) -> Tensor:
    """The order in which an epoch goes through ``n`` samples: int64, on the CPU.

    The same on every machine and under every version of torch, because the samples are sorted by their hash.
    """
    key_N = _hash(seed, epoch, torch.arange(n), _ORDER_STREAM, 1)[:, 0]
    return key_N.argsort(stable=True)


def seed_torch(seed: int, number: int, rank: int, device: torch.device) -> None:
    """Seed the generator that networks draw from by themselves, before update ``number`` on a rank.

    Some do, such as a Swin transformer, which skips blocks at random. torch seeds it differently in every process.
    """
    word = _mixed_int(_mixed_int(_mixed_int(seed + _GOLDEN) ^ number) ^ rank)
    if device.type == "mps":
        torch.mps.manual_seed(word)
    elif device.type == "cuda":  # of this device alone: ``torch.manual_seed`` is for all
        number_of_device = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[number_of_device].manual_seed(word)
    else:
        torch.default_generator.manual_seed(word)


@contextmanager
def torch_as_it_was(device: torch.device) -> Iterator[None]:
    """Give torch's generators back as they were when the block ends: they are those of the whole program."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def _hash(seed: int, epoch: int | Tensor, index_N: Tensor, stream: int, count: int) -> Tensor:
    """64 bits for each sample and slot, as int64, N x count."""
    state = _mixed_int(_mixed_int(seed + _GOLDEN) ^ (stream + 2))
    if isinstance(epoch, Tensor):
        key: int | Tensor = _mixed(epoch.to(torch.int64) ^ _signed(state))
    else:
        key = _signed(_mixed_int(epoch ^ state))
    sample_N = _mixed(index_N.to(torch.int64) ^ key)
    # Mixed as well, because a slot's number alone differs from the next in too few bits.
    slot_U = _mixed(torch.arange(1, count + 1, device=index_N.device))
    return _mixed(sample_N[:, None] ^ slot_U)


def _mixed(z: Tensor) -> Tensor:
    """Scatter the bits of every element: a bijection, so that different inputs stay different."""
    z = (z ^ _shifted(z, _SHIFTS[0])) * _signed(_MULTIPLIERS[0])
    z = (z ^ _shifted(z, _SHIFTS[1])) * _signed(_MULTIPLIERS[1])
    return z ^ _shifted(z, _SHIFTS[2])


def _mixed_int(z: int) -> int:
    """`_mixed` of a Python int, modulo 2^64."""
    z %= _WORD
    z = (z ^ (z >> _SHIFTS[0])) * _MULTIPLIERS[0] % _WORD
    z = (z ^ (z >> _SHIFTS[1])) * _MULTIPLIERS[1] % _WORD
    return z ^ (z >> _SHIFTS[2])


def _shifted(z: Tensor, places: int) -> Tensor:
    """Shift to the right and fill with zeros."""
    return (z >> places) & ((1 << (64 - places)) - 1)


def _signed(z: int) -> int:
    """The int64 with the same 64 bits."""
    z %= _WORD
    return z - _WORD if z >= _WORD // 2 else z
