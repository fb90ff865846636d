"""The keys of a configuration: the only place where a key, its default and its meaning are named.

Each key has an effect: what a change of it changes. A run's name and what a resume accepts follow from the effects.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StringConstraints, ValidationInfo, field_validator

from train.config import messages, values
from train.config.effects import Effect, Length, Numbers, Place, Report, Speed
from train.config.section import NamedSection, Section
from train.config.values import AtLeast0, AtLeast1, Auto, DataPath, Every, Filled, Interval, LocalPath, Switch, Transforms

MOVABLE = ("data.path", "data.tokenizer")  # what counts by its name alone: what is there is compared when it is opened


class Run(Section):
    name: Place[Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]+$", max_length=64)]] = Field(
        "run", description="name of the run, the first part of its folder's name"
    )
    seed: Numbers[values.Seed] = Field(0, description="seed of everything that is random")
    output_dir: Place[LocalPath] = Field(Path("outputs"), description="folder that holds the run folders")
    determinism: Numbers[Literal["strict", "fast"]] = Field(
        "strict", description="strict gives the same bits on any number of processes, fast promises nothing"
    )
    threads: Numbers[Auto | AtLeast1] = Field(
        "auto", description="CPU threads a process; auto: 1 under strict, an equal share of the cores under fast"
    )
    resume_from: Place[LocalPath | None] = Field(None, description="run or checkpoint folder to go on from")
    allow_changes: Place[tuple[str, ...]] = Field((), description="keys or sections whose change a resume accepts")

    @field_validator("allow_changes")
    @classmethod
    def _are_known(cls, allowed: tuple[str, ...]) -> tuple[str, ...]:
        for key in allowed:
            if effect(key) is None and key not in messages.fields(Config):
                guess = messages.nearest(key, messages.keys(Config), Config)
                raise ValueError(f"there is no key or section {key}" + (f"; did you mean {guess[0]}?" if guess else ""))
        return allowed


class Image(Section):
    mode: Numbers[Literal["RGB", "GRAY"]] = Field("RGB", description="colour mode that images are decoded to")
    mean: Numbers[tuple[float, ...]] = Field((0.0,), description="mean taken off each channel, of pixels in 0..1")
    std: Numbers[tuple[Annotated[float, Field(gt=0)], ...]] = Field(
        (1.0,), description="standard deviation that each channel is divided by, after the mean is taken off"
    )

    @field_validator("mean", "std")
    @classmethod
    def _fits_the_channels(cls, channels: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
        allowed = (1,) if info.data.get("mode") == "GRAY" else (1, 3)
        if len(channels) not in allowed:
            raise ValueError(f"must have {' or '.join(map(str, allowed))} values, not {len(channels)}")
        return channels


class DataTransforms(Section):
    train: Numbers[Transforms] = Field((), description="transforms of training samples, in order")
    validation: Report[Transforms] = Field((), description="transforms of validation samples, in order")


class Data(Section):
    path: Numbers[DataPath] = Field(description="data set: a folder, file or pattern, or a name on the Hub, or a URL")
    subset: Numbers[Filled | None] = Field(None, description="configuration of a data set that has several")
    revision: Numbers[Filled | None] = Field(None, description="commit, tag or branch of a data set on the Hub")
    streaming: Numbers[Switch] = Field(True, description="streaming: read as it comes instead of downloading first")
    train_split: Numbers[Filled] = Field("train", description="split that is trained on")
    validation_split: Report[Filled] = Field("auto", description="split that is evaluated on; auto: the one that fits")
    validation_path: Report[DataPath | None] = Field(None, description="data set to evaluate on, if it is another one")
    validation_fraction: Numbers[float | None] = Field(
        None, gt=0, lt=1, description="fraction of the training split that is evaluated on instead, where there is no other split"
    )
    image_column: Numbers[Filled] = Field("auto", description="column of the images")
    label_column: Numbers[Filled] = Field("auto", description="column of the labels")
    classes: Numbers[int | tuple[str, ...] | None] = Field(
        None, description="classes: their names in order, or their number where labels are numbers; empty: as the data say"
    )
    text_column: Numbers[Filled] = Field("auto", description="column of the texts")
    tokenizer: Numbers[Annotated[Literal["bytes"] | LocalPath, Field(union_mode="left_to_right")]] = Field(
        "bytes", description="tokenizer: bytes, or the path of a tokenizer.json"
    )
    separator: Numbers[Filled] = Field("auto", description="token between two documents; auto: the usual one, of bytes a zero")
    context: Numbers[int] = Field(256, ge=1, description="context: tokens of a sample")
    workers: Speed[Auto | AtLeast0] = Field("auto", description="worker processes that decode, per training process")
    prefetch: Speed[int] = Field(2, ge=1, description="lane batches that each worker holds ready")
    shuffle: Numbers[Switch] = Field(True, description="shuffle the training samples, anew in each epoch")
    shuffle_block: Numbers[int] = Field(2048, ge=1, description="records that are shuffled among themselves")
    on_error: Numbers[Literal["stop", "skip"]] = Field("stop", description="what a record that cannot be read does")
    image: Image = Image()
    transforms: DataTransforms = DataTransforms()

    @field_validator("validation_fraction")
    @classmethod
    def _no_other_validation(cls, fraction: float | None, info: ValidationInfo) -> float | None:
        if fraction is not None and (info.data.get("validation_split", "auto") != "auto" or info.data.get("validation_path")):
            raise ValueError("give one of validation_fraction, validation_split and validation_path")
        return fraction

    @field_validator("classes")
    @classmethod
    def _are_two_or_more(cls, classes: int | tuple[str, ...] | None) -> int | tuple[str, ...] | None:
        if isinstance(classes, tuple) and (twice := sorted({name for name in classes if classes.count(name) > 1})):
            raise ValueError(f"names {', '.join(twice)} twice")
        if classes is not None and (classes if isinstance(classes, int) else len(classes)) < 2:
            raise ValueError("must be two classes or more: with one there is nothing to learn")
        return classes


class Model(NamedSection):
    name: Numbers[Filled] = Field(description="model by its registered name; the other keys are its arguments")


class Batch(Section):
    size: Numbers[int] = Field(ge=1, description="batch size, the samples of one step over all processes")
    lanes: Numbers[Auto | AtLeast1] = Field(
        "auto", description="equal parts of a batch, whose number fixes the sums; auto: one for each process"
    )

    @field_validator("lanes")
    @classmethod
    def _divide_the_batch(cls, lanes: int | Auto, info: ValidationInfo) -> int | Auto:
        if lanes != "auto" and "size" in info.data and (problem := lanes_problem(info.data["size"], lanes)):
            raise ValueError(problem)
        return lanes


def lanes_problem(size: int, lanes: int) -> str | None:
    """Why a batch cannot be split into so many lanes, or None."""
    if size % lanes == 0:
        return None
    fewer = next(n for n in range(min(lanes, size), 0, -1) if size % n == 0)
    more = next((f" and {n}" for n in range(lanes, size + 1) if size % n == 0), "")
    return f"{lanes} lanes do not divide batch.size {size} evenly; nearest that do: {fewer}{more}"


class Optimizer(NamedSection):
    name: Numbers[Filled] = Field("SGD", description="optimizer by its name; the other keys are its arguments")
    lr: Numbers[float] = Field(0.01, gt=0, description="learning rate, the highest that the schedule reaches")
    clip_norm: Numbers[float | None] = Field(None, gt=0, description="gradient norm that larger ones are scaled to")


class Schedule(NamedSection):
    name: Numbers[Literal["constant", "linear", "cosine", "step", "one_cycle"]] = Field(
        "constant", description="schedule of the learning rate; the other keys are its arguments"
    )
    warmup: Numbers[Interval] = Field(Every(0), description="warmup: steps or epochs of a linear rise to lr")

    @property
    def depends_on_length(self) -> bool:
        """Whether the learning rate of a step depends on how many steps there will be."""
        return self.name in ("linear", "cosine", "one_cycle")


class Ema(Section):
    decay: Numbers[float | None] = Field(None, gt=0, lt=1, description="decay of the averaged weights; empty: none")


class Evaluate(Section):
    every: Report[Interval] = Field(Every(1, "epochs"), description="interval of evaluations")
    metric: Report[Filled] = Field(
        "auto", description="metric that decides which weights are the best; auto: the first that the task has"
    )
    patience: Length[int] = Field(0, ge=0, description="patience: evaluations without improvement before a stop; 0: never")


class Checkpoint(Section):
    every: Place[Interval] = Field(Every(1, "epochs"), description="interval of checkpoints")
    keep: Place[int] = Field(2, ge=1, description="checkpoints that are kept")


class Tracking(Section):
    every: Report[int] = Field(10, ge=0, description="steps between lines of metrics; 0: none")
    wandb: Report[Literal["off", "auto", "online", "offline"]] = Field("off", description="Weights & Biases")
    tensorboard: Report[Switch] = Field(False, description="TensorBoard")
    project: Report[Filled] = Field("lockstep", description="project that trackers file the run under")


class Switches(Section):
    precision: Numbers[Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8"]] = Field(
        "auto", description="precision of the arithmetic; auto: accelerate's mixed_precision"
    )
    compile: Numbers[Literal["auto", "off", "model", "blocks"]] = Field(
        "auto", description="compile the whole model, or its blocks one by one, which starts sooner; auto: as accelerate says"
    )
    cuda_graphs: Speed[Switch] = Field(False, description="CUDA graphs of the compiled kernels: no launch costs, more memory")
    channels_last: Numbers[Switch] = Field(False, description="channels last: pictures in the memory order of tensor cores")
    attention: Numbers[Literal["auto", "flash", "efficient", "cudnn", "math"]] = Field(
        "auto", description="attention kernel; auto: the fastest that fits"
    )
    recompute: Speed[tuple[str, ...]] = Field(
        (), description="modules, by name or pattern, whose activations are computed twice rather than kept; the bits stay"
    )
    offload: Speed[Literal["off", "optimizer"]] = Field(
        "off", description="what lies in the host's memory and not on the GPU: the optimizer's state, fetched at each step"
    )


class Split(Section):
    devices: Speed[tuple[str, ...]] = Field(
        (), description="devices that a model in one process is cut over, such as cuda:0 and cuda:1; empty: it is not cut"
    )
    at: Speed[tuple[str, ...]] = Field((), description="modules that begin the part on the next device")


class Pipeline(Section):
    stages: Speed[int] = Field(1, ge=1, description="stages that the model is cut into, a process each; 1: it is not cut")
    split_at: Speed[tuple[str, ...]] = Field((), description="modules that begin the next stage")
    schedule: Speed[Literal["1f1b", "gpipe"]] = Field(
        "1f1b", description="order of the passes; 1f1b keeps fewer activations than gpipe"
    )


class Parallel(Section):
    mode: Speed[Literal["auto", "single", "data_parallel"]] = Field(
        "auto", description="parallel mode of one process; auto: as accelerate config says"
    )
    device: Speed[Literal["auto", "cpu", "cuda"]] = Field("auto", description="device that is insisted on")
    split: Split = Split()
    pipeline: Pipeline = Pipeline()
    tensor: Speed[dict[str, Literal["columns", "rows"]]] = Field(
        {}, description="tensor: how the weight of each layer, by its name or a pattern, is cut over the processes"
    )


class Config(Section):
    run: Run = Field(default_factory=Run)  # a relative folder is read where the run starts, not at import
    data: Data
    task: Numbers[Literal["image_classification", "language_modeling"]] = Field(
        "image_classification", description="what is learned"
    )
    model: Model
    batch: Batch
    steps: Length[int | None] = Field(None, ge=1, description="steps to train, each one update of the weights")
    epochs: Length[int | None] = Field(None, ge=1, description="epochs to train, each one pass over the data")
    seeds: Place[values.Seeds] = Field((), description="seeds of runs that are trained at the same time; empty: run.seed")
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    ema: Ema = Ema()
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()
    tracking: Tracking = Tracking()
    parallel: Parallel = Parallel()
    speed: Switches = Switches()

    @field_validator("epochs")
    @classmethod
    def _one_length(cls, epochs: int | None, info: ValidationInfo) -> int | None:
        if "steps" in info.data and (epochs is None) == (info.data["steps"] is None):
            raise ValueError("give one of steps and epochs" + (", not both" if epochs else ""))
        return epochs

    def identity(self) -> str:
        """8 hex digits that two configurations share exactly when their steps are the same numbers.

        A local path of data counts by its last component alone, so that a run has the same name on every machine.
        """
        hashed = {key: value for key, value in flatten(self).items() if effect(key) == Effect.NUMBERS}
        if self.schedule.depends_on_length:
            hashed |= {"steps": self.steps, "epochs": self.epochs}
        if self.seeds:
            hashed["seeds"] = self.seeds
        for key in MOVABLE:
            hashed[key] = values.without_machine(hashed[key])
        text = json.dumps(hashed, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @property
    def folder(self) -> Path:
        return self.run.output_dir / f"{self.run.name}-{self.identity()}"

    def to_yaml(self) -> str:
        """All keys with their values, paths absolute; loading it gives an equal Config."""
        return values.dump(self.model_dump(mode="json", exclude={"run": {"seed"}} if self.seeds else None))


def effect(key: str) -> Effect | None:
    """What a change of the dotted key changes; None for a key that there is not."""
    if field := messages.keys(Config).get(key):
        return next(mark for mark in field.metadata if isinstance(mark, Effect))
    inner = messages.section(Config.model_fields.get(key.partition(".")[0]))
    return Effect.NUMBERS if "." in key and inner and issubclass(inner, NamedSection) else None


def flatten(config: Config) -> dict[str, Any]:
    """Dotted key -> its value as JSON has it."""
    return _flatten(config.model_dump(mode="json"), Config, "")


def _flatten(tree: Mapping[str, Any], schema: type[BaseModel], above: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        inner = messages.section(schema.model_fields.get(name))
        flat |= _flatten(value, inner, f"{above}{name}.") if inner else {f"{above}{name}": value}
    return flat
