"""Tables of embeddings: every format gives the same table, and what cannot be one is refused in a sentence."""

from __future__ import annotations

import itertools
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from siammm.core.errors import InputError, SiamMMError, StoredFileError
from siammm.data import large_arrays, parquet_embeddings
from siammm.data.embedding_table import Share
from siammm.data.embeddings import read_embeddings

N, D = 7, 3
X = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)
IDS = np.array([f"img{i}.png" for i in range(N)])
LABELS = np.arange(N) % 3
TEN = np.random.default_rng(1).normal(size=(10, 4)).astype(np.float32)


def vectors(rows: Any = X, kind: Any = None) -> pa.Array:
    return pa.array([None if row is None else list(row) for row in rows], kind or pa.list_(pa.float32()))


def write_npy(path: Path) -> Path:
    np.save(path / "t.npy", X)
    return path / "t.npy"


def write_npz(path: Path) -> Path:
    np.savez(path / "t.npz", embeddings=X, ids=IDS, labels=LABELS)
    return path / "t.npz"


def write_parquet(path: Path) -> Path:
    pq.write_table(pa.table({"id": IDS, "embedding": vectors(), "label": LABELS}), path / "t.parquet")
    return path / "t.parquet"


def write_safetensors(path: Path) -> Path:
    save_file({"embeddings": torch.from_numpy(X), "labels": torch.from_numpy(LABELS)}, path / "t.safetensors")
    return path / "t.safetensors"


WRITERS = [write_npy, write_npz, write_parquet, write_safetensors]


# -- what is read


@pytest.mark.parametrize("write", WRITERS)
def test_every_format_gives_the_same_embeddings(write: Any, tmp_path: Path) -> None:
    table = read_embeddings(write(tmp_path))
    assert table.embeddings.dtype == np.float32
    np.testing.assert_array_equal(table.embeddings, X)
    assert table.source.name.startswith("t.")


@pytest.mark.parametrize("write", [write_npz, write_parquet, write_safetensors])
def test_labels_are_found(write: Any, tmp_path: Path) -> None:
    np.testing.assert_array_equal(read_embeddings(write(tmp_path)).labels, LABELS)


@pytest.mark.parametrize("write", [write_npz, write_parquet])
def test_ids_are_found(write: Any, tmp_path: Path) -> None:
    ids = read_embeddings(write(tmp_path)).ids
    assert ids is not None
    assert ids.tolist() == IDS.tolist()


@pytest.mark.parametrize("write", [write_npz, write_parquet])
def test_an_empty_name_reads_none(write: Any, tmp_path: Path) -> None:
    table = read_embeddings(write(tmp_path), id_column="", label_column="")
    assert table.ids is None
    assert table.labels is None


def test_npy_is_memory_mapped_and_read_only(tmp_path: Path) -> None:
    table = read_embeddings(write_npy(tmp_path))
    assert isinstance(table.embeddings, np.memmap)
    assert not table.embeddings.flags.writeable


def test_npy_in_column_order_is_read_as_it_is(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.asfortranarray(X))
    np.testing.assert_array_equal(read_embeddings(tmp_path / "t.npy").embeddings, X)


@pytest.mark.parametrize("dtype", ["float16", "int8", "uint16", "int64", ">f4", ">f8"])
def test_other_number_types_become_float32(dtype: str, tmp_path: Path) -> None:
    values = (X * 10).astype(dtype)
    np.save(tmp_path / "t.npy", values)
    read = read_embeddings(tmp_path / "t.npy").embeddings
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, values.astype(np.float32))


def test_float64_stays(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", X.astype(np.float64))
    assert read_embeddings(tmp_path / "t.npy").embeddings.dtype == np.float64


def test_a_large_conversion_goes_through_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_arrays, "_LARGEST_COPY_IN_MEMORY", 16)
    monkeypatch.setattr(large_arrays, "_ROWS_AT_A_TIME", 2)
    np.save(tmp_path / "t.npy", X.astype(np.float16))
    read = read_embeddings(tmp_path / "t.npy").embeddings
    assert isinstance(read, np.memmap)
    np.testing.assert_array_equal(read, X.astype(np.float16).astype(np.float32))


def write_parts(folder: Path, bounds: list[int], **columns: Any) -> str:
    """Rows 0 to 9 in several Parquet files, and the pattern that finds them."""
    table = pa.table({"embedding": list(TEN), "id": [f"row {row}" for row in range(10)], **columns})
    for number, (first, last) in enumerate(itertools.pairwise(bounds)):
        pq.write_table(table.slice(first, last - first), folder / f"part-{number}.parquet", row_group_size=2)
    return str(folder / "part-*.parquet")


