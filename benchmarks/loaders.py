"""What benchmarks/input.py compares: loaders of pictures, each as its own documentation has it, and decoders alone."""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from train.data.transforms import Augment, decode

BATCH, SIZE, SHARDS = 64, 224, 4
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SHUFFLED = 500  # records that the streaming loaders shuffle among themselves


class Files(NamedTuple):
    """The same pictures in the three forms that the loaders read; labels are numbers."""

    folder: Path
    parquet: Path
    tar: Path


Batches = Iterator[int]  # the number of pictures of each batch, once it is there


def pictures_of(folder: Path) -> list[Path]:
    if pictures := sorted(path for path in folder.glob("*/*") if path.suffix.lower() in (".jpg", ".jpeg")):
        return pictures
    raise SystemExit(f"{folder} has no class folders with JPEG pictures")


def write_shards(folder: Path, scratch: Path) -> Files:
    """Parquet as `datasets` writes it, which is what the Hub has, and tar archives as WebDataset reads them."""
    import datasets

    datasets.disable_progress_bars()
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
    pictures = pictures_of(folder)
    random.Random(0).shuffle(pictures)
    files = Files(folder, scratch / "parquet", scratch / "tar")
    files.parquet.mkdir()
    files.tar.mkdir()
    for shard in range(SHARDS):
        rows = [(path.read_bytes(), classes.index(path.parent.name)) for path in pictures[shard::SHARDS]]
        name = f"train-{shard:05}-of-{SHARDS:05}"
        images, labels = [{"bytes": data, "path": None} for data, _ in rows], [label for _, label in rows]
        columns = {"image": datasets.Image(), "label": datasets.ClassLabel(names=classes)}
        table = datasets.Dataset.from_dict({"image": images, "label": labels}, datasets.Features(columns))
        table.to_parquet(files.parquet / f"{name}.parquet")
        with tarfile.open(files.tar / f"{name}.tar", "w") as archive:
            for number, (data, label) in enumerate(rows):
                for suffix, content in (("jpg", data), ("cls", str(label).encode())):
                    entry = tarfile.TarInfo(f"{shard:05}{number:05}.{suffix}")
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))
    return files


# --- the loaders ---


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def arrived(batches: Iterable[Any]) -> Batches:
    """Batches (image, label) once they are on the device."""
    for image, label in batches:
        image, label = image.to(device(), non_blocking=True), label.to(device(), non_blocking=True)
        assert image.shape[1:] == (3, SIZE, SIZE) and image.dtype == torch.float32
        yield len(label)


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def plain_loader(dataset: Any, workers: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, num_workers=workers, persistent_workers=True, pin_memory=torch.cuda.is_available(), **options)


def lockstep(files: Files, workers: int) -> Batches:
    """The input of a training run, as `train/main.py` makes it."""
    from train.batches import training_batches
    from train.bench.loop import open_job
    from train.run import load_config

    config = load_config(
        [],
        [
            f"data.path={files.parquet}",
            f"data.workers={workers}",
            f"data.image={{mean: {list(MEAN)}, std: {list(STD)}}}",
            f"data.transforms.train=[RandomCrop: {{size: {SIZE}, pad_if_needed: true}}, RandomHorizontalFlip]",
            f"batch={{size: {BATCH}, lanes: 1}}",
            "model.name=torchvision/squeezenet1_1",
            "steps=1",
        ],
    )
    job = open_job(config)
    batches = (batch.to(device()) for batch in training_batches(job, 0))
    return arrived((job.task.inputs(batch), batch.fields["label"]) for batch in batches)


def torchvision_transforms(to_tensor: Callable[[Any], Any] | None = None) -> Callable[[Any], Tensor]:
    """The steps of torchvision's classification references, on PIL pictures or from `to_tensor` on on tensors."""
    from torchvision import transforms as v1
    from torchvision.transforms import v2

    augment: list[Any] = [v1.RandomCrop(SIZE, pad_if_needed=True), v1.RandomHorizontalFlip()]
    finish: list[Any] = [v1.PILToTensor(), v1.ConvertImageDtype(torch.float), v1.Normalize(MEAN, STD)]
    if to_tensor is not None:
        augment = [to_tensor, v2.RandomCrop(SIZE, pad_if_needed=True), v2.RandomHorizontalFlip()]
        finish = [v2.ToDtype(torch.float, scale=True), v2.Normalize(MEAN, STD)]
    transform: Callable[[Any], Tensor] = v1.Compose([*augment, *finish])
    return transform


def torchvision_pil(files: Files, workers: int) -> Batches:
    from torchvision.datasets import ImageFolder

    dataset = ImageFolder(str(files.folder), torchvision_transforms())
    return arrived(endless(plain_loader(dataset, workers, batch_size=BATCH, shuffle=True, drop_last=True)))


def torchvision_tensor(files: Files, workers: int) -> Batches:
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    dataset = ImageFolder(str(files.folder), torchvision_transforms(v2.PILToTensor()))
    return arrived(endless(plain_loader(dataset, workers, batch_size=BATCH, shuffle=True, drop_last=True)))


