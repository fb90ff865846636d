"""Micro-batches for one process: records in their planned order, decoded in worker processes, handed over in that same order."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
import xxhash
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from train.data.plan import Records, readahead, rows_of
from train.data.slots import Sent, Slots
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


class Decoding(Dataset[Batch]):
    """What a worker does with the records of a micro-batch."""

    def __init__(self, source: Source, decoder: Decoder) -> None:
        self.source = source
        self.decoder = decoder

    def __getitem__(self, records: Records) -> Batch:
        with _one_thread():
            return self._decode(records)

    def _decode(self, records: Records) -> Batch:
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
            fields = {name: _stacked([sample[name] for sample in samples]) for name in samples[0]} if samples else {}
        except RuntimeError:
            if uneven := self._uneven(samples, good):
                return Batch({}, good, bad, uneven)
            raise  # no shared memory, for one
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


def _stacked(values: list[Tensor]) -> Tensor:
    """The values along a new dimension 0; in a worker they are written to shared memory at once.

    Pictures of bytes stay as decoders give them, with the channels of a pixel side by side: to rearrange bytes takes longer
    than to decode a tenth of a picture, and the task turns them into numbers anyway.
    """
    if any(value.dtype != values[0].dtype for value in values):
        raise RuntimeError("a stack has one type")
    stacked: Tensor
    if values[0].dtype == torch.uint8 and values[0].dim() == 3:
        stacked = default_collate([value.permute(1, 2, 0) for value in values]).permute(0, 3, 1, 2)
    else:
        stacked = default_collate(values)
    return stacked


def _digest(fields: dict[str, Tensor], keys: Sequence[int]) -> int:
    """63 bits, so that a signed integer holds them."""
    digest = xxhash.xxh3_64(",".join(map(str, keys)).encode())
    for name, value in sorted(fields.items()):
        as_stored = value if value.is_contiguous() else value.permute(0, 2, 3, 1)
        digest.update(name.encode())
        digest.update(as_stored.view(-1).numpy().data)
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


class _Sent(Dataset[Batch]):
    """What a worker does with what it is sent."""

    def __init__(self, decoding: Decoding, slots: Slots) -> None:
        self.decoding = decoding
        self.slots = slots

    def __getitem__(self, sent: Records | Sent) -> Batch:
        return self.decoding[self.slots.get(sent)]


class _Plan(Iterable[Records | Sent]):
    """A plan as DataLoader wants its sampler: something to iterate over anew each time, here on a thread of its own."""

    def __init__(self, start: Callable[[], Iterator[Records | Sent]]) -> None:
        self.start = start
        self.held = False

    def __iter__(self) -> Iterator[Records | Sent]:
        return iter(()) if self.held else readahead(self.start, _READY)


class Loader(DataLoader[Batch]):
    """Starts its workers with SIGTERM and SIGINT blocked, so that from their first moment a signal to the process group
    cannot take them from under a trainer that is about to save."""

    def __iter__(self) -> Any:  # torch does not export the type
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
        try:
            return super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def start_workers(self) -> None:
        """Start those that stay from one iteration to the next, and read nothing yet."""
        if self.persistent_workers:
            assert isinstance(self.sampler, _Plan)
            self.sampler.held = True
            iter(self)
            self.sampler.held = False


def load(
    source: Source,
    decoder: Decoder,
    plan: Callable[[], Iterator[Records]],
    *,
    workers: int,
    prefetch: int,
    pin_memory: bool,
    persistent: bool = False,
) -> Loader:
    """The micro-batches of a plan, the same ones in the same order for any number of workers."""
    decoding = Decoding(source, decoder)
    # A slot is filled again when those that are being decoded, that are ready and that is being put have each had another.
    slots = Slots(workers * prefetch + _READY + 2) if workers else None
    return Loader(
        _Sent(decoding, slots) if slots else decoding,
        sampler=_Plan((lambda: map(slots.put, plan())) if slots else plan),
        batch_size=None,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,  # starts in milliseconds and shares the source's memory
        prefetch_factor=prefetch if workers else None,
        persistent_workers=persistent and workers > 0,
        pin_memory=pin_memory,
        worker_init_fn=_die_with_the_trainer,
        generator=torch.Generator(),  # DataLoader draws from it; the lanes' generators stay out of it
    )


def _die_with_the_trainer(worker: int) -> None:
    """A worker whose trainer is killed while it sends would wait for the rest for ever, and its copies of the trainer's sockets
    would keep the other processes waiting too."""
    ask_for_signal_when_parent_dies(signal.SIGKILL)
