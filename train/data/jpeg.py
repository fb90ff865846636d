"""Parts of a JPEG picture without the rest of it: the very pixels that decoding all of it and cutting them out gives.

Around a part only the entropy code is read, and what lies below is not looked at. As in the whole picture, the colours at its
edges are interpolated from beyond them. This is libjpeg-turbo's partial decoding, as nvImageCodec calls it.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import get_ident
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

Mode = Literal["RGB", "GRAY"]


class Jpeg(NamedTuple):
    """An undecoded picture of `height` x `width` pixels."""

    stream: Any
    height: int
    width: int

    def part(self, top: int, left: int, height: int, width: int, mode: Mode) -> Tensor | None:
        """Some of its pixels as uint8 (C, height, width), or None where they cannot be decoded."""
        try:
            codec, decoder, wanted = _tools(os.getpid(), get_ident())
            region = codec.Region(top, left, top + height, left + width)
            pixels = decoder.decode(self.stream.get_sub_code_stream(region=region), params=wanted[mode])
        except RuntimeError:  # whoever decodes all of it says how
            return None
        return None if pixels is None else torch.from_numpy(np.asarray(pixels)).permute(2, 0, 1)


def opened(data: bytes) -> Jpeg | None:
    """None for what has to be decoded whole: another format, a file that is cut off, a picture of four inks or turned by Exif."""
    if not (data.startswith(b"\xff\xd8\xff") and data.endswith(b"\xff\xd9")) or _turned(data):
        return None
    try:
        stream = _codec().CodeStream(data)
        return Jpeg(stream, stream.height, stream.width) if stream.num_channels in (1, 3) else None
    except (ImportError, RuntimeError):  # not on Linux; or damaged, and whoever decodes all of it says how
        return None


def _turned(data: bytes) -> bool:
    """Whether it may be shown in another orientation than it is stored in."""
    if not _has_exif(data):
        return False
    from PIL import ExifTags, Image

    try:
        with Image.open(io.BytesIO(data)) as picture:
            return bool(picture.getexif().get(ExifTags.Base.Orientation, 1) != 1)
    except Exception:  # Pillow raises many things at Exif data that are none
        return True


def _has_exif(data: bytes) -> bool:
    """Whether one of the segments before the first scan is of that kind; to search for the word would take longer."""
    at = 2
    while data[at : at + 2] != b"\xff\xda":
        lost = data[at : at + 1] != b"\xff"
        if lost or (data[at + 1] == 0xE1 and data[at + 4 : at + 10] == b"Exif\0\0"):
            return True
        at += 2 + int.from_bytes(data[at + 2 : at + 4])
    return False


@cache
def _tools(process: int, thread: int) -> tuple[Any, Any, dict[Mode, Any]]:
    """nvImageCodec, its decoder and what to decode to. A forked process needs a decoder of its own, and so does a thread."""
    codec = _codec()
    decoder = codec.Decoder(
        device_id=codec.NVIMGCODEC_DEVICE_CPU_ONLY,
        backends=[codec.Backend(codec.CPU_ONLY)],
        max_num_cpu_threads=1,
        options=":fancy_upsampling=1 :fast_idct=0",  # as all other decoders here
    )
    spaces: dict[Mode, Any] = {"RGB": codec.ColorSpec.SRGB, "GRAY": codec.ColorSpec.GRAY}
    return codec, decoder, {mode: codec.DecodeParams(False, space) for mode, space in spaces.items()}


@cache
def _codec() -> Any:
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")
    with _silence():
        from nvidia import nvimgcodec
    return nvimgcodec


@contextmanager
def _silence() -> Iterator[None]:
    """For nvImageCodec's complaints, past Python's stderr, about the GPU's decoders, which are not asked for."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
