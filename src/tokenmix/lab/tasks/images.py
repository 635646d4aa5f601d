"""Shared code of image tasks: hooks, reading of files, images under maps, sliding windows."""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tokenmix.errors import UserError
from tokenmix.files import Values
from tokenmix.lab.data.fetch import log
from tokenmix.lab.data.images import ImageData
from tokenmix.lab.data.indexed import IndexedDataset, balanced_order
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.distributed import distributed_info
from tokenmix.lab.train.folder import RunFolder
from tokenmix.lab.train.programs import Batch, Description, View, check_sizes, counted_summary, model_summary
from tokenmix.lab.train.task import IndexedData, TaskModule
from tokenmix.layers.less_attention import LessAttention, kept_scores
from tokenmix.losses import diagonality_loss
from tokenmix.models.foreign import with_fresh_head
from tokenmix.models.registry import create_model
from tokenmix.ops.less import Scores
from tokenmix.registry import MODELS, Arguments, is_elsewhere, load_object

LONGEST = 1000


class ImageTask(TaskModule):
    """A task on images, with maps for `inspect` and a table of parts for `info`."""

    inspects: ClassVar[Literal["images", "text", "nothing"]] = "images"

    @classmethod
    def summarize_model(cls, name: str, sizes: Arguments, model_kwargs: Arguments) -> Values:
        """Parts and published figures of a model; only the parameters of a model that does not count its parts."""
        check_sizes(sizes, ("img_size",), f"{name} takes images")
        model = create_model(name, **sizes, **model_kwargs)
        counted: Any = model
        if not hasattr(counted, "cost_table"):
            return model_summary(name, model)
        size = {"image": list(counted.img_size), "grid": list(counted.grid_size), "tokens": counted.num_tokens}
        return counted_summary(name, counted, size)

    def example(self) -> dict[str, Tensor]:
        return {"images": torch.randn(2, self.data["channels"], *self.data["img_size"])}

    def initial_weights(self, source: Path) -> dict[str, Tensor]:
        """As for every task, with a new head for other classes, and interpolated positions in third-party models."""
        weights = super().initial_weights(source)
        if is_elsewhere(self.config.model.model):
            weights = with_resized_positions(weights, self.model.state_dict())
        elif not hasattr(self.model, "get_classifier"):
            return weights
        ours, folder = self.data["classes"], RunFolder.of_weights(source)
        weights, theirs = with_fresh_head(weights, self.model, len(ours))
        fresh = f"the head starts fresh: {source} has"
        told = "" if theirs is None else f"{fresh} {theirs} classes, this run {len(ours)}"
        if theirs is None and folder is not None and folder.description.get("classes", ours) != ours:
            classifier: Any = getattr(self.model, "get_classifier", tuple)
            head = classifier()
            heads = head if isinstance(head, tuple) else (head,)
            names = tuple(f"{name}." for name, module in self.model.named_modules() if module in heads)
            weights |= {name: value for name, value in self.model.state_dict().items() if name.startswith(names)}
            told = f"{fresh} other classes" if names else f"the head is kept, although {source} has other classes"
        if told and distributed_info().first:
            log(told)
        return weights


class LabelledImageTask(ImageTask):
    """A task on labelled images, optionally with the diagonality loss on the scores of less-attention."""

    def __init__(self, model: nn.Module, config: TrainConfig, data: Description) -> None:
        super().__init__(model, config, data)
        if self.options.diagonality and not any(isinstance(part, LessAttention) for part in model.modules()):
            raise UserError(
                f"diagonality={self.options.diagonality:g} acts on the scores of less-attention, and "
                f"{config.model.model!r} has none; omit it, or give a model over LaViT, or --model mixer_nano "
                "--model-kwargs mixer=less"
            )

    @property
    def image_weight(self) -> float:
        """Factor on a mean over the images of a batch, like `part_weight` on one over what `count` counts."""
        return self.part_weight

    @abstractmethod
    def answer_loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of the model's answers, and further numbers for the log."""

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """`answer_loss`, plus `diagonality` times the diagonality loss of the less-attention layers."""
        if not self.options.diagonality:
            return self.answer_loss(batch)
        with kept_scores(self.model) as layers:
            total, logs = self.answer_loss(batch)
        diagonality = self._diagonality(layers)
        total = total + self.image_weight * self.options.diagonality * diagonality
        return total, {"diagonality": diagonality.detach(), **logs}

    def _diagonality(self, layers: Sequence[Scores]) -> Tensor:
        """Hinge: mean over the layers; printed: sum over the layers, as in the article."""
        form, loss = self.options.diagonality_form, diagonality_loss
        if self.config.loop.grad_checkpointing:
            # Otherwise every layer's N x N maps would be kept for the backward pass, unlike its block's.
            loss = partial(checkpoint, diagonality_loss, use_reentrant=False)
        losses = torch.stack([loss(scores, form) for scores in layers])
        return losses.sum() if form == "printed" else losses.mean()


