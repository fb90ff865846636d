import io
import random

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from train.data import transforms
from train.data.jpeg import opened
from train.data.transforms import Augment, decode
from train.seeds import seed_sample

HEIGHT, WIDTH = 203, 301  # in no way multiples of a block


def picture() -> Image.Image:
    """Colours that change within a block, so that whatever is interpolated wrongly shows."""
    noise = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)


def encoded(mode: str = "RGB", **options: object) -> bytes:
    data = io.BytesIO()
    picture().convert(mode).save(data, "jpeg", **options)
    return data.getvalue()


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(exif=exif)


def equal_parts(data: bytes, wanted: str, count: int, seed: int) -> bool:
    jpeg, whole, draw = opened(data), decode(data, wanted), random.Random(seed)
    assert jpeg is not None and (jpeg.height, jpeg.width) == whole.shape[1:]
    for _ in range(count):
        height, width = draw.randint(1, jpeg.height), draw.randint(1, jpeg.width)
        top, left = draw.randint(0, jpeg.height - height), draw.randint(0, jpeg.width - width)
        part = jpeg.part(top, left, height, width, wanted)
        if not torch.equal(part, whole[:, top : top + height, left : left + width]):
            return False
    return True


@pytest.mark.parametrize("wanted", ["RGB", "GRAY"])
@pytest.mark.parametrize(
    "options",
    [
        *({"subsampling": ratio, "progressive": scans} for ratio in ("4:4:4", "4:2:2", "4:2:0", "4:1:1") for scans in (0, 1)),
        {"restart_marker_rows": 1},
        {"keep_rgb": True},
        {"mode": "L"},
        {"quality": 20},
    ],
    ids=str,
)
def test_a_part_has_the_pixels_of_the_whole_picture(options, wanted):
    assert equal_parts(encoded(**options), wanted, count=40, seed=1)


def test_so_it_has_in_real_pictures(shared_data):
    pictures = [file.read_bytes() for file in sorted((shared_data / "imagenet-sample" / "train").glob("*/*"))]
    upright = [data for data in pictures if opened(data)]
    assert len(upright) > 0.99 * len(pictures) > 400
    assert all(equal_parts(data, "RGB", 1, number) for number, data in enumerate(upright))


@pytest.mark.parametrize(
    "data", [turned(6), encoded()[:-300], encoded()[:-2], encoded("CMYK"), b"", b"\xff\xd8\xff\xd9", b"<html>"], ids=range(7)
)
def test_what_has_to_be_decoded_whole_is_not_opened(data):
    assert opened(data) is None


def test_upright_by_exif_is_upright():
    assert equal_parts(turned(1), "RGB", count=5, seed=2)


CROPS = [
    ("RandomCrop", {"size": 100}),
    ("RandomCrop", {"size": HEIGHT}),
    ("RandomCrop", {"size": 100, "padding": 4}),
    ("RandomCrop", {"size": 250, "pad_if_needed": True}),
    ("RandomResizedCrop", {"size": 64}),
    ("RandomResizedCrop", {"size": 64, "antialias": False}),
]


@pytest.mark.parametrize("data", [encoded(), turned(6), encoded("L")], ids=["upright", "turned", "grey"])
@pytest.mark.parametrize(("name", "options"), CROPS, ids=str)
def test_a_crop_is_that_of_the_whole_picture_and_so_is_what_is_drawn_after_it(name, options, data):
    named = [{name: options}, "RandomHorizontalFlip", {"RandomErasing": {"p": 0.5}}]
    whole = v2.Compose([getattr(v2, name)(**options), v2.RandomHorizontalFlip(), v2.RandomErasing(p=0.5)])
    for sample in range(8):
        seed_sample(3, 1, sample)
        expected = whole(decode(data, "RGB"))
        assert torch.equal(Augment(named, 3, "RGB")(data, 1, sample), expected)


def test_what_a_crop_leaves_out_is_not_decoded(monkeypatch):
    monkeypatch.delattr(transforms, "decode")
    assert Augment([{"RandomCrop": {"size": 100}}], 0, "RGB")(encoded(), 0, 0).shape == (3, 100, 100)
    with pytest.raises(NameError):
        Augment([{"RandomCrop": {"size": 100}}], 0, "RGB")(turned(6), 0, 0)
