"""Image classification: one label of a fixed set for each picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from train.config import Config, Data
from train.data.labels import Labels
from train.data.loader import Batch
from train.data.pictures import open_pictures
from train.data.readers import is_remote
from train.data.source import Sources
from train.data.transforms import Augment
from train.errors import UsageError
from train.reuse import Reused

_CACHED = 2**18  # numbers that stay in a CPU's cache from one operation to the next
_AUXILIARY_WEIGHT = 0.3  # of GoogLeNet's and Inception's side heads, as in Szegedy et al. 2015


class PictureDecoder:
    """A row with `image` and `label` to a sample with `image` (C, H, W; uint8 unless a transform changed it) and `label`."""

    def __init__(self, data: Data, labels: Labels, seed: int, *, training: bool) -> None:
        self.labels = labels
        self.augment = Augment(data.transforms.train if training else data.transforms.validation, seed, data.image.mode)

    def __call__(self, row: dict[str, Any], epoch: int, key: int) -> dict[str, Tensor]:
        label = self.labels.id(row["label"])
        picture = row["image"] or {}
        data = picture.get("bytes")
        if data is None:
            if picture.get("path") is None:
                raise ValueError("has no picture")
            if is_remote(picture["path"]):
                raise ValueError(f"{picture['path']} cannot be fetched")
            data = Path(picture["path"]).read_bytes()
        return {"image": self.augment(data, epoch, key), "label": torch.tensor(label)}


class ImageClassification:
    """Cross-entropy over the classes; a batch counts by its samples."""

    keys: ClassVar[frozenset[str]] = frozenset({"image_column", "label_column", "classes", "image", "transforms"})

    def __init__(self, config: Config, sources: Sources, labels: Labels, device: torch.device) -> None:
        data, classes = config.data, len(labels.names)
        self.data, self.sources, self.labels = data, sources, labels
        self.given: Mapping[str, int] = {
            "classes": classes,
            "num_classes": classes,
            "channels": 3 if data.image.mode == "RGB" else 1,
        }
        self.identity: Mapping[str, Any] = {"classes": list(labels.names)}
        self.memory_format = torch.channels_last if config.speed.channels_last else torch.contiguous_format
        self.reused = Reused()
        self.mean = torch.tensor(data.image.mean, device=device).view(1, -1, 1, 1)
        self.std = torch.tensor(data.image.std, device=device).view(1, -1, 1, 1)

    @classmethod
    def open(cls, config: Config, device: torch.device, say: Callable[[str], None]) -> ImageClassification:
        return cls(config, *open_pictures(config.data, say), device)

    @staticmethod
    def metrics(data: Data) -> Mapping[str, bool]:
        return {"accuracy": True, "loss": False}

    def decoder(self, seed: int, *, training: bool) -> PictureDecoder:
        return PictureDecoder(self.data, self.labels, seed, training=training)

    def weight(self, batch: Batch) -> int:
        return len(batch.keys)

    def fits(self, model: nn.Module, batch: Batch, name: str) -> None:
        """Raise UsageError when the model cannot take such samples, or gives other than a score for each class."""
        image = batch.fields["image"]
        model.eval()
        try:
            with torch.no_grad():
                inputs = self.inputs(Batch({"image": image.to(self.mean.device)}, batch.keys))
                scores = model(inputs.cpu())  # where the model is still
        except RuntimeError as error:
            raise UsageError(
                f"model.name: {name} cannot take samples of size {tuple(image.shape[1:])} (channels, height, width): {error}. "
                "Change data.image.mode, or add Resize to data.transforms.train and data.transforms.validation."
            ) from error
        if scores.shape != (1, len(self.labels.names)):
            raise UsageError(
                f"model.name: {name} gives {tuple(scores.shape[1:])} scores a sample; the data have {len(self.labels.names)} "
                "classes"
            )

    def inputs(self, batch: Batch) -> Tensor:
        """What the model is called with: normalised float32 (N, C, H, W), contiguous or channels last."""
        image = batch.fields["image"]
        if image.dtype == torch.uint8:  # in place: to get new memory from the system costs a CPU more than the arithmetic
            values = self.reused.empty(image.shape, image.device, self.memory_format)
            some = max(1, _CACHED // image[0].numel()) if image.device.type == "cpu" else len(image)
            for value, picture in zip(values.split(some), image.split(some), strict=True):
                value.copy_(picture).div_(255).sub_(self.mean).div_(self.std)
            return values
        return (image.contiguous(memory_format=self.memory_format) - self.mean).div_(self.std)

    def loss(self, output: Any, batch: Batch) -> Tensor:
        logits, *side = output if isinstance(output, tuple) else (output,)
        label = batch.fields["label"].to(logits.device)  # the last one where a model is cut over several
        loss = functional.cross_entropy(logits, label, reduction="sum")
        for auxiliary in side:
            if auxiliary is not None:
                loss = loss + _AUXILIARY_WEIGHT * functional.cross_entropy(auxiliary, label, reduction="sum")
        return loss

    def sums(self, logits: Tensor, batch: Batch) -> Mapping[str, float]:
        label = batch.fields["label"].to(logits.device)
        losses = functional.cross_entropy(logits.float(), label, reduction="none")
        return {"accuracy": float((logits.argmax(1) == label).sum()), "loss": float(losses.double().sum())}

    def measured(self, means: Mapping[str, float]) -> dict[str, float]:
        return dict(means)
