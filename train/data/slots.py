"""Memory that a process shares with the workers it forks, for records on their way to be decoded.

It is used again and again: the system takes several times longer to give new shared memory than it takes to fill it.
"""

from __future__ import annotations

import itertools
import mmap
import os
from typing import NamedTuple

import pyarrow as pa

from train.data.plan import Records
from train.data.records import SCHEMA

_ENVELOPE = 4096  # bytes: more than a stream of record batches has beside them


class Sent(NamedTuple):
    """Records whose rows lie in a slot."""

    records: Records
    slot: int
    size: int


class Slots:
    """So many slots that are filled in turn, made before the workers are; whoever fills one again knows that it has been read."""

    def __init__(self, count: int) -> None:
        self._files = [os.memfd_create("records") for _ in range(count)]
        self._views = [memoryview(b"")] * count  # of this process
        self._turns = itertools.cycle(range(count))

    def put(self, records: Records) -> Records | Sent:
        """What a worker gets instead of the records."""
        if records.rows is None:
            return records
        size = _ENVELOPE + sum(map(pa.ipc.get_record_batch_size, records.rows.to_batches()))
        slot = next(self._turns)
        if os.fstat(self._files[slot]).st_size < size:
            os.ftruncate(self._files[slot], size + size // 4)
        with (
            pa.FixedSizeBufferWriter(pa.py_buffer(self._view(slot, size))) as sink,
            pa.ipc.new_stream(sink, SCHEMA) as stream,
        ):
            stream.write_table(records.rows)
        return Sent(records._replace(rows=None), slot, size)

    def get(self, sent: Records | Sent) -> Records:
        """The records as they were; their bytes are still in the slot."""
        if isinstance(sent, Records):
            return sent
        with pa.ipc.open_stream(pa.py_buffer(self._view(sent.slot, sent.size))) as stream:
            return sent.records._replace(rows=stream.read_all())

    def _view(self, slot: int, size: int) -> memoryview:
        if len(self._views[slot]) < size:  # another process may have made it longer
            self._views[slot] = memoryview(mmap.mmap(self._files[slot], 0))
        return self._views[slot]

    def __del__(self) -> None:
        for file in self._files:
            os.close(file)
