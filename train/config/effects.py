"""What a change of a key changes: the mark that each key of the schema has."""

from enum import StrEnum
from typing import Annotated, TypeVar

T = TypeVar("T")


class Effect(StrEnum):
    """What a change of a key changes."""

    NUMBERS = "numbers"  # the samples, the random numbers or the arithmetic of a step
    LENGTH = "length"  # how many steps there are
    SPEED = "speed"  # how long a step takes
    REPORT = "report"  # what is measured and shown beside the training
    PLACE = "place"  # names, folders and what is kept


Numbers = Annotated[T, Effect.NUMBERS]
Length = Annotated[T, Effect.LENGTH]
Speed = Annotated[T, Effect.SPEED]
Report = Annotated[T, Effect.REPORT]
Place = Annotated[T, Effect.PLACE]