def timm_loader(files: Files, workers: int) -> Batches:
    """timm's dataset, loader and prefetcher, which normalises on the device; its crops are resized ones, so they are replaced."""
    from timm.data import ImageDataset, create_loader
    from timm.data.transforms import ToNumpy
    from torchvision import transforms as v1

    dataset = ImageDataset(str(files.folder))
    loader = create_loader(
        dataset, (3, SIZE, SIZE), BATCH, is_training=True, mean=MEAN, std=STD, num_workers=workers, device=device(),
        pin_memory=torch.cuda.is_available(),
    )  # fmt: skip
    dataset.transform = v1.Compose([v1.RandomCrop(SIZE, pad_if_needed=True), v1.RandomHorizontalFlip(), ToNumpy()])
    return arrived(endless(loader))


def webdataset_loader(files: Files, workers: int) -> Batches:
    """As its documentation trains on ImageNet."""
    import webdataset

    shards = [str(path) for path in sorted(files.tar.iterdir())]
    dataset = (
        webdataset.WebDataset(shards, resampled=True, shardshuffle=False, nodesplitter=webdataset.split_by_node)
        .shuffle(SHUFFLED)
        .decode("pilrgb")
        .to_tuple("jpg", "cls")
        .map_tuple(torchvision_transforms(), int)
        .batched(BATCH, partial=False)
    )
    return arrived(webdataset.WebLoader(dataset, batch_size=None, num_workers=workers, pin_memory=torch.cuda.is_available()))


def datasets_loader(files: Files, workers: int) -> Batches:
    """As its documentation streams into PyTorch."""
    import datasets

    transform = torchvision_transforms()

    def transformed(row: dict[str, Any]) -> dict[str, Any]:
        return {"image": transform(row["image"].convert("RGB")), "label": row["label"]}

    shards = [str(path) for path in sorted(files.parquet.iterdir())]
    rows = datasets.load_dataset("parquet", data_files=shards, split="train", streaming=True, cache_dir=files.parquet.parent)
    rows = rows.cast_column("image", datasets.Image()).shuffle(seed=0, buffer_size=SHUFFLED).map(transformed).repeat(None)
    loader = plain_loader(rows.with_format("torch"), workers, batch_size=BATCH, drop_last=True)
    return arrived((batch["image"], batch["label"]) for batch in loader)


# --- the limit: decoders alone ---


class Decoded(IterableDataset[int]):
    """Decodes the pictures without end, and gives nothing but how many."""

    COUNTED = 16

    def __init__(self, decoder: Callable[[bytes], Any], files: Files) -> None:
        tables = [pq.read_table(path) for path in sorted(files.parquet.iterdir())]
        self.pictures = [row["bytes"] for table in tables for row in table["image"].to_pylist()]
        self.decoder = decoder

    def __iter__(self) -> Iterator[int]:
        order = random.Random(torch.initial_seed())
        while True:
            for picture in order.choices(self.pictures, k=self.COUNTED):
                self.decoder(picture)
            yield self.COUNTED


def only_decoding(decoder: Callable[[bytes], Any], files: Files, workers: int) -> Batches:
    return iter(DataLoader(Decoded(decoder, files), batch_size=None, num_workers=workers))


def with_a_crop(data: bytes) -> Any:
    """What training does instead: a crop first, of which alone the pixels are decoded."""
    return _crop(data, 0, random.getrandbits(32))


_crop = Augment([{"RandomCrop": {"size": SIZE, "pad_if_needed": True}}], 0, "RGB")


def with_pillow(data: bytes) -> Any:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def with_pillow_reduced(data: bytes) -> Any:
    """By half where that leaves enough for the crop; other pixels, for comparison only."""
    picture = Image.open(io.BytesIO(data))
    picture.draft("RGB", (SIZE, SIZE))
    return np.asarray(picture.convert("RGB"))


def with_torchvision(data: bytes) -> Any:
    from torchvision.io import ImageReadMode, decode_jpeg

    return decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)


def with_simplejpeg(data: bytes) -> Any:
    import simplejpeg

    return simplejpeg.decode_jpeg(data, "RGB")


def with_opencv(data: bytes) -> Any:
    import cv2

    cv2.setNumThreads(1)
    return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)


class Contestant(NamedTuple):
    make: Callable[[Files, int], Batches]
    module: str  # what it needs
    package: str  # in which that is


def limit(decoder: Callable[[bytes], Any], module: str, package: str) -> Contestant:
    return Contestant(partial(only_decoding, decoder), module, package)


LIMIT = {"only decoding": limit(partial(decode, mode="RGB"), "torchcodec", "torchcodec")}  # as Lockstep does it
LOADERS = {
    "Lockstep": Contestant(lockstep, "torch", "torch"),
    "torchvision, PIL": Contestant(torchvision_pil, "torchvision", "torchvision"),
    "torchvision, tensors (v2)": Contestant(torchvision_tensor, "torchvision", "torchvision"),
    "timm": Contestant(timm_loader, "timm", "timm"),
    "WebDataset": Contestant(webdataset_loader, "webdataset", "webdataset"),
    "datasets, streamed": Contestant(datasets_loader, "datasets", "datasets"),
    **LIMIT,
}
DECODERS = {
    **LIMIT,
    "only decoding, a random crop": limit(with_a_crop, "nvidia.nvimgcodec", "nvidia-nvimgcodec-cu13"),
    "torchvision": limit(with_torchvision, "torchvision", "torchvision"),
    "Pillow": limit(with_pillow, "PIL", "pillow"),
    "Pillow, reduced": limit(with_pillow_reduced, "PIL", "pillow"),
    "simplejpeg": limit(with_simplejpeg, "simplejpeg", "simplejpeg"),
    "OpenCV": limit(with_opencv, "cv2", "opencv-python-headless"),
}
