"""Records sent through shared memory arrive as they were."""

from __future__ import annotations

import itertools
import os
import pickle
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pyarrow as pa

from tests import made
from train.config.schema import Data
from train.data.pictures import open_pictures
from train.data.plan import Records, Share, evaluation_plan, training_plan
from train.data.records import SCHEMA
from train.data.slots import Slots


def records(*sizes: int) -> Records:
    """Pictures of so many bytes, all different."""
    rows = [{"image": {"bytes": os.urandom(size), "path": None}, "label": str(size)} for size in sizes]
    return Records(np.zeros(len(sizes), np.int64), np.arange(len(sizes)), pa.Table.from_pylist(rows, SCHEMA))


def test_a_worker_gets_what_was_put_also_where_a_slot_has_grown_since_it_was_forked() -> None:
    slots = Slots(2)
    sizes = [(10,), (0, 5000), (100_000, 3), (1,), (2_000_000,), (7, 7, 7)]
    sent = [records(*size) for size in sizes]
    context = get_context("fork")
    here, there = context.Pipe()

    def work() -> None:
        while True:
            there.send(slots.get(there.recv()))

    worker = context.Process(target=work, daemon=True)
    worker.start()
    for one in sent:
        here.send(slots.put(one))
        got = here.recv()
        assert got.rows.equals(one.rows) and (got.keys == one.keys).all()
    worker.kill()
    worker.join()


def test_records_wait_in_their_slots_until_the_last_one_has_been_filled() -> None:
    slots, wanted = Slots(3), [records(number) for number in range(1, 10)]
    for first in range(0, 9, 3):
        sent = [slots.put(one) for one in wanted[first : first + 3]]
        assert [slots.get(one).rows for one in sent] == [one.rows for one in wanted[first : first + 3]]


def test_a_micro_batch_goes_to_a_worker_without_the_block_that_it_is_of(tmp_path: Path) -> None:
    made.shards(tmp_path / "set", [125, 125])
    source = open_pictures(Data(path=str(tmp_path / "set"), classes=3))[0].train
    whole = sum(len(made.png(number)) for number in range(250))
    training = training_plan(source, Share(4, 2, range(2)), 0, seed=0, shuffle=True, block=250)
    for one in itertools.islice(itertools.chain([next(training)], evaluation_plan(source, 2, 0, 1)), 3):
        sent = Slots(1).put(one)
        assert len(one.keys) == 2
        assert sent.size < whole / 4  # 2 of 250 pictures, and what a stream of records costs
        assert len(pickle.dumps(sent)) < 1000
