"""Which records a process reads next: the order of `order.py` applied to a source, cut into lane batches.

A plan is a function of (seed, position, lanes); nothing of it is saved but the row counts that a stream has taught so far.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from train.data.order import Indices, block_order, map_order, shard_order
from train.data.source import MapSource, Source, StreamSource

T = TypeVar("T")

_MAP_CHUNK = 8192  # positions ordered at once, which makes the order's cost per sample about a microsecond
_MAP_EPOCHS = 8  # and no more epochs than this, each of which costs as much as hundreds of samples


class Records(NamedTuple):
    """One micro-batch before decoding: epoch and key of each sample, and the rows unless the worker takes them by key."""

    epochs: Indices
    keys: Indices
    rows: pa.Table | None


@dataclass(frozen=True)
class Share:
    """The lanes, of `micro` samples each, that this process computes of each global batch of `batch` samples."""

    batch: int
    micro: int
    lanes: range

    @property
    def places(self) -> Indices:
        """The samples' places in the global batch, lane after lane."""
        places: Indices = np.add.outer(np.array(self.lanes) * self.micro, np.arange(self.micro)).ravel()
        return places


def epoch_length(source: Source) -> int | None:
    """The samples of an epoch; None while a stream has not told."""
    if isinstance(source, MapSource):
        return source.size
    sizes = [size for size in source.sizes if size is not None]
    return sum(sizes) if len(sizes) == source.shards else None


def rows_of(source: Source, records: Records) -> pa.Table:
    """The rows of some records: a stream has read them already, a map-style source takes them by key."""
    if isinstance(source, MapSource):
        return source.take(records.keys)
    assert records.rows is not None
    return records.rows


def training_plan(source: Source, share: Share, position: int, *, seed: int, shuffle: bool, block: int) -> Iterator[Records]:
    """The micro-batches of this process from `position` on, without end."""
    if isinstance(source, MapSource):
        return _map_plan(source, share, position, seed, shuffle)
    blocks = readahead(lambda: stream_blocks(source, position, seed=seed, shuffle=shuffle, size=block), depth=1)
    return _stream_plan(blocks, share, position)


def evaluation_plan(source: Source, micro: int, rank: int, processes: int) -> Iterator[Records]:
    """Every sample once in the source's own order: micro-batch j goes to process j mod `processes`; the last may be shorter."""
    if isinstance(source, MapSource):
        for first in range(rank * micro, source.size, processes * micro):
            keys = np.arange(first, min(first + micro, source.size), dtype=np.int64)
            yield Records(np.zeros_like(keys), keys, None)
        return
    yield from (records for place, records in enumerate(_in_order(source, micro)) if place % processes == rank)


def first_records(source: Source, count: int) -> Iterator[Records]:
    """The first `count` records in the source's own order, one at a time, read on this thread."""
    plan = evaluation_plan(source, 1, 0, 1) if isinstance(source, MapSource) else _in_order(source, 1)
    return itertools.islice(plan, count)


