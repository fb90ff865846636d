"""From an undecoded picture to a tensor: decoding, and the named transforms with their randomness fixed per sample.

A transform is a name of torchvision.transforms.v2, or `package.module:NAME`: anything importable that makes a callable.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from train.arguments import check_arguments, check_name, imported
from train.config import Problem
from train.data.jpeg import Mode, opened
from train.seeds import seed_sample

NamedTransform = str | Mapping[str, Mapping[str, Any]]


def decode(data: bytes, mode: Mode) -> Tensor:
    """A picture's bytes as uint8 (C, H, W), upright; C is 3 for mode RGB and 1 for GRAY. ValueError says what is wrong."""
    from torchcodec.decoders import decode_image

    if not data:
        raise ValueError("the file is empty (0 bytes)")
    try:
        return decode_image(data, mode=mode)
    except ValueError:  # a format that torchcodec does not know, such as BMP or TIFF
        return _decode_with_pillow(data, mode)
    except RuntimeError as error:
        raise ValueError(f"cannot be decoded: {str(error).split(', ')[-1].strip()}") from error


def _decode_with_pillow(data: bytes, mode: Mode) -> Tensor:
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
    problems = []
    for split, entries in section.items():
        for place, entry in enumerate(entries):
            name, arguments = _split(entry)
            try:
                make = _find(name)
            except LookupError as error:
                problems.append(Problem(f"{split}.{place}.{name}", str(error)))
                continue
            found = check_arguments(f"data.transforms.{split}.{place}.{name}", make, arguments)
            problems += [Problem(f"{split}.{place}.{name}.{problem.key}", problem.message) for problem in found]
            if not found:
                try:
                    make(**arguments)
                except (TypeError, ValueError) as error:
                    problems.append(Problem(f"{split}.{place}.{name}", str(error)))
    return problems


def _find(name: str) -> Callable[..., Callable[[Tensor], Tensor]]:
    """What makes the transform; LookupError says why there is none."""
    if ":" in name:
        return imported(name)
    known = names()
    if problems := check_name(name, known, "transform in torchvision.transforms.v2"):
        raise LookupError(problems[0].message)
    return known[name]


def _split(entry: NamedTransform) -> tuple[str, dict[str, Any]]:
    if isinstance(entry, str):
        return entry, {}
    [(name, arguments)] = entry.items()
    return name, dict(arguments or {})


class Augment:
    """Decodes a picture and transforms it; what is random in that is a function of (seed, epoch, sample key) alone.

    So is what a transform draws from `random`, `numpy.random` and `torch`. A generator of its own follows too where it is made
    for each sample from `torch.initial_seed()`; `numpy.random.default_rng()` without a seed asks the operating system.
    """

    def __init__(self, named: Sequence[NamedTransform], seed: int, mode: Mode) -> None:
        self.transforms = [_find(name)(**arguments) for name, arguments in map(_split, named)]
        self.crops = bool(self.transforms) and _is_crop(self.transforms[0])
        self.seed = seed
        self.mode = mode

    def __call__(self, data: bytes, epoch: int, sample: int) -> Tensor:
        if not self.transforms:
            return decode(data, self.mode)
        seed_sample(self.seed, epoch, sample)
        first, *others = self.transforms
        picture = _cropped(first, data, self.mode) if self.crops else first(decode(data, self.mode))
        for transform in others:
            picture = transform(picture)
        return picture


def _is_crop(transform: Any) -> bool:
    """Whether it keeps a part of a picture that it chooses by the picture's size alone."""
    from torchvision.transforms import v2

    return type(transform) in (v2.RandomCrop, v2.RandomResizedCrop)


def _cropped(crop: Any, data: bytes, mode: Mode) -> Tensor:
    """What `crop` makes of a picture, of which no more is decoded than that takes."""
    picture: Tensor
    jpeg = opened(data)
    if jpeg is None:
        picture = crop(decode(data, mode))
        return picture
    chosen = crop.make_params([torch.empty((1, jpeg.height, jpeg.width), device="meta")])
    needs_whole = chosen.get("needs_pad")
    part = None if needs_whole else jpeg.part(chosen["top"], chosen["left"], chosen["height"], chosen["width"], mode)
    if part is None:
        picture = crop.transform(decode(data, mode), chosen)
    else:
        picture = crop.transform(part, {**chosen, "top": 0, "left": 0})
    return picture
