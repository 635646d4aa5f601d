"""Selected test samples, each variant's prediction for them, and of images the maps that it used."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tokenmix.lab.compare.results import Example
from tokenmix.lab.inspect import SIGNED, Tile, attention_maps, tiles_of
from tokenmix.lab.train.programs import Shown
from tokenmix.lab.train.task import TaskData, TaskModule
from tokenmix.layers.base import Mixer
from tokenmix.models import BlockMap

CANDIDATES = 256
TILES = 4


@dataclass(frozen=True)
class ExampleMaps:
    """What the report shows of one test image: `image` is uint8 (C, H, W); `tiles` by mixer, then by block."""

    known: Example
    image: Tensor
    tiles: dict[str, list[list[Tile]]]

    @property
    def url(self) -> str:
        """The image as a data URL."""
        values = self.image.expand(3, -1, -1) if self.image.shape[0] == 1 else self.image[:3]
        return _png(values.permute(1, 2, 0).numpy())


@dataclass(frozen=True)
class ShownExample:
    """A test sample as its task shows it: images, or words; `input` is None where the others show it as well.

    `legend` has the colours of the classes in its images by name.
    """

    index: int
    input: Image.Image | str | None
    truth: Image.Image | str
    predictions: Mapping[str, Image.Image | str]
    legend: Mapping[str, str]

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
    values = tile.values.numpy()
    if tile.signed:
        return _png(signed(values))
    span = values.max() - values.min()
    scaled = (values - values.min()) / span if span > 0 else np.zeros_like(values)
    shown = 0.35 + 0.5 * scaled if tile.on_image else np.ones_like(scaled)
    return _png(_coloured("inferno", scaled, shown))


def color_bars(examples: Sequence[ExampleMaps]) -> list[tuple[str, str, str]]:
    """What the lowest value is called, the colours from there on as a data URL, and the highest; of scales in use."""
    tiles = [tile for maps in examples for blocks in maps.tiles.values() for block in blocks for tile in block]
    kinds = {False: ("low", "high", 0.0), True: ("negative", "positive", -1.0)}
    found = []
    for kind in sorted({tile.signed for tile in tiles}):
        low, high, least = kinds[kind]
        bar = Tile("", torch.linspace(least, 1, 64)[None], signed=kind, on_image=False)
        found.append((low, tile_url(bar), high))
    return found


def signed(values: np.ndarray) -> np.ndarray:
    """RGBA: blue below 0, red above, stronger with size, 0 transparent."""
    scaled = values / max(abs(values).max(), 1e-12)
    return _coloured(SIGNED, (scaled + 1) / 2, 0.92 * abs(scaled))


def _coloured(scale: str, values: np.ndarray, opacity: np.ndarray) -> np.ndarray:
    from matplotlib import colormaps

    return colormaps[scale](values, alpha=opacity, bytes=True)


@torch.no_grad()
def make_examples(
    trained: Mapping[str, TaskModule], data: TaskData, number: int = 4
) -> Sequence[ExampleMaps | ShownExample]:
    """Predictions of trained variants on a few test samples: as the task shows them, of other images with maps."""
    images, task = getattr(data, "images", None), next(iter(trained.values()))
    if type(task).show is not TaskModule.show:
        rows: dict[str, list[Shown]] = {name: [] for name in trained}
        for batch in data.test_batches(batch_size=number):
            for name, one in trained.items():
                rows[name] += one.eval().show(batch)
            if len(rows[name]) >= number:
                break
        return [
            ShownExample(
                i,
                one.input,
                one.truth,
                {name: row[i].prediction for name, row in rows.items()},
                {name: color for row in rows.values() for name, color in row[i].legend.items()},
            )
            for i, one in enumerate(next(iter(rows.values()))[:number])
        ]
    if images is None:
        return []
    places = torch.linspace(0, len(images.test) - 1, min(CANDIDATES, len(images.test))).long()
    pixels, places = images.test.pixels(places)
    labels = images.test.labels[places]
    mean, std = (torch.tensor(task.data[key]).view(-1, 1, 1) for key in ("mean", "std"))
    inputs = pixels.float().div(255).sub(mean).div(std)
    answers = {name: one.model.eval()(inputs).softmax(-1) for name, one in trained.items()}
    right = torch.stack([a.argmax(-1) == labels for a in answers.values()])
    chosen = choose_images(right, labels, number)
    maps = dict[str, list[BlockMap]]()
    for name, one in trained.items():
        mixers = [module for module in one.model.modules() if isinstance(module, Mixer)]
        # Mixers may have no map to show, or be another library's attention.
        drawable = any(mixer.capabilities.map is not None for mixer in mixers)
        maps[name] = attention_maps(one.model, inputs[chosen]) if drawable else []
    found = list[ExampleMaps]()
    for row, i in enumerate(chosen):
        said = {name: (images.classes[int(p[i].argmax())], p[i].max().item()) for name, p in answers.items()}
        tiles = {name: [tiles_of(block, row, TILES) for block in blocks] for name, blocks in maps.items()}
        found.append(ExampleMaps(Example(int(places[i]), images.classes[int(labels[i])], said), pixels[i], tiles))
    return found


def choose_images(right: Tensor, labels: Tensor, number: int) -> list[int]:
    """Half images that all variants get right, half on which they disagree most; of different classes while there are
    any.

    Shape:
        right (variants, images), whether a variant's prediction is right, and labels (images,).
    """
    share, chosen = right.float().mean(0), list[int]()
    for size, rank in (((number + 1) // 2, -share), (number, (share - 0.5).abs())):
        order = torch.argsort(rank, stable=True).tolist()
        for new_class in (True, False):
            for i in order:
                seen = {int(labels[j]) for j in chosen}
                if len(chosen) < size and i not in chosen and (int(labels[i]) not in seen or not new_class):
                    chosen.append(i)
    return chosen


def _png(pixels: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
