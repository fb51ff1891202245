"""Images in the rows of tables: Parquet files, and the folders that Hugging Face ``datasets`` saves.

Both hold one encoded image a row, as bytes or as the struct {bytes, path} that ``datasets`` writes. Arrow files are
memory-mapped, so any row is as near as any other. A Parquet file can only be read a row group at a time. So where the
images of all files fit into memory comfortably they are read into it, once, when the first is asked for; where they do
not, the row groups last used are kept, which is fine in order and slow at random: the source's ``note`` then says so.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from siammm.core.errors import InputError, StoredFileError
from siammm.core.reading import check_regular
from siammm.core.text import listed, one_line, shown
from siammm.data import decode
from siammm.data import labels as labelling
from siammm.data.array_files import parquet_columns, parquet_file
from siammm.data.decode import BadImage
from siammm.data.labels import LABEL_KEYS
from siammm.data.saved_datasets import class_names, class_names_beside
from siammm.data.source import EncodedSource, container_files, located

if TYPE_CHECKING:
    import pyarrow as pa

IMAGE_KEYS = ("image", "images", "img", "jpg", "jpeg", "png", "webp", "picture", "photo", "image_bytes", "bytes")

# Encoded images of all rows up to this size are held in memory, by every process that reads them.
IN_MEMORY_LIMIT = 4 * 2**30
# Of larger tables, row groups up to this size are kept, by every process.
_CACHE_LIMIT = 2**29
# A look at a table that is not in memory touches so many row groups.
_GROUPS_LOOKED_AT = 8


class _TableSource(EncodedSource):
    """What both kinds of table share: columns, labels, and how an image is read from a row."""

    _ends: np.ndarray
    """The number of images up to the end of each chunk or row group."""

    def __init__(
        self,
        files: Sequence[Path],
        *,
        name: str,
        image_key: str | None = None,
        label_key: str | None = None,
        max_pixels: int = decode.MAX_PIXELS,
    ) -> None:
        import pyarrow as pa

        self.files = [path.absolute() for path in files]
        self.name, self.max_pixels, self.column = name, max_pixels, ""
        first: Any = None
        label_name: str | None = None
        labels: list[pa.Array] = []
        for path in self.files:
            with self._opened(path) as (schema, read):
                if first is None:
                    first = schema
                    self.column = _image_column(schema, image_key, name)
                    label_name = _label_column(schema, label_key, self.column, name)
                for column in (self.column, label_name):
                    if column is not None:
                        _check_same(first, schema, column, path, self.files[0])
                if label_name is not None:
                    labels.extend(read(label_name).chunks)
        self._index()
        if len(self._ends) == 0:
            raise InputError(f"{shown(name)} has 0 rows; at least one image is needed.")
        if label_name is not None:
            names = class_names(first.metadata, label_name) or self._names_beside(label_name)
            self._set_labels(pa.chunked_array(labels), names, asked_for=label_key is not None)

    @abstractmethod
    def _opened(self, path: Path) -> AbstractContextManager[tuple[pa.Schema, Callable[[str], pa.ChunkedArray]]]:
        """The columns of a file, and a function that reads one of them."""

    @abstractmethod
    def _index(self) -> None:
        """Find where the images are."""

    @abstractmethod
    def _part(self, part: int) -> pa.Array | pa.ChunkedArray:
        """The images of a chunk or row group."""

    def _names_beside(self, label_name: str) -> list[str] | None:
        return None

    def _set_labels(self, column: pa.ChunkedArray, names: Sequence[str] | None, *, asked_for: bool) -> None:
        import pyarrow as pa

        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if asked_for and column.null_count:
            raise InputError(
                f"{column.null_count} of {len(column)} rows of {shown(self.name)} have no label; fill them, "
                'or leave the labels out with --label-key "".'
            )
        values = column.to_pylist() if column.null_count or not pa.types.is_integer(column.type) else column.to_numpy()
        self.labels, self.label_names = labelling.from_values(values, names)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def encoded(self, i: int) -> memoryview:
        """See ``EncodedSource.encoded``."""
        part, row = located(self._ends, self._check_position(i))
        return _image_bytes(self._part(part)[row])


class ParquetSource(_TableSource):
    """Encoded images in a column of one or several Parquet files, in the order of the files and their rows."""

    kind = "parquet"

    @contextmanager
    def _opened(self, path: Path) -> Iterator[tuple[pa.Schema, Callable[[str], pa.ChunkedArray]]]:
        with parquet_file(path) as file:
            yield file.schema_arrow, lambda column: parquet_columns(file, [column], path).column(0)

    def _not_sent(self) -> tuple[str, ...]:
        return "_lock", "_groups"

    def _open_again(self) -> None:
        self._lock = threading.Lock()
        self._groups: OrderedDict[int, pa.ChunkedArray] = OrderedDict()

    def _index(self) -> None:
        self._open_again()
        groups: list[tuple[int, int, int, int]] = []
        for number, path in enumerate(self.files):
            with parquet_file(path) as file:
                for group in range(file.metadata.num_row_groups):
                    rows = file.metadata.row_group(group)
                    groups.append((number, group, rows.num_rows, _bytes_of(rows, self.column)))
        table = np.array(groups, dtype=np.int64).reshape(-1, 4)
        self._file_of, self._group_of, rows_of, self._bytes_of = table[table[:, 2] > 0].T
        self._ends = np.cumsum(rows_of)
        self._file_names = _short_names(self.files)
        self._in_memory = int(self._bytes_of.sum()) <= IN_MEMORY_LIMIT
        if not self._in_memory:
            self.note = (
                f"The images of {shown(self.name)} take {self._bytes_of.sum() / 2**30:.1f} GiB, too many to keep in "
                "memory, and Parquet is slow to read at random; an image folder, tar shards or a folder saved by "
                "datasets' save_to_disk are faster."
            )

    def stored_in(self) -> Iterator[tuple[str, str]]:
        """See ``Source.stored_in``: the tables."""
        return container_files(self.files)

    def identifier(self, i: int) -> str:
        """See ``Source.identifier``: the row; of several files, the file's name and the row in it."""
        i = self._check_position(i)
        if len(self.files) == 1:
            return str(i)
        number = self._file_of[located(self._ends, i)[0]]
        first = int(np.searchsorted(self._file_of, number))
        return f"{self._file_names[number]}:{i - (int(self._ends[first - 1]) if first else 0)}"

    def spread(self, count: int) -> np.ndarray:
        """See ``Source.spread``; of a table that is not in memory, from a few row groups."""
        if self._in_memory:
            return super().spread(count)
        # Every row group costs as much as all of its rows, so a few are looked at in several places each.
        groups = np.unique(np.linspace(0, len(self._ends) - 1, _GROUPS_LOOKED_AT).round().astype(np.int64))
        starts = np.concatenate([[0], self._ends])[groups]
        each = max(1, count // len(groups))
        looked_at = [
            np.linspace(start, end - 1, min(each, end - start)).round()
            for start, end in zip(starts, self._ends[groups], strict=True)
        ]
        return np.unique(np.concatenate(looked_at).astype(np.int64))

    def _part(self, part: int) -> pa.ChunkedArray:
        # Held while reading too: threads that want the same group, as they do in order, should read it once.
        with self._lock:
            if part not in self._groups:
                for wanted in range(len(self._ends)) if self._in_memory else (part,):
                    self._groups[wanted] = self._read_group(wanted)
                held = sum(int(self._bytes_of[other]) for other in self._groups)
                while not self._in_memory and held > _CACHE_LIMIT and len(self._groups) > 1:
                    oldest, _ = self._groups.popitem(last=False)
                    held -= int(self._bytes_of[oldest])
            self._groups.move_to_end(part)
            return self._groups[part]

    def _read_group(self, group: int) -> pa.ChunkedArray:
        file_path = self.files[self._file_of[group]]
        with parquet_file(file_path) as file:
            leaf = _bytes_column(file.schema_arrow.field(self.column))
            return parquet_columns(file, [leaf], file_path, groups=[int(self._group_of[group])]).column(0)


class ArrowSource(_TableSource):
    """Encoded images in a column of Arrow files, as ``datasets`` saves them; memory-mapped."""

    kind = "datasets"

    @contextmanager
    def _opened(self, path: Path) -> Iterator[tuple[pa.Schema, Callable[[str], pa.ChunkedArray]]]:
        table = _map_arrow(path)
        yield table.schema, table.column

    def _names_beside(self, label_name: str) -> list[str] | None:
        return class_names_beside(self.files[0], label_name)

    def _not_sent(self) -> tuple[str, ...]:
        return ("_chunks",)

    def _open_again(self) -> None:
        self._index()

    def _index(self) -> None:
        chunks = [chunk for path in self.files for chunk in _map_arrow(path).column(self.column).chunks]
        self._chunks = [chunk for chunk in chunks if len(chunk)]
        self._ends = np.cumsum([len(chunk) for chunk in self._chunks], dtype=np.int64)

    def _part(self, part: int) -> pa.Array:
        return self._chunks[part]


# ------------------------------------------------------------------------------------------------- files, columns, rows


def _map_arrow(path: Path) -> pa.Table:
    import pyarrow as pa

    try:
        check_regular(path)
        mapped = pa.memory_map(str(path))
        try:
            table = pa.ipc.open_stream(mapped).read_all()
        except pa.ArrowInvalid:
            mapped.seek(0)
            table = pa.ipc.open_file(mapped).read_all()
        # Where each value begins and ends is believed otherwise, and a wrong one ends the process.
        table.validate(full=True)
        return table
    except (pa.ArrowException, OSError) as error:
        raise StoredFileError(
            f"{shown(path)} cannot be read as an Arrow file ({one_line(error)}); save the data set again."
        ) from error


def is_image(kind: pa.DataType) -> bool:
    """Bytes, or a struct with bytes."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        kind = next((field.type for field in kind.fields if field.name == "bytes"), kind)
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _bytes_column(field: pa.Field) -> str:
    """The Parquet column with the bytes: of a struct, without its path."""
    import pyarrow as pa

    return f"{field.name}.bytes" if pa.types.is_struct(field.type) else field.name


def _image_column(schema: pa.Schema, image_key: str | None, name: str) -> str:
    names = [field.name for field in schema]
    twice = next((column for column in names if names.count(column) > 1), None)
    if twice is not None:
        raise StoredFileError(f"{shown(name)} has two columns called {twice!r}; save it with different names.")
    found = [field.name for field in schema if is_image(field.type)]
    if image_key is not None:
        if image_key not in schema.names:
            raise InputError(
                f"{shown(name)} has no column {image_key!r}; give --image-key one of: {listed(found or schema.names)}."
            )
        if image_key not in found:
            raise InputError(
                f"Column {image_key!r} of {shown(name)} holds {schema.field(image_key).type}, but images are bytes or "
                f"a struct with bytes; give --image-key one of: {listed(found) or '(none here)'}."
            )
        return image_key
    usual = [key for key in IMAGE_KEYS if key in found]
    if usual or len(found) == 1:
        return (usual or found)[0]
    if found:
        raise InputError(
            f"{shown(name)} has {len(found)} columns that could be images; give --image-key one of: {listed(found)}."
        )
    raise InputError(
        f"{shown(name)} has no column of images (bytes, or a struct with bytes) among {listed(schema.names)}; "
        "put the bytes of the image files into it, or, if it holds embeddings, use siammm cluster."
    )


def _label_column(schema: pa.Schema, label_key: str | None, image: str, name: str) -> str | None:
    import pyarrow as pa

    def usable(kind: pa.DataType) -> bool:
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        return pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)

    if label_key == "":
        return None
    found = [field.name for field in schema if usable(field.type) and field.name != image]
    if label_key is None:
        return next((key for key in LABEL_KEYS if key in found), None)
    if label_key not in found:
        what = "holds no integers or strings" if label_key in schema.names else "does not exist"
        raise InputError(
            f"Column {label_key!r} of {shown(name)} {what}; give --label-key one of: {listed(found) or '(none here)'}."
        )
    return label_key


def _check_same(first: pa.Schema, schema: pa.Schema, column: str, path: Path, first_path: Path) -> None:
    kind = schema.field(column).type if column in schema.names else "no such column"
    if kind != first.field(column).type:
        raise InputError(
            f"Column {column!r} is {first.field(column).type} in {shown(first_path)} but {kind} in {shown(path)}; "
            "give files of one kind."
        )


def _bytes_of(group: Any, column: str) -> int:
    """The size of a column in a row group, once decompressed."""
    chunks = (group.column(number) for number in range(group.num_columns))
    parts = (chunk for chunk in chunks if chunk.path_in_schema in (column, f"{column}.bytes"))
    return sum(chunk.total_uncompressed_size for chunk in parts)


def _image_bytes(value: Any) -> memoryview:
    """The bytes of one Arrow value. Raises ``BadImage``."""
    import pyarrow as pa

    if not value.is_valid:
        raise BadImage("is an empty row")
    if pa.types.is_struct(value.type):
        value = value["bytes"]
        if not value.is_valid:
            raise BadImage(
                "has no bytes in its row (a path alone is not followed: save the set with its images embedded)"
            )
    return memoryview(value.as_buffer())


def _short_names(files: Sequence[Path]) -> list[str]:
    """The files' names as valid Unicode, with as much of the folders before them as makes them differ."""
    texts = [path.as_posix().encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace") for path in files]
    depth = max(text.count("/") for text in texts) + 1
    for length in range(1, depth):
        names = ["/".join(text.split("/")[-length:]) for text in texts]
        if len(set(names)) == len(names):
            return names
    return texts
