"""From an undecoded picture to a tensor: decoding, and the named transforms with their randomness fixed per sample."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from train.arguments import check_arguments, check_name
from train.data.order import key
from train.config import Problem
from train.seeds import seed_generators

if TYPE_CHECKING:
    from torchvision.transforms import v2

NamedTransform = str | Mapping[str, Mapping[str, Any]]


def decode(data: bytes, mode: str) -> Tensor:
    """A picture's bytes as uint8 (C, H, W), upright; C is 3 for mode RGB and 1 for GRAY. ValueError says what is wrong with it."""
    from torchcodec.decoders import decode_image

    if not data:
        raise ValueError("the file is empty (0 bytes)")
    try:
        return decode_image(data, mode=mode)
    except ValueError:  # a format that torchcodec does not know, such as BMP or TIFF
        return _decode_with_pillow(data, mode)
    except RuntimeError as error:
        raise ValueError(f"cannot be decoded: {str(error).split(', ')[-1].strip()}") from error


def _decode_with_pillow(data: bytes, mode: str) -> Tensor:
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data)) as opened:
            picture = ImageOps.exif_transpose(opened).convert("RGB" if mode == "RGB" else "L")
    except UnidentifiedImageError:
        raise ValueError("is not a picture in any known format") from None
    except (OSError, SyntaxError, ZeroDivisionError) as error:
        raise ValueError(f"cannot be decoded: {error}") from error
    pixels = torch.from_numpy(np.array(picture))
    return pixels.permute(2, 0, 1).contiguous() if mode == "RGB" else pixels[None]


def names() -> dict[str, type]:
    """The transforms of torchvision.transforms.v2 by name."""
    from torchvision.transforms import v2

    return {name: value for name, value in vars(v2).items() if isinstance(value, type) and issubclass(value, v2.Transform)}


def check(section: Mapping[str, Sequence[NamedTransform]]) -> list[Problem]:
    """What is wrong with the named transforms of `train` and `validation`."""
    known = names()
    problems = []
    for split, entries in section.items():
        for place, entry in enumerate(entries):
            name, arguments = _split(entry)
            found = check_name(name, known, "transform in torchvision.transforms.v2")
            found = found or check_arguments(f"data.transforms.{split}.{place}.{name}", known[name], arguments)
            problems += [Problem(f"{split}.{place}.{name}.{problem.key}", problem.message) for problem in found]
            if not found:
                try:
                    known[name](**arguments)
                except (TypeError, ValueError) as error:
                    problems.append(Problem(f"{split}.{place}.{name}", str(error)))
    return problems


def build(named: Sequence[NamedTransform]) -> v2.Transform | None:
    """The transforms one after the other, or None for none."""
    from torchvision.transforms import v2

    if not named:
        return None
    known = names()
    return v2.Compose([known[name](**arguments) for name, arguments in map(_split, named)])


def _split(entry: NamedTransform) -> tuple[str, dict[str, Any]]:
    if isinstance(entry, str):
        return entry, {}
    [(name, arguments)] = entry.items()
    return name, dict(arguments or {})


class Augment:
    """Applies transforms to a decoded picture; what is random in them is a function of (seed, epoch, sample key) alone."""

    def __init__(self, named: Sequence[NamedTransform], seed: int) -> None:
        self.transform = build(named)
        self.seed = seed

    def __call__(self, picture: Tensor, epoch: int, sample: int) -> Tensor:
        if self.transform is None:
            return picture
        seed_generators(key(self.seed, epoch, sample))
        transformed: Tensor = self.transform(picture)
        return transformed
