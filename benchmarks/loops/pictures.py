"""Classifiers of images: the trainer, timm's train.py, and a plain loop over torchvision's ImageFolder.

All train the same model with the same optimiser, clipping and label smoothing. From files each takes a random part of a
picture at the same scales, aspects and ways of resizing, and mirrors half of them; in memory each shifts and mirrors.
"""

import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import create_dataset, create_loader
from timm.data.transforms import ToNumpy
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.task import ClassificationTask
from timm.utils import AverageMeter, dispatch_clip_grad
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.datasets import ImageFolder

from loops.measure import Clock
from tokenmix.lab.data.images import load_images
from tokenmix.lab.tasks.classification.task import ImageClassification
from tokenmix.lab.train import train
from tokenmix.lab.train.config import OptimConfig, TrainConfig
from tokenmix.lab.train.record import ProgressBar
from tokenmix.lab.train.sources import make_config
from tokenmix.models import create_model

OPTIM = OptimConfig()
SMOOTHING = 0.1
MEAN, STD = (0.45, 0.45, 0.45), (0.25, 0.25, 0.25)
FASHION = "fashion-mnist"


@dataclass(frozen=True)
class Pictures:
    """What is trained on.

    Attributes:
        model: a name of our registry.
        data: a folder in ImageNet's layout, or None for Fashion-MNIST in memory.
        size, patch_size: side of the images, and of the model's patches, in pixels.
        batch_size, workers: of the loader.
    """

    model: str
    data: Path | None
    size: int
    patch_size: int
    batch_size: int
    workers: int

    @property
    def channels(self) -> int:
        """3, or 1 of Fashion-MNIST."""
        return 1 if self.data is None else 3

    def net(self) -> nn.Module:
        """The model, newly drawn."""
        classes = 10 if self.data is None else len(list((self.data / "train").iterdir()))
        sizes = {"in_chans": self.channels, "img_size": self.size, "patch_size": self.patch_size}
        return create_model(self.model, num_classes=classes, **sizes)

    def config(self) -> TrainConfig:
        """The same as options of `tokenmix train`."""
        return make_config(
            model=self.model,
            model_kwargs={"patch_size": self.patch_size},
            data=FASHION if self.data is None else f"imagefolder:{self.data}",
            img_size=self.size,
            smoothing=SMOOTHING,
            **common(self.batch_size, self.workers),
        )


def common(batch_size: int, workers: int) -> dict[str, Any]:
    """Options of `tokenmix train`: nothing is evaluated while the clock runs; threads are set already."""
    return {
        "batch_size": batch_size,
        "workers": workers,
        "validation": 0,
        "epochs": 100,
        "checkpoint_every": 10**9,
        "device": "cpu",
        "threads": torch.get_num_threads(),
    }


def ours(config: Callable[[], TrainConfig], units: int) -> Callable[[Clock], None]:
    """The trainer, as the command calls it."""

    def loop(clock: Clock) -> None:
        advance = patch.object(ProgressBar, "advance", lambda bar: clock.tick(units))
        with tempfile.TemporaryDirectory() as folder, advance:
            train(config().replace(out=Path(folder) / "run"), quiet=True)

    return loop


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """The trainer's default."""
    return create_optimizer_v2(model, opt=OPTIM.opt, lr=OPTIM.lr, weight_decay=OPTIM.weight_decay)


def timm_loop(pictures: Pictures) -> Callable[[Clock], None]:
    """What timm's train.py does in a step: its loader with the prefetcher, task, clipping and meters."""

    def loop(clock: Clock) -> None:
        task = ClassificationTask(pictures.net(), LabelSmoothingCrossEntropy(SMOOTHING), verbose=False)
        module: Any = task.get_trainable_module()
        optimizer = optimizer_of(module)
        times, losses = AverageMeter(), AverageMeter()
        loader = timm_loader(pictures)
        while True:
            module.train()
            optimizer.zero_grad()
            for images, labels in loader:
                loss = task(images, labels)["loss"]
                loss.backward()
                dispatch_clip_grad(task.get_clip_parameters(), value=OPTIM.clip_grad or 0.0, mode="norm")
                optimizer.step()
                losses.update(loss.item(), len(images))
                optimizer.zero_grad()
                times.update(0.0)
                clock.tick(len(images))

    return loop


