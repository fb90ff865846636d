"""The configuration of a run.

A Config comes from YAML files, each over its `base` and over the file before it, and from `key=value` settings over all
of them. The environment never changes it: a `$VAR` in a path is filled in once, and stored as what it was.
"""

from train.config.changes import Difference, differences, recorded, verdict
from train.config.effects import Effect
from train.config.loading import Check, load, unknown_argument
from train.config.messages import Problem
from train.config.schema import (
    MOVABLE,
    Batch,
    Checkpoint,
    Config,
    Data,
    Ema,
    Evaluate,
    Image,
    Model,
    Optimizer,
    Parallel,
    Pipeline,
    Run,
    Schedule,
    Split,
    Switches,
    Tracking,
    effect,
    flatten,
    lanes_problem,
)
from train.config.values import Every

__all__ = [
    "MOVABLE",
    "Batch",
    "Check",
    "Checkpoint",
    "Config",
    "Data",
    "Difference",
    "Effect",
    "Ema",
    "Evaluate",
    "Every",
    "Image",
    "Model",
    "Optimizer",
    "Parallel",
    "Pipeline",
    "Problem",
    "Run",
    "Schedule",
    "Split",
    "Switches",
    "Tracking",
    "differences",
    "effect",
    "flatten",
    "lanes_problem",
    "load",
    "recorded",
    "unknown_argument",
    "verdict",
]