@pytest.mark.parametrize("bounds", [[0, 10], [0, 3, 3, 8, 10], [0, 0, 10, 10]])
@pytest.mark.parametrize("largest", [0, 2**31])
def test_several_files_are_one_table(
    bounds: list[int], largest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_arrays, "_LARGEST_IN_MEMORY", largest)
    read = read_embeddings(write_parts(tmp_path, bounds, size=list(range(10))))
    np.testing.assert_array_equal(read.embeddings, TEN)
    assert isinstance(read.embeddings, np.memmap) == (largest == 0)
    assert read.ids is not None
    assert read.ids.tolist() == [f"row {row}" for row in range(10)]
    assert read.columns is not None
    assert read.columns.column("size").to_pylist() == list(range(10))
    ranged = read_embeddings(tmp_path / f"part-{{0..{len(bounds) - 2}}}.parquet")
    assert ranged.fingerprint() == read.fingerprint()


@pytest.mark.parametrize("of", [1, 2, 3, 12])
@pytest.mark.parametrize("name", ["t.npy", "t.npz", "t.safetensors", "t.parquet", "part-*.parquet"])
def test_shares_are_the_table(name: str, of: int, tmp_path: Path) -> None:
    """Also shares without a row; the fingerprint is that of the whole."""
    np.save(tmp_path / "t.npy", TEN)
    np.savez(tmp_path / "t.npz", X=TEN, ids=np.arange(10))
    save_file({"X": torch.from_numpy(TEN), "ids": torch.arange(10)}, tmp_path / "t.safetensors")
    pq.write_table(pa.table({"X": list(TEN), "id": np.arange(10)}), tmp_path / "t.parquet", row_group_size=3)
    write_parts(tmp_path, [0, 3, 3, 8, 10])
    shares = [read_embeddings(tmp_path / name, share=Share(number, of)) for number in range(of)]
    np.testing.assert_array_equal(np.concatenate([share.embeddings for share in shares]), TEN)
    whole = read_embeddings(tmp_path / name)
    if whole.ids is not None:
        assert [one for share in shares for one in np.asarray(share.ids).tolist()] == whole.ids.tolist()
    assert [share.first_row for share in shares] == [-(-10 * number // of) for number in range(of)]
    assert {share.n_samples for share in shares} == {10}
    some = np.concatenate([share.embeddings for share in shares]).astype("<f4")
    assert shares[0].fingerprint(lambda rows: some) == whole.fingerprint()


def test_files_of_other_columns_are_refused(tmp_path: Path) -> None:
    pattern = write_parts(tmp_path, [0, 5, 10])
    pq.write_table(pa.table({"embedding": list(TEN), "id": np.arange(10)}), tmp_path / "part-1.parquet")
    with pytest.raises(InputError, match=r"Column 'id' of .*part-1.parquet holds int64, but string in"):
        read_embeddings(pattern)
    pq.write_table(pa.table({"embedding": list(TEN[:, :2]), "id": ["a"] * 10}), tmp_path / "part-1.parquet")
    with pytest.raises(InputError, match=r"Row 0 of column 'embedding' in .* has 2 values, but the first row has 4"):
        read_embeddings(pattern)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_tensors(dtype: torch.dtype, tmp_path: Path) -> None:
    save_file({"X": torch.from_numpy(X).to(dtype)}, tmp_path / "t.safetensors")
    read = read_embeddings(tmp_path / "t.safetensors").embeddings
    np.testing.assert_array_equal(read, torch.from_numpy(X).to(dtype).float().numpy())


@pytest.mark.parametrize("key", ["embeddings", "features", "X", "x", "whatever"])
def test_npz_key_is_found(key: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", **{key: X, "counts": np.arange(12).reshape(3, 4)})  # pyright: ignore[reportArgumentType]
    np.testing.assert_array_equal(read_embeddings(tmp_path / "t.npz").embeddings, X)


def test_npz_key_is_obeyed(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", X=X, other=X + 1)
    np.testing.assert_array_equal(read_embeddings(tmp_path / "t.npz", key="other").embeddings, X + 1)


def test_npz_bytes_become_text(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", X=X, ids=IDS.astype("S"))
    ids = read_embeddings(tmp_path / "t.npz").ids
    assert ids is not None
    assert ids.tolist() == IDS.tolist()


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.float64()), pa.large_list(pa.float32()), pa.list_(pa.float32(), D), pa.list_(pa.float16())]
)
def test_parquet_kinds_of_list(kind: Any, tmp_path: Path) -> None:
    values = X.astype(np.float16)
    pq.write_table(pa.table({"emb": vectors(values, kind)}), tmp_path / "t.parquet")
    np.testing.assert_array_equal(read_embeddings(tmp_path / "t.parquet").embeddings, values)


def test_parquet_in_many_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_embeddings, "_ROWS_AT_A_TIME", 2)
    pq.write_table(pa.table({"vector": vectors()}), tmp_path / "t.parquet", row_group_size=3)
    np.testing.assert_array_equal(read_embeddings(tmp_path / "t.parquet").embeddings, X)


def test_parquet_of_number_columns(tmp_path: Path) -> None:
    columns = {f"d{i}": X[:, i] for i in range(D)}
    table = pa.table({"id": np.arange(N), **columns, "target": LABELS, "__index_level_0__": np.arange(N), "name": IDS})
    pq.write_table(table, tmp_path / "t.parquet")
    read = read_embeddings(tmp_path / "t.parquet")
    np.testing.assert_array_equal(read.embeddings, X)
    np.testing.assert_array_equal(read.labels, LABELS)
    np.testing.assert_array_equal(read.ids, np.arange(N))
    assert read.columns is not None
    assert read.columns.column_names == ["__index_level_0__", "name"]


def test_parquet_carries_the_other_columns(tmp_path: Path) -> None:
    table = pa.table({"split": ["a"] * N, "embedding": vectors(), "score": np.arange(N) / 2, "second": vectors()})
    pq.write_table(table, tmp_path / "t.parquet")
    columns = read_embeddings(tmp_path / "t.parquet").columns
    assert columns is not None
    assert columns.column_names == ["split", "score"]
    assert columns.column("score").to_pylist() == (np.arange(N) / 2).tolist()


def test_parquet_labels_with_gaps_and_categories(tmp_path: Path) -> None:
    labels = pa.array(["cat", None, "dog", "cat", "dog", None, "cat"]).dictionary_encode()
    pq.write_table(pa.table({"embedding": vectors(), "class": labels}), tmp_path / "t.parquet")
    read = read_embeddings(tmp_path / "t.parquet").labels
    assert read is not None
    assert read.tolist() == ["cat", None, "dog", "cat", "dog", None, "cat"]


def test_parquet_columns_can_be_named(tmp_path: Path) -> None:
    table = pa.table({"a": vectors(), "b": vectors(X + 1), "who": IDS, "what": LABELS})
    pq.write_table(table, tmp_path / "t.parquet")
    read = read_embeddings(tmp_path / "t.parquet", key="b", id_column="who", label_column="what")
    np.testing.assert_array_equal(read.embeddings, X + 1)
    assert read.ids is not None
    assert read.ids.tolist() == IDS.tolist()
    np.testing.assert_array_equal(read.labels, LABELS)


# -- what is refused


def refused(path: Path, match: str, kind: type[SiamMMError] = InputError, **names: Any) -> None:
    """The file is refused with one sentence that names it."""
    with pytest.raises(kind, match=match) as caught:
        read_embeddings(path, **names)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert path.name in message


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".parquet", ".safetensors"])
def test_files_that_are_not_there_or_not_files(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"t{suffix}"
    refused(path, "does not exist", StoredFileError)
    path.write_bytes(b"")
    refused(path, "is empty", StoredFileError)
    path.write_bytes(b"hello, this is no table of embeddings at all\n" * 20)
    refused(path, "is not a", StoredFileError)
    path.unlink()
    path.mkdir()
    refused(path, "is a folder", StoredFileError)


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.97])
def test_truncated_files(write: Any, share: float, tmp_path: Path) -> None:
    path = write(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    refused(path, "write it again", StoredFileError)


def test_npz_with_a_damaged_array(tmp_path: Path) -> None:
    path = write_npz(tmp_path)
    content = bytearray(path.read_bytes())
    at = content.find(X.tobytes())
    content[at] ^= 0xFF
    path.write_bytes(content)
    refused(path, "write it again", StoredFileError)


def test_unknown_suffix(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("1,2\n")
    refused(tmp_path / "t.csv", "'.csv'")


@pytest.mark.parametrize(
    ("array", "match"),
    [
        (np.array([[1, "a"], [2, None]], dtype=object), "Python objects"),
        (np.zeros(5, np.float32), "2-D"),
        (np.zeros((5, 2, 2), np.float32), "2-D"),
        (np.zeros((), np.float32), "2-D"),
        (np.zeros((0, 4), np.float32), "0 rows"),
        (np.zeros((4, 0), np.float32), "0 columns"),
        (np.zeros((4, 2), np.complex64), "complex64"),
        (np.zeros((4, 2), bool), "bool"),
        (np.array([["a", "b"]]), "real numbers"),
        (np.zeros((4, 2), [("a", "f4")]), "real numbers"),
    ],
)
def test_arrays_that_are_no_embeddings(array: np.ndarray, match: str, tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", array, allow_pickle=True)
    refused(tmp_path / "t.npy", match)
    np.savez(tmp_path / "t.npz", embeddings=array)
    refused(tmp_path / "t.npz", match)


def test_npy_has_no_names(tmp_path: Path) -> None:
    refused(write_npy(tmp_path), "without names", label_column="y")


def test_npz_without_a_clear_choice_lists_the_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", a=X, b=X)
    refused(tmp_path / "t.npz", r"--key: a \(7 x 3\) float32, b \(7 x 3\) float32")
    refused(tmp_path / "t.npz", "no array 'c'", key="c")
    refused(tmp_path / "t.npz", "no array 'c'", key="a", label_column="c")


def test_npz_with_a_name_twice(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    with zipfile.ZipFile(tmp_path / "t.npz", "w") as archive:
        archive.write(tmp_path / "x.npy", "x.npy")
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.write(tmp_path / "x.npy", "x.npy")
    refused(tmp_path / "t.npz", "two arrays called 'x'", StoredFileError)


@pytest.mark.parametrize(
    ("labels", "match"),
    [
        (np.arange(N + 1), r"\(8\).*7 embeddings"),
        (np.eye(N), "one value for each"),
        (np.array(["a", None] * 3 + ["b"], dtype=object), "numbers or strings"),
    ],
)
def test_npz_labels_that_do_not_fit(labels: np.ndarray, match: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", X=X, labels=labels)
    refused(tmp_path / "t.npz", match)
    assert read_embeddings(tmp_path / "t.npz", label_column="").labels is None


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ({"embedding": vectors([[1, 2], [3]])}, "Row 1 .* has 1 values, but the first row has 2"),
        ({"embedding": vectors([[1, 2], None])}, "Row 1 .* is empty"),
        ({"embedding": vectors([[1, 2], [3, None]])}, "empty entries"),
        ({"embedding": vectors([[], []])}, "0 columns"),
        ({"embedding": vectors([])}, "0 rows"),
        ({"a": vectors(), "b": vectors()}, "--key: a, b"),
        ({"name": IDS}, "no column of numbers"),
        ({"d0": pa.array([1.0, None])}, "Row 1 .* is empty"),
    ],
)
def test_parquet_that_is_no_table_of_embeddings(columns: dict[str, Any], match: str, tmp_path: Path) -> None:
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    refused(tmp_path / "t.parquet", match)


def test_parquet_names_that_are_not_there(tmp_path: Path) -> None:
    path = write_parquet(tmp_path)
    refused(path, "no column 'z'", key="z")
    refused(path, "give --id-column one of", id_column="z")
    refused(path, "several values a row", label_column="embedding")
    refused(path, "list of numbers", key="label")


def test_parquet_with_a_name_twice(tmp_path: Path) -> None:
    pq.write_table(pa.table([vectors(), vectors()], names=["e", "e"]), tmp_path / "t.parquet")
    refused(tmp_path / "t.parquet", "two columns called 'e'", StoredFileError)


def test_safetensors_lists_its_tensors(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3), "b": torch.zeros(4)}, tmp_path / "t.safetensors")
    refused(tmp_path / "t.safetensors", r"no array that could be embeddings .* holds a \(3\) float32, b \(4\) float32")
    refused(tmp_path / "t.safetensors", "2-D", key="a")


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    """An object array could run code when read; a file that would must fail before it does."""

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    array = np.empty((2, 2), dtype=object)
    array[:] = Bomb()
    np.save(tmp_path / "t.npy", array, allow_pickle=True)
    np.savez(tmp_path / "t.npz", X=X[:2], labels=array[0])
    refused(tmp_path / "t.npy", "Python objects")
    refused(tmp_path / "t.npz", "numbers or strings")
    assert not (tmp_path / "ran").exists()
