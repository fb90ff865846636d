"""Text for language models: the tokens of a split's documents, one after the other, cut into blocks of equal length.

They are written once to the cache of `datasets`, a row a token, so that block b is at row b x context on any machine. A block is
`context` tokens and the one after them: each token of the split but the first is predicted once an epoch, as far as whole blocks
go, which leaves out less than a block at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import pyarrow as pa

from train.data.columns import Column, choose, is_text
from train.data.prepared import Table, prepare
from train.data.source import MapSource, Shards, Sources
from train.data.splits import Split, find_splits
from train.data.tokens import Tokenizer, dtype, open_tokenizer
from train.errors import RunError, UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from train.config.schema import Data

_USUAL = ("text", "content", "document", "article", "story", "sentence", "body")
TEXT_COLUMN = Column("data.text_column", is_text, _USUAL, is_text)
_TOKENS = 2**20  # that are kept together in the cache


@dataclass(frozen=True)
class Blocks(MapSource):
    """Records of one column, `tokens`: the bytes of a block's tokens, of the tokenizer's dtype."""

    files: tuple[str, ...]
    rows: Any  # a `datasets.Dataset` of the column `token`, in Arrow format
    context: int
    numbers: range  # of the blocks that are in this source

    @property
    def size(self) -> int:
        return len(self.numbers)

    def take(self, keys: NDArray[np.int64]) -> pa.Table:
        starts = [self.numbers[key] * self.context for key in keys.tolist()]
        blocks = [self.rows[start : start + self.context + 1]["token"].to_numpy() for start in starts]
        return pa.table({"tokens": pa.array([block.tobytes() for block in blocks], pa.binary())})

    def where(self, key: int) -> str:
        start = self.numbers[key] * self.context
        return f"tokens {start} to {start + self.context}"

    def divided(self, fraction: float) -> tuple[Blocks, Blocks]:
        """All but that fraction of the blocks, and those, from the end: texts whose parts are neighbours are not told apart."""
        kept = self.size - round(self.size * fraction)
        return replace(self, numbers=self.numbers[:kept]), replace(self, numbers=self.numbers[kept:])


def open_text(data: Data, say: Callable[[str], None] = lambda line: None) -> tuple[Sources, Tokenizer]:
    """Open the training and the validation split of `data`. `say` is told of what may take long, before it begins."""
    tokenizer = open_tokenizer(data.tokenizer)
    splits = find_splits(data, say)
    train = _blocks(splits.train, data, tokenizer, say)
    validation, name = None, splits.train.name
    if data.validation_fraction is not None:
        train, validation = train.divided(data.validation_fraction)
        if not train.size or not validation.size:
            blocks = train.size + validation.size
            raise UsageError(f"data.validation_fraction: {data.validation_fraction} of {blocks} blocks leaves a part without any")
    elif splits.validation is not None:
        validation, name = _blocks(splits.validation, data, tokenizer, say), splits.validation.name
    notes = [*splits.notes, f"training: {_extent(train, splits.train.name)}"]
    if validation is not None:
        notes.append(f"validation: {_extent(validation, name)}")
    return Sources(train, validation, tuple(notes), splits.train.identity(train.files)), tokenizer


def _blocks(split: Split, data: Data, tokenizer: Tokenizer, say: Callable[[str], None]) -> Blocks:
    reader = split.reader()
    [column] = choose(reader, [(TEXT_COLUMN, data.text_column)])
    shards = Shards(split.place.root, reader)
    alone = reader.in_pieces and shards.shards == 1
    separator = np.empty(0, dtype(tokenizer.vocabulary)) if alone else tokenizer.separator(data.separator)
    features = datasets.Features({"token": datasets.Value(separator.dtype.name)})

    def tables(shard: int) -> Iterator[pa.Table]:
        texts = _texts(shards, shard, column, skip_missing=data.on_error == "skip")
        for number, some in enumerate(texts):
            parts = [np.empty(0, separator.dtype)]
            for place, tokens in enumerate(tokenizer.encode(some)):
                if (shard or number or place) and not (reader.in_pieces and number):
                    parts.append(separator)
                parts.append(tokens)
            yield pa.table({"token": np.concatenate(parts)})

    made_by = f"{column} {tokenizer.identity} {separator.tolist()} {data.on_error}"
    rows = prepare(Table("tokens", shards, features, made_by, tables, rows=_TOKENS), say)
    count = max(len(rows) - 1, 0) // data.context
    if count == 0:
        raise RunError(
            f"split {split.name} has {len(rows)} tokens, which is less than a block of data.context={data.context} and one more: "
            "lower data.context, or take more text"
        )
    return Blocks(shards.files, rows, data.context, range(count))


def _texts(shards: Shards, shard: int, column: str, *, skip_missing: bool) -> Iterator[list[str]]:
    """The texts of a shard, some at a time."""
    row = 0
    for table in shards.rows(shard, 0, (column,)):
        texts = table[column].to_pylist()
        if None in texts and not skip_missing:
            where = shards.where(shards.key(shard, row + texts.index(None)))
            raise RunError(f"{where}: the text is missing\nMend or remove the row, or set data.on_error=skip to leave such out.")
        yield [text for text in texts if text is not None]
        row += len(texts)


def _extent(source: Blocks, name: str) -> str:
    return f"split {name}, {source.size} blocks of {source.context} tokens, taken in any order"
