"""A stream written once to the cache of `datasets` as one Arrow table, for rows to be taken in any order."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import pyarrow as pa

from train.data.download import CACHE_REFUSED
from train.data.locate import chain
from train.errors import LockstepError, RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from train.data.source import StreamSource

FEATURES = datasets.Features(
    {
        "image": {"bytes": datasets.Value("large_binary"), "path": datasets.Value("string")},
        "label": datasets.Value("string"),
        "key": datasets.Value("int64"),  # of the stream, which says where the row comes from
    }
)


class Records(datasets.ArrowBasedBuilder):  # type: ignore[misc]  # `datasets` has no types
    """`datasets` writes it under a lock and moves it into place whole, so that processes may ask for it together."""

    stream: StreamSource

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo(features=FEATURES)

    def _split_generators(self, dl_manager: Any) -> list[Any]:
        return [datasets.SplitGenerator("train", gen_kwargs={"shards": list(range(self.stream.shards))})]

    def _generate_tables(self, shards: list[int]) -> Iterator[tuple[Any, pa.Table]]:
        for shard in shards:
            row = self.stream.key(shard, 0)
            for number, table in enumerate(self.stream.tables(shard)):
                keys = pa.array(range(row, row + table.num_rows), pa.int64())
                row += table.num_rows
                yield datasets.builder.Key(shard, number), table.append_column("key", keys)


def prepare(stream: StreamSource, say: Callable[[str], None]) -> Any:
    """The stream's rows as a `datasets.Dataset`, from the cache where these files were written before."""
    try:
        builder = Records(dataset_name="records", hash=fingerprint(stream))
        builder.stream = stream
        if not Path(builder.cache_dir).exists():
            say(f"writing the samples of {len(stream.files)} files to the cache {builder.cache_dir}")
        builder.download_and_prepare()
    except Exception as error:
        causes = chain(error)
        for cause in causes:
            if isinstance(cause, LockstepError):
                raise cause from None
        if isinstance(causes[-1], OSError):
            raise RunError(CACHE_REFUSED.format(causes[-1])) from None
        raise
    return builder.as_dataset("train").with_format("arrow")


def fingerprint(stream: StreamSource) -> str:
    """Of what the rows are made of: the files, as they are now, and the columns."""
    digest = hashlib.sha256(f"{datasets.__version__} {FEATURES} {stream.image} {stream.label} {stream.reader.names}".encode())
    for file in stream.reader.files:
        path = Path(file)
        state = path.stat() if path.exists() else None
        digest.update(f"{file} {state and (state.st_size, state.st_mtime_ns)}\n".encode())
    return digest.hexdigest()[:32]
