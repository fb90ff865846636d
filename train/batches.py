"""The two streams of micro-batches that a job has for this process: training's without end, evaluation's once over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

from train.data.loader import Batch, Loader, load
from train.data.plan import Records, Share, evaluation_plan, training_plan
from train.data.source import Source
from train.job import Job


def training_batches(job: Job, position: int) -> Iterator[Batch]:
    """The micro-batches of this process's lanes, lane after lane and step after step, from `position` on. The workers start now;
    what is read ahead, from the first one that is asked for: a process that forks is better without reading threads."""
    data = job.config.data
    share = Share(job.config.batch.size, job.micro_batch, job.lanes.local)
    seed, shuffle, block = job.config.run.seed, data.shuffle, data.shuffle_block
    plan = partial(training_plan, job.sources.train, share, position, seed=seed, shuffle=shuffle, block=block)
    return chain.from_iterable([_load(job, job.sources.train, plan, training=True)])


def validation_batches(job: Job) -> Loader | None:
    """This process's part of the validation split, anew at each iteration. Its workers start now too."""
    source = job.sources.validation
    if source is None or job.config.evaluate.every.count == 0:
        return None
    plan = partial(evaluation_plan, source, job.micro_batch, job.lanes.rank, job.lanes.processes)
    return _load(job, source, plan, training=False)


def _load(job: Job, source: Source, plan: Callable[[], Iterator[Records]], *, training: bool) -> Loader:
    loader = load(
        source,
        job.task.decoder(job.config.run.seed, training=training),
        plan,
        workers=job.workers,
        prefetch=job.config.data.prefetch,
        pin_memory=job.accelerator.device.type == "cuda",
    )
    loader.start_workers()
    return loader