def _map_plan(source: MapSource, share: Share, position: int, seed: int, shuffle: bool) -> Iterator[Records]:
    places = share.places
    steps = max(1, min(_MAP_CHUNK // places.size, _MAP_EPOCHS * source.size // share.batch))
    while True:
        starts = position + share.batch * np.arange(steps, dtype=np.int64)
        positions = np.add.outer(starts, places).ravel()
        epochs, keys = map_order(positions, source.size, seed, shuffle=shuffle)
        for first in range(0, positions.size, share.micro):
            part = slice(first, first + share.micro)
            yield Records(epochs[part], keys[part], None)
        position += steps * share.batch


class Block(NamedTuple):
    """Consecutive positions of a stream: the keys in their permuted order, and the rows as they were read, which that order
    takes place by place."""

    start: int
    epoch: int
    keys: Indices
    rows: pa.Table
    order: Indices


def stream_blocks(source: StreamSource, position: int, *, seed: int, shuffle: bool, size: int) -> Iterator[Block]:
    """The blocks of a stream from the one that holds `position` on.

    Shards whose row count is known are passed over unread. A block is given out only when it is known whether its epoch goes
    on, so that whoever has consumed an epoch's last sample knows the epoch's length.
    """
    length = epoch_length(source)
    epoch = position // length if length else 0
    epoch_start = epoch * length if length else 0
    while True:
        number = max(position - epoch_start, 0) // size
        keys_left, rows_left = np.empty(0, dtype=np.int64), None
        for keys, rows in _epoch_rows(source, epoch, seed, shuffle, number * size):
            keys_left = np.concatenate([keys_left, keys])
            rows_left = rows if rows_left is None else pa.concat_tables([rows_left, rows])
            while len(keys_left) > size:
                start = epoch_start + number * size
                yield _block(start, epoch, number, keys_left[:size], rows_left.slice(0, size), seed, shuffle)
                keys_left, rows_left, number = keys_left[size:], rows_left.slice(size), number + 1
        if rows_left is not None:
            yield _block(epoch_start + number * size, epoch, number, keys_left, rows_left, seed, shuffle)
        epoch += 1
        epoch_start += epoch_length(source) or 0  # known by now: every shard has been read or passed over


def _block(start: int, epoch: int, number: int, keys: Indices, rows: pa.Table, seed: int, shuffle: bool) -> Block:
    order = block_order(epoch, number, len(keys), seed, shuffle=shuffle)
    return Block(start, epoch, keys[order], rows, order)


def _epoch_rows(source: StreamSource, epoch: int, seed: int, shuffle: bool, skip: int) -> Iterator[tuple[Indices, pa.Table]]:
    """The rows of one epoch in reading order without the first `skip`, with their keys; notes each shard's row count."""
    for shard in shard_order(epoch, source.shards, seed, shuffle=shuffle):
        size = source.sizes[shard]
        if size is not None and skip >= size:
            skip -= size
            continue
        row = 0 if size is None else skip
        for table in source.tables(shard, row):
            first, row = row, row + table.num_rows
            if row > skip:
                late = max(skip - first, 0)
                yield source.key(shard, 0) + np.arange(first + late, row, dtype=np.int64), table.slice(late)
        source.sizes[shard] = row
        skip = max(skip - row, 0)


def _stream_plan(blocks: Iterator[Block], share: Share, position: int) -> Iterator[Records]:
    """Cut the blocks into this process's micro-batches."""
    block = next(blocks)
    while True:
        for lane in share.lanes:
            at = position + lane * share.micro
            end = at + share.micro
            epochs, keys, rows = [], [], []
            while at < end:
                while at >= block.start + len(block.keys):
                    block = next(blocks)
                here = slice(at - block.start, end - block.start)
                keys.append(block.keys[here])
                epochs.append(np.full_like(keys[-1], block.epoch))
                rows.append(_taken(block.rows, block.order[here]))
                at += len(keys[-1])
            yield Records(np.concatenate(epochs), np.concatenate(keys), pa.concat_tables(rows))
        position += share.batch


def _taken(rows: pa.Table, places: Indices) -> pa.Table:
    """The rows at some places, copied once. `Table.take` would copy all rows to have them in one piece first."""
    return pa.concat_tables([rows.slice(place, 1) for place in places.tolist()]).combine_chunks()


def _in_order(source: StreamSource, micro: int) -> Iterator[Records]:
    keys_left, rows_left = np.empty(0, dtype=np.int64), None
    for keys, rows in _epoch_rows(source, 0, 0, False, 0):
        keys_left = np.concatenate([keys_left, keys])
        rows_left = rows if rows_left is None else pa.concat_tables([rows_left, rows])
        while len(keys_left) >= micro:
            yield Records(np.zeros(micro, dtype=np.int64), keys_left[:micro], rows_left.slice(0, micro))
            keys_left, rows_left = keys_left[micro:], rows_left.slice(micro)
    if rows_left is not None and len(keys_left):
        yield Records(np.zeros_like(keys_left), keys_left, rows_left.slice(0, micro))


def readahead(start: Callable[[], Iterator[T]], depth: int) -> Iterator[T]:
    """Run an iterator on a thread of its own, up to `depth` items ahead; its error is raised where it would have been."""
    items: queue.Queue[tuple[T] | BaseException] = queue.Queue(depth)
    closed = threading.Event()

    def put(item: tuple[T] | BaseException) -> bool:
        while not closed.is_set():
            try:
                items.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def run() -> None:
        try:
            for value in start():
                if not put((value,)):
                    return
            put(StopIteration())
        except BaseException as error:  # handed to the consumer
            put(error)

    threading.Thread(target=run, name="readahead", daemon=True).start()
    try:
        while True:
            item = items.get()
            if isinstance(item, StopIteration):
                return
            if isinstance(item, BaseException):
                raise item
            yield item[0]
    finally:
        closed.set()
