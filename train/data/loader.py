"""Micro-batches for one process: records in their planned order, decoded in worker processes, handed over in that same order."""

from __future__ import annotations

import gc
import itertools
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
import xxhash
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from train.data.plan import Records, readahead, rows_of
from train.data.slots import Layout, Sent, Slots, layout
from train.data.source import Source
from train.errors import RunError
from train.stopping import ask_for_signal_when_parent_dies

_READY = 4  # micro-batches that are read ahead, beside those that the workers have


class Decoder(Protocol):
    """Turns one row into one sample; ValueError says what is wrong with the row."""

    def __call__(self, row: dict[str, Any], epoch: int, key: int) -> dict[str, Tensor]: ...


class BadSample(NamedTuple):
    """A sample that could not be decoded."""

    key: int
    where: str
    reason: str


def refusal(bad: BadSample) -> RunError:
    """What to raise where bad samples are not left out."""
    return RunError(
        f"{bad.where}: {bad.reason}\nMend or remove the sample, or set data.on_error=skip to go on without such samples."
    )


@dataclass
class Batch:
    """A decoded micro-batch: the samples' fields stacked along dimension 0, the keys of those samples, and the bad ones.

    `digest` stands for all that is in it: samples, order, decoding and augmentation.
    """

    fields: dict[str, Tensor]
    keys: list[int]
    bad: list[BadSample] = field(default_factory=list)
    failure: str | None = None
    digest: int = 0

    def to(self, device: torch.device) -> Batch:
        fields = {name: value.to(device, non_blocking=True) for name, value in self.fields.items()}
        return replace(self, fields=fields)

    def pin_memory(self) -> Batch:
        return replace(self, fields={name: value.pin_memory() for name, value in self.fields.items()})

    def clone(self) -> Batch:
        return replace(self, fields={name: value.clone() for name, value in self.fields.items()})


@dataclass
class Returned:
    """A batch whose fields lie in a slot, from where they have to be copied."""

    batch: Batch
    slots: Slots
    slot: int
    size: int
    layouts: dict[str, Layout]

    def pin_memory(self) -> Batch:
        return self._in_slot().pin_memory()

    def clone(self) -> Batch:
        return self._in_slot().clone()

    def _in_slot(self) -> Batch:
        return replace(self.batch, fields=self.slots.tensors(self.slot, self.size, self.layouts))


class Decoding(Dataset[Batch]):
    """What a worker does with the records of a micro-batch."""

    def __init__(self, source: Source, decoder: Decoder) -> None:
        self.source = source
        self.decoder = decoder

    def __getitem__(self, records: Records) -> Batch:
        return self.into(_new_room, records)

    def into(self, room: Room, records: Records) -> Batch:
        """The batch, with its fields in the room that is given for them."""
        with _one_thread():
            return self._decode(records, room)

    def _decode(self, records: Records, room: Room) -> Batch:
        try:
            table = rows_of(self.source, records)
        except RunError as error:
            return Batch({}, [], failure=str(error))
        samples, good, bad = [], [], []
        for row, epoch, key in zip(table.to_pylist(), records.epochs.tolist(), records.keys.tolist(), strict=True):
            try:
                samples.append(self.decoder(row, epoch, key))
                good.append(key)
            except ValueError as error:
                bad.append(BadSample(key, self.source.where(key), str(error)))
            except Exception as error:  # a fork's transform may raise anything
                bad.append(BadSample(key, self.source.where(key), f"{type(error).__name__}: {error}"))
        try:
            fields = _stacked(samples, room) if samples else {}
        except RuntimeError:
            if uneven := self._uneven(samples, good):
                return Batch({}, good, bad, uneven)
            raise
        return Batch(fields, good, bad, digest=_digest(fields, good))

    def _uneven(self, samples: Sequence[dict[str, Tensor]], keys: Sequence[int]) -> str | None:
        """Which sample cannot be stacked with the first one, and why."""
        for name, first in samples[0].items():
            for key, sample in zip(keys, samples, strict=True):
                one, other = self.source.where(key), self.source.where(keys[0])
                if sample[name].shape != first.shape:
                    return (
                        f"{one} is of size {tuple(sample[name].shape)} and {other} of {tuple(first.shape)}: samples of a batch "
                        "must have one size; add Resize and CenterCrop or RandomCrop to data.transforms.train and "
                        "data.transforms.validation"
                    )
                if sample[name].dtype != first.dtype:
                    return (
                        f"{one} is of type {sample[name].dtype} and {other} of {first.dtype}: samples of a batch must have one "
                        "type; let data.transforms.train and data.transforms.validation give the same to all"
                    )
        return None


Room = Callable[[int], Tensor]  # so many bytes of memory, aligned to 64


