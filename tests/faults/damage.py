"""Ways to damage a file, each drawn from a seed: its bytes anywhere, or values inside a file that stays readable."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

WRONG: list[Any] = [None, True, -1, 0, 10**30, 1e308, float("nan"), float("inf"), "x", "", [], [1, "a"], {}, {"a": 1}]
_HEADER_WORDS = [b"'<f4'", b"|u1", b"(", b")", b"{", b"'", b",", b"\n", b"-1", b"9" * 30, b"1e9", b"None", b"\xff"]


def harm(path: Path, draw: random.Random) -> None:
    """Damage a file in some way that its kind allows."""
    way = _BY_SUFFIX.get(path.suffix)
    if way is not None and draw.random() < 0.5:
        # What is no longer readable, or has nothing to change, is damaged below.
        with contextlib.suppress(ValueError, KeyError, IndexError, OSError, pa.ArrowException):
            way(path, draw)
            return
    path.write_bytes(damaged(path.read_bytes(), draw))


def damaged(data: bytes, draw: random.Random) -> bytes:
    """The bytes with a few faults; more often near the start and the end, where headers are."""
    content = bytearray(data)
    whole = draw.randrange(20)
    if whole == 0:
        return b""
    if whole == 1:
        return draw.randbytes(draw.randrange(1, 400))
    if whole == 2:
        return data + draw.randbytes(draw.randrange(1, 400))
    for _ in range(draw.choice([1, 1, 2, 4, 64])):
        if not content:
            break
        n = len(content)
        at = draw.choice([draw.randrange(n), draw.randrange(min(n, 160)), n - 1 - draw.randrange(min(n, 300))])
        how = draw.randrange(6)
        if how == 0:
            content[at] ^= 1 << draw.randrange(8)
        elif how == 1:
            content[at] = draw.randrange(256)
        elif how == 2:
            del content[at:]
        elif how == 3:
            del content[at : at + draw.randrange(1, 20)]
        elif how == 4:
            content[at:at] = draw.choice(_HEADER_WORDS)
        else:
            content[at : at + 8] = draw.randbytes(8)
    return bytes(content)


def _harmed_json(plain: Any, draw: random.Random) -> Any:
    """One value in it, at any depth, replaced, removed or added to."""
    if isinstance(plain, (dict, list)) and plain and draw.random() < 0.85:
        key = draw.choice(list(plain)) if isinstance(plain, dict) else draw.randrange(len(plain))
        if draw.random() < 0.15:
            del plain[key]
        else:
            plain[key] = _harmed_json(plain[key], draw)
        return plain
    if isinstance(plain, dict) and draw.random() < 0.3:
        return plain | {"unheard of": 1}
    return draw.choice(WRONG)


def _json_of(path: Path, draw: random.Random) -> None:
    path.write_text(json.dumps(_harmed_json(json.loads(path.read_text()), draw)))


def _lines_of(path: Path, draw: random.Random) -> None:
    lines = path.read_text().splitlines()
    at = draw.randrange(len(lines))
    lines[at] = json.dumps(_harmed_json(json.loads(lines[at]), draw))
    path.write_text("\n".join(lines) + "\n")


def _csv_of(path: Path, draw: random.Random) -> None:
    """A cell, a line or the encoding."""
    lines = path.read_text().splitlines()
    at, way = draw.randrange(len(lines)), draw.choice(["cell", "cell", "line", "twice", "none", "utf-16", "quote"])
    if way == "cell":
        cells = lines[at].split(",")
        cells[draw.randrange(len(cells))] = draw.choice(["", "nan", "1e400", "-1", "9" * 30, "é", "a,b", "x" * 200_000])
        lines[at] = ",".join(cells)
    elif way == "line":
        del lines[at]
    elif way == "quote":
        lines[at] = '"' + lines[at]
    elif way == "twice":
        lines.append(lines[at])
    text = "" if way == "none" else "\n".join(lines) + "\n"
    path.write_text(text, encoding="utf-16" if way == "utf-16" else "utf-8")


def _table_of(path: Path, draw: random.Random) -> None:
    table = pq.read_table(path)
    name = draw.choice(table.column_names)
    at = table.column_names.index(name)
    way = draw.choice(["drop", "text", "null", "some null", "short", "none", "numbers", "lists", "twice"])
    if way == "drop":
        table = table.drop_columns([name])
    elif way in ("short", "none"):
        table = table.slice(0, draw.randrange(len(table)) if way == "short" else 0)
    elif way == "twice":
        table = pa.concat_tables([table, table])
    else:
        n = len(table)
        some = table.column(name).to_pylist()
        values: dict[str, Callable[[], Any]] = {
            "text": lambda: pa.array([str(value) for value in some]),
            "null": lambda: pa.nulls(n),
            "some null": lambda: pa.array(
                [None if draw.random() < 0.5 else value for value in some], table.field(at).type
            ),
            "numbers": lambda: pa.array(np.array([draw.choice([-1.0, 1e30, np.nan, 5.0]) for _ in range(n)])),
            "lists": lambda: pa.array([[1]] * n),
        }
        table = table.set_column(at, name, values[way]())
    pq.write_table(table, path)


def _tensors_of(path: Path, draw: random.Random) -> None:
    with safe_open(path, "numpy") as stored:
        header = dict(stored.metadata() or {})
    tensors = load_file(path)
    name = draw.choice(list(tensors))
    way = draw.choice(["drop", "flat", "type", "nan", "short", "header", "header", "header", "header"])
    if way == "drop":
        del tensors[name]
    elif way == "flat":
        tensors[name] = tensors[name].reshape(-1)
    elif way == "type":
        tensors[name] = tensors[name].astype(draw.choice([np.int32, np.float64, np.uint8]))
    elif way == "nan":
        tensors[name] = np.full_like(tensors[name], np.nan if tensors[name].dtype.kind == "f" else 255)
    elif way == "short":
        tensors[name] = tensors[name][: len(tensors[name]) // 2] if tensors[name].ndim else tensors[name]
    else:
        key = draw.choice(list(header))
        with contextlib.suppress(ValueError):
            header[key] = json.dumps(_harmed_json(json.loads(header[key]), draw))
    save_file(tensors, path, metadata=header)


def _array_of(path: Path, draw: random.Random) -> None:
    np.save(path, _harmed_array(np.load(path), draw), allow_pickle=True)


def _arrays_of(path: Path, draw: random.Random) -> None:
    with np.load(path) as stored:
        arrays = dict(stored)
    name = draw.choice(list(arrays))
    if draw.random() < 0.2:
        del arrays[name]
    else:
        arrays[name] = _harmed_array(arrays[name], draw)
    np.savez(path, **arrays)


def _harmed_array(array: np.ndarray, draw: random.Random) -> np.ndarray:
    way = draw.choice(["type", "type", "shape", "wrong", "short", "none", "objects", "deep"])
    if way == "objects":
        return np.array([{"a": 1}], dtype=object)
    if way == "type":
        return array.astype(draw.choice([np.int8, np.float64, np.complex64, np.float16, bool, ">f4", "U3", "M8[s]"]))
    if way == "shape":
        return array.reshape(-1)
    if way == "deep":
        return array[(None,) * 3]
    if way == "wrong" and array.dtype.kind == "f":
        array = array.copy()
        array.flat[draw.randrange(array.size)] = draw.choice([np.nan, np.inf, 1e30])
        return array
    return array[: 0 if way == "none" else len(array) // 2]


_BY_SUFFIX: dict[str, Callable[[Path, random.Random], None]] = {
    ".json": _json_of, ".jsonl": _lines_of, ".parquet": _table_of, ".safetensors": _tensors_of, ".npy": _array_of,
    ".npz": _arrays_of, ".csv": _csv_of,
}  # fmt: skip
