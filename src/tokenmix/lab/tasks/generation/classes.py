"""A subset of a data set's classes, by name, with limits on their images."""

import dataclasses
from collections.abc import Sequence

import torch

from tokenmix.errors import UserError, unknown_name
from tokenmix.lab.data.images import ImageData, ImageSet


def keep_classes(
    images: ImageData,
    wanted: Sequence[str] | None,
    *,
    limit: int | None,
    limit_eval: int | None,
    validation: int | None = 0,
    seed: int,
) -> ImageData:
    """The images of the wanted classes, numbered in their order; of all classes if None.

    Args:
        images: the data set.
        wanted: names of classes; one text may name several, separated by commas.
        limit, limit_eval, validation, seed: as in `tokenmix.lab.data.images.load_images`, of the images that are left.

    Raises:
        UserError: a class that the data does not have, one that is named twice, or fewer than two.
    """
    known = list(images.classes)
    names = (
        known
        if wanted is None
        else [
            name.strip() for text in wanted for name in ([text] if text in known else text.split(",")) if name.strip()
        ]
    )
    check_class_names(names, known, f"class of {images.spec}")
    if len(names) < 2:
        raise UserError(
            f"image-generation is conditional on classes and needs at least two, got {', '.join(names) or 'none'}; "
            f"{images.spec} has {', '.join(known[:5])}"
        )
    numbers = [known.index(name) for name in names]
    train, test = _of_classes(images.train, numbers), _of_classes(images.test, numbers)
    return dataclasses.replace(images, train=train, test=test, classes=names).split(
        (train.labels, test.labels), limit=limit, limit_eval=limit_eval, validation=validation, seed=seed
    )


def check_class_names(names: Sequence[str], known: Sequence[str], what: str) -> None:
    """Raise `UserError` for a name that is not known, with the nearest that are, or that comes twice."""
    for place, name in enumerate(names):
        if name not in known:
            raise unknown_name(what, name, known)
        if name in names[:place]:
            raise UserError(f"class {name!r} is given twice; remove one")


def _of_classes(images: ImageSet, numbers: Sequence[int]) -> ImageSet:
    part = images.subset(torch.isin(images.labels, torch.tensor(numbers)).nonzero().flatten())
    renumbered = torch.full((max(numbers) + 1,), -1)
    renumbered[torch.tensor(numbers)] = torch.arange(len(numbers))
    part.labels = renumbered[part.labels]
    return part