def _new_room(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


def _stacked(samples: Sequence[dict[str, Tensor]], room: Room) -> dict[str, Tensor]:
    """The samples' fields along a new dimension 0, one after the other in one room.

    Pictures of bytes stay as decoders give them, with the channels of a pixel side by side: to rearrange bytes takes longer
    than to decode a tenth of a picture, and the task turns them into numbers anyway.
    """
    sizes = {name: first.nbytes * len(samples) for name, first in samples[0].items()}
    ends = dict(zip(sizes, itertools.accumulate(-(-size // 64) * 64 for size in sizes.values()), strict=True))
    whole = room(max(ends.values()))
    fields = {}
    for name, first in samples[0].items():
        values = [sample[name] for sample in samples]
        if any(value.dtype != first.dtype for value in values):
            raise RuntimeError("a stack has one type")
        pictures = first.dtype == torch.uint8 and first.dim() == 3
        if pictures:
            values = [value.permute(1, 2, 0) for value in values]
        start = ends[name] - -(-sizes[name] // 64) * 64
        place = whole[start : start + sizes[name]].view(first.dtype).view(len(values), *values[0].shape)
        stacked = torch.stack(values, out=place)
        fields[name] = stacked.permute(0, 3, 1, 2) if pictures else stacked
    return fields


def _digest(fields: dict[str, Tensor], keys: Sequence[int]) -> int:
    """63 bits, so that a signed integer holds them."""
    digest = xxhash.xxh3_64(",".join(map(str, keys)).encode())
    for name, value in sorted(fields.items()):
        as_stored = value if value.is_contiguous() else value.permute(0, 2, 3, 1)
        digest.update(name.encode())
        digest.update(as_stored.view(-1).view(torch.uint8).numpy().data)
    return digest.intdigest() >> 1


@contextmanager
def _one_thread() -> Iterator[None]:
    """As in a worker also where there is none: another number of threads adds the pixels of a picture in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Sent(Dataset[Returned]):
    """What a worker does with what it is sent."""

    def __init__(self, decoding: Decoding, slots: Slots) -> None:
        self.decoding = decoding
        self.slots = slots

    def __getitem__(self, sent: Sent) -> Returned:
        size = 0

        def room(wanted: int) -> Tensor:
            nonlocal size
            size = wanted
            return self.slots.room(sent.slot, size)

        batch = self.decoding.into(room, self.slots.get(sent))
        layouts = {name: layout(value) for name, value in batch.fields.items()}
        return Returned(replace(batch, fields={}), self.slots, sent.slot, size, layouts)


class _Plan(Iterable[Records | Sent]):
    """A plan as DataLoader wants its sampler: something to iterate over anew each time, here on a thread of its own."""

    def __init__(self, start: Callable[[], Iterator[Records | Sent]]) -> None:
        self.start = start
        self.held = False

    def __iter__(self) -> Iterator[Records | Sent]:
        return iter(()) if self.held else readahead(self.start, _READY)


class Loader(DataLoader[Batch]):
    """Starts its workers with SIGTERM and SIGINT blocked, so that from their first moment a signal to the process group
    cannot take them from under a trainer that is about to save. They stay from one iteration to the next."""

    def __iter__(self) -> Any:  # torch does not export the type
        if self._iterator is None:
            self.start_workers()
        return map(_received, super().__iter__())

    def start_workers(self) -> None:
        """They read nothing yet: the process hears signals while it waits for data."""
        if not self.num_workers:
            return
        assert isinstance(self.sampler, _Plan)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
        try:
            self.sampler.held = True
            super().__iter__()
        finally:
            self.sampler.held = False
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _received(batch: Batch | Returned) -> Batch:
    return batch.clone() if isinstance(batch, Returned) else batch


def load(
    source: Source,
    decoder: Decoder,
    plan: Callable[[], Iterator[Records]],
    *,
    workers: int,
    prefetch: int,
    pin_memory: bool,
) -> Loader:
    """The micro-batches of a plan, the same ones in the same order for any number of workers."""
    decoding = Decoding(source, decoder)
    # A slot is filled again when those that are being decoded, that are ready and that is being put have each had another.
    slots = Slots(workers * prefetch + _READY + 2) if workers else None
    dataset: Dataset[Any] = _Sent(decoding, slots) if slots else decoding
    return Loader(
        dataset,
        sampler=_Plan((lambda: map(slots.put, plan())) if slots else plan),
        batch_size=None,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,  # starts in milliseconds and shares the source's memory
        prefetch_factor=prefetch if workers else None,
        persistent_workers=workers > 0,
        pin_memory=pin_memory,
        worker_init_fn=_settle,
        generator=torch.Generator(),  # DataLoader draws from it; the lanes' generators stay out of it
    )


def _settle(worker: int) -> None:
    """A worker whose trainer is killed while it sends would wait for the rest for ever, and its copies of the trainer's sockets
    would keep the other processes waiting too. And the trainer's objects are no garbage here: to look at each of them now and
    then takes a twentieth of a worker's time, and copies the memory that they lie in."""
    ask_for_signal_when_parent_dies(signal.SIGKILL)
    gc.freeze()
