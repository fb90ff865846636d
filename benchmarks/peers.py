"""The run that benchmarks/run.py compares, as people write it who have other tools: each contestant as its documentation has it.

    python benchmarks/peers.py CONTESTANT FOLDER --epochs 1 --workers 2 --output SCRATCH

All train the same model on the same pictures with the same optimizer, constant learning rate and batch, tell the loss every ten
steps, save the weights after the last epoch and measure the accuracy on the test pictures once. That, and the number of CPU
threads that the contestant computes with, is the JSON of the last line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import click
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from train.models.mnist_cnn import model as mnist_cnn

BATCH, LEARNING_RATE, MOMENTUM, MEAN, STD, LOG_EVERY = 64, 0.01, 0.9, 0.1307, 0.3081, 10  # of configs/mnist.yaml


class Run(NamedTuple):
    folder: str  # the data set
    epochs: int
    workers: int
    output: Path


class Digits(Dataset[tuple[Tensor, int]]):
    """A split as `datasets` gives it, for torchvision's transforms."""

    def __init__(self, folder: str, split: str) -> None:
        from datasets import load_dataset
        from torchvision import transforms

        self.rows = load_dataset(folder, split=split)
        self.transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        row = self.rows[place]
        return self.transform(row["image"]), row["label"]


def loaders(run: Run) -> tuple[DataLoader[Any], DataLoader[Any]]:
    pinned = torch.cuda.is_available()
    options: dict[str, Any] = {"batch_size": BATCH, "num_workers": run.workers, "pin_memory": pinned}
    return DataLoader(Digits(run.folder, "train"), shuffle=True, **options), DataLoader(Digits(run.folder, "test"), **options)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def tell(step: int, loss: Tensor) -> None:
    if step % LOG_EVERY == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def accuracy(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    model.eval()
    right = total = 0
    for image, label in batches:
        right += int((model(image.to(device())).argmax(1) == label.to(device())).sum())
        total += len(label)
    return right / total


def bare(run: Run) -> float:
    train, test = loaders(run)
    model = mnist_cnn(10, 1).to(device())
    optimizer = optimizer_of(model)
    step = 0
    for _ in range(run.epochs):
        model.train()
        for image, label in train:
            image, label = image.to(device()), label.to(device())
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(image), label)
            loss.backward()
            optimizer.step()
            step += 1
            tell(step, loss)
    torch.save(model.state_dict(), run.output / "model.pt")
    return accuracy(model, test)


def accelerated(run: Run) -> float:
    from accelerate import Accelerator

    accelerator = Accelerator()
    train, test = loaders(run)
    model = mnist_cnn(10, 1)
    model, optimizer, train, test = accelerator.prepare(model, optimizer_of(model), train, test)
    step = 0
    for _ in range(run.epochs):
        model.train()
        for image, label in train:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(image), label)
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            tell(step, loss)
    accelerator.save_model(model, run.output)
    model.eval()
    right = total = 0
    for image, label in test:
        with torch.no_grad():
            guess = model(image).argmax(1)
        guess, label = accelerator.gather_for_metrics((guess, label))
        right, total = right + int((guess == label).sum()), total + len(label)
    return right / total


def lightning(run: Run) -> float:
    import lightning as L  # noqa: N812  # its documentation's name

    class Classifier(L.LightningModule):  # type: ignore[misc]  # it has no types here
        def __init__(self) -> None:
            super().__init__()
            self.model = mnist_cnn(10, 1)

        def training_step(self, batch: list[Tensor], number: int) -> Tensor:
            image, label = batch
            loss = functional.cross_entropy(self.model(image), label)
            self.log("loss", loss)
            return loss

        def test_step(self, batch: list[Tensor], number: int) -> None:
            image, label = batch
            self.log("accuracy", (self.model(image).argmax(1) == label).float().mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self)

    train, test = loaders(run)
    model = Classifier()
    trainer = L.Trainer(max_epochs=run.epochs, log_every_n_steps=LOG_EVERY, default_root_dir=run.output)
    trainer.fit(model, train)
    [measured] = trainer.test(model, test)
    return float(measured["accuracy"])


def transformers(run: Run) -> float:
    from transformers import Trainer, TrainingArguments

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = mnist_cnn(10, 1)

        def forward(self, image: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.model(image)
            return {"loss": functional.cross_entropy(logits, labels), "logits": logits}

    def collated(samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
        images, labels = zip(*samples, strict=True)
        return {"image": torch.stack(images), "labels": torch.tensor(labels)}

    arguments = TrainingArguments(
        output_dir=str(run.output),
        num_train_epochs=run.epochs,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        logging_steps=LOG_EVERY,
        save_strategy="epoch",
        dataloader_num_workers=run.workers,
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to="none",
    )
    model = Classifier()
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Digits(run.folder, "train"),
        eval_dataset=Digits(run.folder, "test"),
        data_collator=collated,
        optimizers=(optimizer_of(model), None),
        compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())},
    )
    trainer.train()
    return float(trainer.evaluate()["eval_accuracy"])


def timm(run: Run) -> float:
    """The parts of its train.py: dataset, loader, optimizer, meters and the saver of checkpoints."""
    from timm.data import create_dataset, create_loader
    from timm.optim import create_optimizer_v2
    from timm.utils import AverageMeter, CheckpointSaver
    from timm.utils import accuracy as top

    def loader(split: str) -> Any:
        dataset = create_dataset(f"hfds/{run.folder}", root=None, split=split, is_training=split == "train", input_img_mode="L")
        return create_loader(
            dataset, (1, 28, 28), BATCH, is_training=split == "train", no_aug=True, mean=(MEAN,), std=(STD,), crop_pct=1.0,
            num_workers=run.workers, pin_memory=torch.cuda.is_available(), device=device(),
        )  # fmt: skip

    train, test = loader("train"), loader("test")
    model = mnist_cnn(10, 1).to(device())
    optimizer = create_optimizer_v2(model, opt="momentum", lr=LEARNING_RATE, momentum=MOMENTUM, weight_decay=0.0)
    saver = CheckpointSaver(model, optimizer, checkpoint_dir=str(run.output))
    for epoch in range(run.epochs):
        model.train()
        losses = AverageMeter()
        for step, (image, label) in enumerate(train, 1):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(image), label)
            loss.backward()
            optimizer.step()
            if step % LOG_EVERY == 0:
                losses.update(loss.item(), len(label))
                print(f"step {step} loss {losses.val:.4f} ({losses.avg:.4f})", flush=True)
        saver.save_checkpoint(epoch, metric=losses.avg)
    model.eval()
    right = AverageMeter()
    with torch.no_grad():
        for image, label in test:
            right.update(top(model(image), label)[0].item(), len(label))
    return float(right.avg) / 100


CONTESTANTS: dict[str, Callable[[Run], float]] = {
    "bare": bare,
    "accelerate": accelerated,
    "lightning": lightning,
    "transformers": transformers,
    "timm": timm,
}


@click.command(help=__doc__)
@click.argument("contestant", type=click.Choice(list(CONTESTANTS)))
@click.argument("folder")
@click.option("--epochs", default=1)
@click.option("--workers", default=2)
@click.option("--output", type=click.Path(path_type=Path), required=True)
def main(contestant: str, folder: str, epochs: int, workers: int, output: Path) -> None:
    measured = CONTESTANTS[contestant](Run(folder, epochs, workers, output))
    print(json.dumps({"accuracy": measured, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