def with_resized_positions(weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights, with positions (1, h^2, D) or (1, 1 + h^2, D) interpolated to the grid of the model's own."""
    resized = dict(weights)
    for key in (key for key in weights if "pos" in key and key in own):
        old, new = weights[key].shape, own[key].shape
        if len(old) != 3 or old[0] != 1 or old == new or old[::2] != new[::2]:
            continue
        for prefix in (0, 1):
            before, after = (math.isqrt(max(0, shape[1] - prefix)) for shape in (old, new))
            if (before**2 + prefix, after**2 + prefix) == (old[1], new[1]):
                sizes = {"new_size": [after, after], "old_size": [before, before]}
                resized[key] = resample_abs_pos_embed(weights[key], **sizes, num_prefix_tokens=prefix)
    return resized


def check_stems(files: Sequence[str | Path]) -> None:
    """Raise `UserError` if the outputs of two files would have the same name."""
    seen: dict[str, str | Path] = {}
    for file in files:
        stem = Path(file).stem
        if stem in seen:
            raise UserError(
                f"{seen[stem]} and {file} have the same name, so their outputs {stem}-* would overwrite each other; "
                "rename one, or predict them separately"
            )
        seen[stem] = file


def with_size_of_start(config: TrainConfig) -> TrainConfig:
    """The config with the image size of its --init-from run; with another size, with that run's patches.

    The default patch depends on the image size, and weights for other patches do not fit.
    """
    start, given = config.loop.init_from, config.options.img_size
    folder = None if start is None else RunFolder.of_weights(start)
    if folder is None:
        return config
    size = folder.description.get("img_size")
    if not isinstance(size, list) or size[0] != size[1]:
        return config
    if given is None:
        return config.replace(img_size=size[0])
    name = config.model.model
    if name not in MODELS or "patch_size" in MODELS[name].arguments:
        return config
    # Only for a network whose patch size follows the image size.
    default_patch = getattr(load_object(MODELS[name].build), "default_patch", None)
    if default_patch is None:
        return config
    return config.replace(model_kwargs={"patch_size": default_patch((size[0], size[0])), **config.model.model_kwargs})


def image_data(
    images: ImageData,
    config: TrainConfig,
    mean: Sequence[float],
    std: Sequence[float],
    more: Values | None = None,
    **augment: Any,
) -> IndexedData:
    """Images normalised with `mean` and `std`, for training augmented; `more` is added to their description."""
    train: IndexedDataset = images.train.prepared(mean=mean, std=std, seed=config.loop.seed, **augment)
    train = balanced_order(train, images.train.labels, getattr(config.options, "sampler", "shuffle"))
    test = images.test.prepared(mean=mean, std=std)
    held = None if images.validation is None else images.validation.prepared(mean=mean, std=std)
    made = IndexedData(train, test, held, config=config, description={**images.describe(), **(more or {})})
    made.images = images
    return made


def image_view(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> View:
    """View of an image uint8 (C, H, W), normalised for the model."""
    levels = pixels.float().div(255)
    return View(shown_image(levels), levels.sub(channel_columns(mean)).div(channel_columns(std))[None])


def channel_columns(values: Sequence[float]) -> Tensor:
    """One number per channel as (C, 1, 1)."""
    return torch.tensor(values).view(-1, 1, 1)


def shown_image(levels: Tensor) -> Tensor:
    """The image with at most 1,000 pixels per side, enough for an overview."""
    scale = LONGEST / max(levels.shape[1:])
    if scale >= 1:
        return levels
    size = [max(1, round(side * scale)) for side in levels.shape[1:]]
    return F.interpolate(levels[None], size=size, mode="bilinear", antialias=True)[0]


def window_starts(length: int, window: int, step: int) -> list[int]:
    """Starts of windows along a side: every `step`, and a last one that ends with the image."""
    last = max(length - window, 0)
    return [*range(0, last, step), last]


def both_sides(given: Sequence[int]) -> tuple[int, int]:
    """Height and width from one number for both, or from two."""
    return given[0], given[-1]
