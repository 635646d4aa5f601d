"""Selected test samples, each variant's prediction for them, and of images the maps that it used."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from tokenmix.lab.compare.results import Example
from tokenmix.lab.data.images import ImageData
from tokenmix.lab.inspect.maps import Tile, attention_maps, tiles_of
from tokenmix.lab.train.task import TaskData, TaskModule
from tokenmix.layers.base import Mixer
from tokenmix.models import BlockMap

CANDIDATES = 256
TILES = 4
# Anchors of the two colour scales: dark to bright for shares, blue through transparent to red for signed gates, as
# `tokenmix.lab.inspect.maps.SIGNED` has it.
SEQUENTIAL = np.array([(20, 11, 53), (101, 21, 110), (187, 55, 84), (249, 142, 9), (252, 255, 164)], dtype=float)
NEGATIVE, POSITIVE = np.array((47, 111, 237.0)), np.array((226, 67, 45.0))


@dataclass(frozen=True)
class ExampleMaps:
    """What the report shows of one test image: `image` is uint8 (C, H, W); `tiles` by mixer, then by block."""

    index: int
    image: Tensor
    tiles: dict[str, list[list[Tile]]]

    @property
    def url(self) -> str:
        """The image as a data URL."""
        values = self.image.expand(3, -1, -1) if self.image.shape[0] == 1 else self.image[:3]
        return _png(values.permute(1, 2, 0).numpy())


@dataclass(frozen=True)
class ShownExample:
    """A test sample as its task shows it: images, or words; `input` is None where the others show it as well."""

    index: int
    input: Image.Image | str | None
    truth: Image.Image | str
    predictions: Mapping[str, Image.Image | str]

    def pictures(self) -> list[tuple[str, bool, str]]:
        """What stands in a row: what it is, whether it is an image, and the words or the image as a data URL."""
        found = []
        for name, one in {"sample": self.input, "truth": self.truth, **self.predictions}.items():
            if isinstance(one, str):
                found.append((name, False, one))
            elif one is not None:
                small = one.copy()
                small.thumbnail((240, 240))
                found.append((name, True, _png(np.array(small.convert("RGB")))))
        return found


def tile_url(tile: Tile) -> str:
    """A map as a data URL.

    Signed values are blue below 0 and red above, stronger with size. Others have a scale of their own, and low ones
    let the image through.
    """
    return _png(signed(tile.values.numpy()) if tile.signed else _share(tile.values.numpy(), tile.on_image))


def make_examples(
    trained: Mapping[str, TaskModule], data: TaskData, number: int = 4
) -> tuple[list[Example], list[ExampleMaps | ShownExample]]:
    """Predictions of trained variants on a few test samples: as the task shows them, of other images with maps.

    Args:
        trained: a trained task for each variant, by its name.
        data: what they were trained on.
        number: samples to show.
    """
    if not trained:
        return [], []
    if type(next(iter(trained.values()))).show is not TaskModule.show:
        return [], list(_shown(trained, data, number))
    images = getattr(data, "images", None)
    if images is None:
        return [], []
    examples, maps = _with_maps(trained, images, number)
    return examples, list(maps)


@torch.no_grad()
def _shown(trained: Mapping[str, TaskModule], data: TaskData, number: int) -> list[ShownExample]:
    """The first test samples as the task draws them."""
    batch = next(iter(data.test_batches(batch_size=number)))
    answers = {name: task.eval().show(batch)[:number] for name, task in trained.items()}
    first = next(iter(answers.values()))
    return [
        ShownExample(i, one.input, one.truth, {name: shown[i].prediction for name, shown in answers.items()})
        for i, one in enumerate(first)
    ]


@torch.no_grad()
def _with_maps(
    trained: Mapping[str, TaskModule], images: ImageData, number: int
) -> tuple[list[Example], list[ExampleMaps]]:
    task = next(iter(trained.values()))
    places = torch.linspace(0, len(images.test) - 1, min(CANDIDATES, len(images.test))).long()
    pixels, places = images.test.pixels(places)
    labels = images.test.labels[places]
    mean, std = (torch.tensor(task.data[key]).view(-1, 1, 1) for key in ("mean", "std"))
    inputs = pixels.float().div(255).sub(mean).div(std)
    answers = {name: one.model.eval()(inputs).softmax(-1) for name, one in trained.items()}
    right = torch.stack([a.argmax(-1) == labels for a in answers.values()])
    chosen = choose_images(right, labels, number)
    maps = {name: _maps_of(one.model, inputs[chosen]) for name, one in trained.items()}
    examples = [
        Example(
            index=int(places[i]),
            label=images.classes[int(labels[i])],
            answers={name: (images.classes[int(p[i].argmax())], float(p[i].max())) for name, p in answers.items()},
        )
        for i in chosen
    ]
    shown = [
        ExampleMaps(
            index=int(places[i]),
            image=pixels[i],
            tiles={name: [tiles_of(block, row, TILES) for block in blocks] for name, blocks in maps.items()},
        )
        for row, i in enumerate(chosen)
    ]
    return examples, shown


def _maps_of(model: nn.Module, inputs: Tensor) -> list[BlockMap]:
    """The maps of a variant; none if its mixers have none to show, or are another library's attention."""
    mixers = [module for module in model.modules() if isinstance(module, Mixer)]
    if not any(mixer.capabilities.map is not None for mixer in mixers):
        return []
    return attention_maps(model, inputs)


def choose_images(right: Tensor, labels: Tensor, number: int) -> list[int]:
    """Half images that all variants get right, half on which they disagree most; of different classes while there are
    any.

    Args:
        right: (variants, images), whether a variant's prediction is right.
        labels: (images,).
        number: how many to choose.
    """
    share = right.float().mean(0)
    agreed = _one_per_class(torch.argsort(share, descending=True, stable=True).tolist(), labels, (number + 1) // 2, [])
    disputed = torch.argsort((share - 0.5).abs(), stable=True).tolist()
    return _one_per_class(disputed, labels, number, agreed)


def _one_per_class(order: Sequence[int], labels: Tensor, number: int, chosen: list[int]) -> list[int]:
    chosen = list(chosen)
    for new_class in (True, False):
        for i in order:
            seen = {int(labels[j]) for j in chosen}
            if len(chosen) < number and i not in chosen and (int(labels[i]) not in seen or not new_class):
                chosen.append(i)
    return chosen


def _share(values: np.ndarray, on_image: bool) -> np.ndarray:
    """RGBA: each map on its own scale; what is low lets the image through."""
    span = values.max() - values.min()
    scaled = (values - values.min()) / span if span > 0 else np.zeros_like(values)
    places = np.linspace(0, 1, len(SEQUENTIAL))
    colour = np.stack([np.interp(scaled, places, SEQUENTIAL[:, c]) for c in range(3)], -1)
    alpha = (0.35 + 0.5 * scaled) * 255 if on_image else np.full_like(scaled, 255)
    return np.concatenate([colour, alpha[..., None]], -1).round().astype(np.uint8)


def signed(values: np.ndarray) -> np.ndarray:
    """RGBA: blue below 0, red above, stronger with size, 0 transparent."""
    scaled = values / max(abs(values).max(), 1e-12)
    colour = np.where(scaled[..., None] < 0, NEGATIVE, POSITIVE)
    return np.concatenate([colour, 235 * abs(scaled[..., None])], -1).round().astype(np.uint8)


def _png(pixels: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