def timm_loader(pictures: Pictures) -> Any:
    """timm's `create_loader` with the augmentation of `light`."""
    dataset: Any = _InMemory() if pictures.data is None else create_dataset("", root=str(pictures.data), split="train")
    loader = create_loader(
        dataset,
        input_size=(pictures.channels, pictures.size, pictures.size),
        batch_size=pictures.batch_size,
        is_training=True,
        interpolation="random",
        color_jitter=None,  # pyrefly: ignore[bad-argument-type]
        mean=MEAN[: pictures.channels],
        std=STD[: pictures.channels],
        num_workers=pictures.workers,
        persistent_workers=pictures.workers > 0,
        device=torch.device("cpu"),
    )
    if pictures.data is None:
        dataset.transform = transforms.Compose([*_SHIFT, ToNumpy()])
    return loader


def plain_loop(pictures: Pictures) -> Callable[[Clock], None]:
    """The loop of PyTorch's tutorials."""

    def loop(clock: Clock) -> None:
        model, loader = pictures.net(), plain_loader(pictures)
        optimizer = optimizer_of(model)
        model.train()
        while True:
            for images, labels in loader:
                loss = F.cross_entropy(model(images), labels, label_smoothing=SMOOTHING)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), OPTIM.clip_grad or 0.0)
                optimizer.step()
                clock.tick(len(images))

    return loop


def plain_loader(pictures: Pictures) -> DataLoader:
    """PyTorch's DataLoader over torchvision's ImageFolder, or over arrays in memory."""
    last = [transforms.ToTensor(), transforms.Normalize(MEAN[: pictures.channels], STD[: pictures.channels])]
    if pictures.data is None:
        dataset = _InMemory()
        dataset.transform = transforms.Compose([*_SHIFT, *last])
    else:
        ways = (transforms.InterpolationMode.BILINEAR, transforms.InterpolationMode.BICUBIC)
        crops = transforms.RandomChoice(
            [transforms.RandomResizedCrop(pictures.size, interpolation=way) for way in ways]
        )
        steps = transforms.Compose([crops, transforms.RandomHorizontalFlip(), *last])
        dataset = ImageFolder(str(pictures.data / "train"), steps)
    return DataLoader(
        dataset,
        pictures.batch_size,
        shuffle=True,
        num_workers=pictures.workers,
        drop_last=True,
        persistent_workers=pictures.workers > 0,
    )


_SHIFT = [transforms.RandomCrop(28, padding=3, padding_mode="edge"), transforms.RandomHorizontalFlip()]


class _InMemory(Dataset):
    """Fashion-MNIST as torchvision keeps it: arrays in memory, of which each becomes a picture."""

    def __init__(self) -> None:
        data = load_images(FASHION)
        pixels, _ = data.train.pixels(torch.arange(len(data.train)))
        self.arrays, self.labels = pixels[:, 0].numpy(), data.train.labels.tolist()
        self.transform: Callable | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        assert self.transform is not None
        return self.transform(Image.fromarray(self.arrays[index])), self.labels[index]


def only_read(batches: Callable[[], Iterator], units: int) -> Callable[[Clock], None]:
    """Batches that nothing learns from: what reading, decoding and augmenting cost alone."""

    def loop(clock: Clock) -> None:
        for _ in batches():
            clock.tick(units)

    return loop


def our_batches(pictures: Pictures) -> Iterator:
    """The batches that the trainer gets."""

    yield from ImageClassification.load_data(pictures.config()).train_batches(
        batch_size=pictures.batch_size, epoch=0, start=0
    )


def make_folder(folder: Path, kind: str, width: int, height: int, count: int) -> Path:
    """A folder in ImageNet's layout, made once: parts of NASA's Blue Marble as files of this kind, png or jpg."""
    from recipes.datasets.images.blue_marble import fetch_blue_marble
    from tokenmix.lab.data.store import fetched

    made, partial = folder / f"{kind}-{width}", folder / f"{kind}-{width}.partial"
    if made.exists():
        return made
    whole = fetched("blue-marble", None, fetch_blue_marble)[0]["image"].permute(1, 2, 0).numpy()
    rng = random.Random(0)
    for number in range(count):
        top, left = rng.randrange(whole.shape[0] - height), rng.randrange(whole.shape[1] - width)
        picture = Image.fromarray(np.ascontiguousarray(whole[top : top + height, left : left + width]))
        for part in ("train", "val") if number < 8 else ("train",):
            place = partial / part / "ab"[number % 2]
            place.mkdir(parents=True, exist_ok=True)
            picture.save(place / f"{number:05}.{kind}", quality=90)
    partial.rename(made)
    return made
