"""Memory that a process shares with the workers it forks: records go there to be decoded, and the samples come back in it.

It is used again and again, since the system takes several times longer to give new shared memory than it takes to fill it.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import pyarrow as pa
import torch
from torch import Tensor

from train.data.plan import Records

_ENVELOPE = 4096  # bytes: more than a stream of record batches has beside them


class Sent(NamedTuple):
    """Records whose rows, where they have some, lie in the first `size` bytes of a slot."""

    records: Records
    slot: int
    size: int


class Layout(NamedTuple):
    """Where a tensor lies in a slot, in elements of its type."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Slots:
    """So many slots that are filled in turn, made before the workers are forked; pickled, they stand for themselves there.

    Whoever puts something into the last one knows that the first one is free again.
    """

    def __init__(self, count: int) -> None:
        self._files = [os.memfd_create("slot") for _ in range(count)]
        self._views = [memoryview(b"")] * count  # of this process
        self._turns = itertools.cycle(range(count))
        _made[id(self)] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_here, (id(self),)

    def __del__(self) -> None:
        for file in self._files:
            os.close(file)

    def put(self, records: Records) -> Sent:
        """What a worker gets instead of the records."""
        slot = next(self._turns)
        if records.rows is None:
            return Sent(records, slot, 0)
        size = _ENVELOPE + sum(map(pa.ipc.get_record_batch_size, records.rows.to_batches()))
        with (
            pa.FixedSizeBufferWriter(pa.py_buffer(self._view(slot, size))) as sink,
            pa.ipc.new_stream(sink, records.rows.schema) as stream,
        ):
            stream.write_table(records.rows)
        return Sent(records._replace(rows=None), slot, size)

    def get(self, sent: Sent) -> Records:
        """The records as they were put; their bytes are still in the slot."""
        if not sent.size:
            return sent.records
        with pa.ipc.open_stream(pa.py_buffer(self._view(sent.slot, sent.size))) as stream:
            return sent.records._replace(rows=stream.read_all())

    def room(self, slot: int, size: int) -> Tensor:
        """The first bytes of a slot as uint8 (size,)."""
        return torch.frombuffer(self._view(slot, size), dtype=torch.uint8, count=size)

    def tensors(self, slot: int, size: int, layouts: Mapping[str, Layout]) -> dict[str, Tensor]:
        """What lies in the room of a slot: nothing where no sample could be read."""
        if not layouts:
            return {}
        room = self.room(slot, size)
        return {name: room.view(at.dtype).as_strided(at.shape, at.strides, at.offset) for name, at in layouts.items()}

    def _view(self, slot: int, size: int) -> memoryview:
        if len(self._views[slot]) < size:
            if os.fstat(self._files[slot]).st_size < size:  # no other process has made it longer
                os.ftruncate(self._files[slot], size + size // 4)
            self._views[slot] = memoryview(mmap.mmap(self._files[slot], 0))
        return self._views[slot]


_made: WeakValueDictionary[int, Slots] = WeakValueDictionary()


def _made_here(number: int) -> Slots:
    return _made[number]


def layout(tensor: Tensor) -> Layout:
    return Layout(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
