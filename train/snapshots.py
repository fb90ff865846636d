"""What a checkpoint holds of a trainer, and putting it back."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from train.checkpoint import Snapshot
from train.data.source import Source, StreamSource
from train.optimizer_state import load_optimizer_state, optimizer_state
from train.parallel.processes import Processes
from train.weights import cpu_copies, cpu_copy, load_model, part_copies, part_copy

if TYPE_CHECKING:
    from train.trainer import Trainer

_PLAIN = ("position", "evaluated", "metrics", "skipped", "wandb_id")  # kept as they are


def take(trainer: Trainer) -> Snapshot:
    """All that the rest of the run depends on; all processes take part."""
    in_parts = trainer.engine.together
    into = trainer.saver.spare()
    copies, copied = (part_copies, part_copy) if in_parts else (partial(cpu_copies, into=into), partial(cpu_copy, into=into))
    tensors, packed = optimizer_state(trainer.plain, trainer.optimizer.optimizer, copied)
    if in_parts:
        states = trainer.processes.gather_objects(packed["state"])
        packed["state"] = {name: values for state in states for name, values in state.items()}
    average, scaler = trainer.average, trainer.accelerator.scaler
    state = {
        **{name: getattr(trainer, name) for name in _PLAIN},
        "best": dict(trainer.best),  # which is changed in place while this is written
        "lanes": trainer.job.lanes.count,
        "shown": trainer.shown_everywhere(),
        "receipt": trainer.journal.history(),
        "seconds": trainer.journal.seconds,
        "ema_updates": None if average is None else int(average.n_averaged),
        "optimizer": packed,
        "scaler": None if scaler is None else scaler.state_dict(),
        "sizes": _shard_sizes(trainer.job.sources.train, trainer.processes),
        "identity": trainer.job.identity(),
        "config": trainer.config.model_dump(mode="json"),
    }
    averaged = {} if average is None else {"ema": copies(average.module.state_dict())}
    parts = {"model": copies(trainer.plain.state_dict()), "optimizer": tensors, **averaged}
    return Snapshot(trainer.step, parts, state, in_parts)


def put_back(trainer: Trainer, snapshot: Snapshot) -> None:
    """Let a trainer go on from where the snapshot was taken."""
    state, tensors = snapshot.state, snapshot.tensors
    load_model(trainer.plain, tensors["model"])
    if state["config"]["optimizer"]["name"] == trainer.config.optimizer.name:  # another one, if allowed, starts anew
        saved = tensors.get("optimizer", {}), state["optimizer"]
        load_optimizer_state(trainer.plain, trainer.optimizer.optimizer, *saved, keep=trainer.learner.keep)
    if trainer.average is not None:
        load_model(trainer.average.module, tensors.get("ema", tensors["model"]))
        trainer.average.n_averaged.fill_(state["ema_updates"] or 0)
    if trainer.accelerator.scaler is not None and state["scaler"]:
        trainer.accelerator.scaler.load_state_dict(state["scaler"])
    trainer.step = snapshot.step
    trainer.shown = state["shown"] if trainer.processes.main else 0  # the sum over all processes
    for name in (*_PLAIN, "best", "seconds"):
        setattr(trainer, name, state[name])


def _shard_sizes(source: Source, processes: Processes) -> list[int | None]:
    """The row counts of a stream's shards as far as any process has learned them."""
    if not isinstance(source, StreamSource):
        return []
    everyone = processes.gather_objects(source.sizes)
    return [next((size for size in sizes if size is not None), None) for sizes in zip(*everyone, strict=True)]
