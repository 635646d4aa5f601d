"""Selected test samples, each variant's prediction for them, and of images the maps that it used."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from tokenmix.lab.compare.map_figures import ExampleMaps, ShownExample
from tokenmix.lab.compare.results import Example
from tokenmix.lab.data.images import ImageData
from tokenmix.lab.inspect.maps import attention_maps, tiles_of
from tokenmix.lab.train.task import TaskData, TaskModule
from tokenmix.layers.base import Mixer
from tokenmix.models import BlockMap

CANDIDATES = 256
TILES = 4


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
