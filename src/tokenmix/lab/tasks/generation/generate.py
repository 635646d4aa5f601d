"""Images from the generator of a run folder."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tokenmix.errors import UserError
from tokenmix.files import make_folder
from tokenmix.lab.tasks.generation.classes import check_class_names
from tokenmix.lab.tasks.generation.samples import noise_of, save_grid, save_image, strips
from tokenmix.lab.tasks.generation.task import ImageGeneration
from tokenmix.lab.train.load import load_task

COLUMNS = 8
# Made at a time: thousands at once would not fit into memory.
BATCH = 64


def generate(
    run: Path,
    out: Path,
    *,
    classes: Sequence[str] = (),
    num: int = 8,
    seed: int = 0,
    interpolate: int | None = None,
) -> list[dict[str, Any]]:
    """Write `num` images of each class as PNG files, and all of them in grid.png, each class from a new row on.

    An image depends on the run, the seed, its class and its number alone: more of them, or other classes, change
    none.

    Args:
        run: a run folder of image-generation.
        out: folder to write.
        classes: names of classes; all if empty.
        num: images of each class.
        seed: of the noise.
        interpolate: write strips.png as well, that many steps between two noises for each class.

    Returns:
        For each class its name, how many images, and the first of their files.

    Raises:
        UserError: a run of another task, a class that it does not know or that is named twice, or a number that is too
            small.
    """
    for name, value, least in (("num", num, 1), ("interpolate", interpolate, 2), ("seed", seed, 0)):
        if value is not None and value < least:
            raise UserError(f"{name} must be at least {least}, got {value}")
    task, config, _ = load_task(run)
    if not isinstance(task, ImageGeneration):
        raise UserError(f"{run} is a run of {config.task}; generate takes one of image-generation")
    check_class_names(classes, task.classes, "class")
    numbers = torch.tensor([task.classes.index(name) for name in classes or task.classes])
    make_folder(out)
    latent = task.model.generator.latent_dim
    columns = min(num, COLUMNS)
    images, rows = [], []
    for number in numbers.tolist():
        noise = noise_of(torch.arange(num), latent, seed=seed, group=number)
        with torch.no_grad():
            made = torch.cat([task.model(part, torch.full((len(part),), number)) for part in noise.split(BATCH)])
        stem = re.sub(r"\W+", "-", task.classes[number]).strip("-") or "class"
        files = [save_image(image, out / f"{number:03d}-{stem}-{i:04d}.png") for i, image in enumerate(made)]
        rows.append({"class": task.classes[number], "images": num, "first": str(files[0])})
        # White, as what is between images, up to the end of the row.
        images += [made, made.new_ones(-num % columns, *made.shape[1:])]
    save_grid(torch.cat(images), columns, out / "grid.png")
    if interpolate is not None:
        path = strips(task.model, latent, numbers, interpolate, seed=seed)
        save_grid(path, interpolate, out / "strips.png")
    return rows
