"""The one form of a record: `image` as struct<bytes, path> and `label` as text, whatever a file stores.

A label is the name of its class where the column has names. A picture is its bytes, or where those are null the path of a local
file, or the address from which it could not be fetched.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit
from urllib.request import urlopen

import pyarrow as pa
import pyarrow.compute as pc

from train.data.download import TIMEOUT
from train.data.readers import is_remote, open_file

# large: a block of many big pictures passes the 2 GiB that 32-bit offsets reach.
IMAGE = pa.struct([("bytes", pa.large_binary()), ("path", pa.string())])
SCHEMA = pa.schema([("image", IMAGE), ("label", pa.string())])


def record_table(image: pa.ChunkedArray, label: pa.ChunkedArray, file: str, names: tuple[str, ...]) -> pa.Table:
    """The records of two columns as `file` stores them; `names` are those of the label's classes, () where it has none."""
    return pa.table([images(image, file), label_texts(label, names)], schema=SCHEMA)


def images(column: pa.ChunkedArray, file: str) -> pa.Array:
    """Bytes, text that is a path seen from the file's folder, or a struct of both."""
    array = _whole(column)
    if pa.types.is_struct(array.type):
        fields = [field.name for field in array.type]
        values = {name: array.field(name) for name in ("bytes", "path") if name in fields}
    else:
        values = {"path" if pa.types.is_string(array.type) or pa.types.is_large_string(array.type) else "bytes": array}
    data = values.get("bytes", pa.nulls(len(array))).cast(pa.large_binary())
    path = values.get("path", pa.nulls(len(array))).cast(pa.string())
    if data.null_count:
        data, path = _resolved(data, path, posixpath.dirname(file))
    return pa.StructArray.from_arrays([data, path], fields=list(IMAGE))


def label_texts(column: pa.ChunkedArray, names: tuple[str, ...] = ()) -> pa.Array:
    array = _whole(column)
    if names and pa.types.is_integer(array.type):
        inside = pc.and_(pc.greater_equal(array, 0), pc.less(array, len(names)))
        named = pa.array(names, pa.string()).take(pc.if_else(inside, array, None))
        if not pc.any(pc.invert(inside)).as_py():
            return named
        # A number that is no class must not be taken for one that is called so.
        other = pa.array([None if value in names else value for value in array.cast(pa.string()).to_pylist()], pa.string())
        return pc.if_else(inside, named, other)
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.int8())
    return array.cast(pa.string())


def _whole(column: pa.ChunkedArray) -> pa.Array:
    """`combine_chunks` would copy a single piece too."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _resolved(data: pa.Array, path: pa.Array, folder: str) -> tuple[pa.Array, pa.Array]:
    """Paths made whole where there are no bytes, and the bytes fetched where such a path is remote."""
    missing = pc.is_null(data).to_pylist()
    paths = [
        posixpath.join(folder, name) if gone and name and not is_remote(name) else name
        for gone, name in zip(missing, path.to_pylist(), strict=True)
    ]
    far = [place for place, name in enumerate(paths) if missing[place] and name and is_remote(name)]
    if far:
        values = data.to_pylist()
        with ThreadPoolExecutor(16) as pool:
            for place, content in zip(far, pool.map(_fetch, [paths[place] for place in far]), strict=True):
                values[place] = content
        data = pa.array(values, pa.large_binary())
    return data, pa.array(paths, pa.string())


def _fetch(file: str) -> bytes | None:
    """None where it is not to be had: one sample's trouble, which is told when that is decoded."""
    try:
        # fsspec would want aiohttp for the web, a dozen packages.
        with urlopen(file, timeout=TIMEOUT) if urlsplit(file).scheme in ("http", "https") else open_file(file) as opened:
            content: bytes = opened.read()
            return content
    except Exception:  # of several libraries
        return None


def unfetched(table: pa.Table) -> Iterator[tuple[int, str]]:
    """Place and address of each picture that could not be fetched."""
    image = _whole(table["image"])
    missing = pc.and_(pc.is_null(image.field("bytes")), pc.match_substring(image.field("path"), "://"))
    for place in pc.indices_nonzero(missing.fill_null(False)).to_pylist():
        yield place, image.field("path")[place].as_py()
