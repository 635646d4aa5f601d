"""Selected test images, each variant's prediction for them, and the maps that it used."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tokenmix.lab.compare.map_figures import ExampleMaps
from tokenmix.lab.compare.results import Example
from tokenmix.lab.data.images import ImageData
from tokenmix.lab.inspect.maps import attention_maps
from tokenmix.lab.inspect.tiles import tiles_of
from tokenmix.models import BlockMap

CANDIDATES = 256
TILES = 4


@torch.no_grad()
def make_examples(
    models: Mapping[str, nn.Module], images: ImageData, description: Mapping[str, Any], number: int = 4
) -> tuple[list[Example], list[ExampleMaps]]:
    """Predictions and maps of trained variants on a few test images.

    Args:
        models: a trained variant for each mixer.
        images: the data set.
        description: its data.json, whose normalisation the variants were trained with.
        number: images to show.
    """
    if not models:
        return [], []
    places = torch.linspace(0, len(images.test) - 1, min(CANDIDATES, len(images.test))).long()
    pixels, places = images.test.pixels(places)
    labels = images.test.labels[places]
    mean, std = (torch.tensor(description[key]).view(-1, 1, 1) for key in ("mean", "std"))
    inputs = pixels.float().div(255).sub(mean).div(std)
    answers = {name: model.cpu().float().eval()(inputs).softmax(-1) for name, model in models.items()}
    right = torch.stack([a.argmax(-1) == labels for a in answers.values()])
    chosen = choose_images(right, labels, number)
    maps = {name: _maps_of(model, inputs[chosen]) for name, model in models.items()}
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


def _maps_of(model: Any, inputs: Tensor) -> list[BlockMap]:
    """The maps of a variant; none if its mixer has none to show."""
    shown = any(block.mixer.capabilities.map is not None for block in model.blocks)
    return attention_maps(model, inputs) if shown else []


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
