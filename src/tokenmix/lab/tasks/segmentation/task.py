"""Semantic segmentation: a class for each pixel; cross-entropy, mean intersection over union."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from math import isnan
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.lab.data.fetch import log
from tokenmix.lab.data.images import read_image
from tokenmix.lab.data.indexed import spread
from tokenmix.lab.data.scenes import PixelSamples, SceneAugment, SceneData, load_scenes, repeated
from tokenmix.lab.tasks.images import (
    ImageTask,
    both_sides,
    channel_columns,
    check_stems,
    image_view,
    stored_picture,
)
from tokenmix.lab.tasks.segmentation.inference import Tile, all_rows, as_segmenter, own_rows, pixel_logits, tiles
from tokenmix.lab.tasks.segmentation.options import SegmentationOptions
from tokenmix.lab.tasks.segmentation.output import shares, veiled, write_answer
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.metrics import Metric, Rows, accuracy_of, class_counts, iou_of, quotient
from tokenmix.lab.train.predictions import joined
from tokenmix.lab.train.programs import PlainSamples, Shown, View
from tokenmix.lab.train.task import IndexedData, check_names
from tokenmix.layers.base import Mixer
from tokenmix.models.foreign import create_foreign
from tokenmix.models.registry import create_model
from tokenmix.models.segmentation import Segmenter
from tokenmix.registry import is_foreign


def pixel_entropy(logits: Tensor, classes: Tensor, ignore: int) -> Tensor:
    """Cross-entropy over the pixels of this process that are not ignored; 0 if there are none.

    Shape:
        logits (B, C, H, W), classes (B, H, W) to ().
    """
    count = (classes != ignore).sum().float()
    return F.cross_entropy(logits, classes, ignore_index=ignore, reduction="sum") / count.clamp_min(1)


def soft_iou_loss(logits: Tensor, classes: Tensor, ignore: int) -> Tensor:
    """One minus the mean over the classes of the soft intersection over union of prediction and truth.

        loss = 1 - mean_c [ sum_n p_nc t_nc / sum_n (p_nc + t_nc - p_nc t_nc) ],   p = softmax(logits)

    with t_nc = 1 where pixel n is of class c, over the pixels of all images of the step that are not ignored, and the
    classes that one of them has. Rare classes weigh as much as common ones, as in the mean IoU. 0 if every pixel is
    ignored.

    Paper: Rahman and Wang, Optimizing Intersection-Over-Union in Deep Neural Networks for Image Segmentation, 2016,
    there for one class.

    Shape:
        logits (B, C, H, W), classes (B, H, W) to ().
    """
    shares, counted = logits.softmax(1), classes != ignore
    labels = classes.where(counted, 0).flatten()
    right = shares.gather(1, labels.view_as(classes).unsqueeze(1)).squeeze(1) * counted
    nothing = shares.new_zeros(shares.shape[1])
    both = nothing.index_add(0, labels, right.flatten())
    answered = torch.einsum("bchw,bhw->c", shares, counted.to(shares.dtype))
    there = nothing.index_add(0, labels, counted.flatten().to(shares.dtype))
    both, answered, there = _of_all(torch.stack([both, answered, there]))
    present = there > 0
    overlap = both[present] / (answered + there - both)[present]
    return (1 - overlap).sum() / present.sum().clamp_min(1)


def _of_all(own: Tensor) -> Tensor:
    """The sum over the processes, whose gradients come out right once they are averaged over the processes."""
    if not dist.is_initialized():
        return own
    total = own.detach().clone()
    dist.all_reduce(total)
    return total + dist.get_world_size() * (own - own.detach())


MOST_CLASSES = 256


class PixelData(IndexedData):
    """Crops for training, and whole images for testing, `test_batch` at a time."""

    def __init__(self, data: SceneData, config: TrainConfig) -> None:
        options: SegmentationOptions = config.options
        crop = both_sides(options.crop) if options.crop else data.crop
        still = options.augment == "none"
        augment = SceneAugment(
            seed=config.loop.seed,
            crop=crop,
            ignore=data.ignore,
            scales=options.train_scales,
            flip=0.0 if still else 0.5,
            color_jitter=options.color_jitter,
            fill=data.mean,
        )
        self.options = options
        size = crop or tuple(PixelSamples(data, data.train).read(torch.tensor([0]), 0)["image"].shape[2:])
        train, test = PixelSamples(data, repeated(data.train, options.crops), augment), PixelSamples(data, data.test)
        held = None if data.validation is None else PixelSamples(data, data.validation)
        super().__init__(
            train,
            test,
            held,
            config=config,
            description={
                "classes": data.classes,
                "ignore": data.ignore,
                "palette": data.palette,
                "mean": data.mean,
                "std": data.std,
                "channels": 3,
                "img_size": size,
                "source": data.source,
                "skipped": [asdict(one) for one in data.skipped],
            },
        )

    def test_batches(self, *, batch_size: int) -> Iterable[Any]:
        """The test images in their order; `batch_size` is that of training."""
        return super().test_batches(batch_size=min(batch_size, self.options.test_batch))

    def validation_batches(self, *, batch_size: int) -> Iterable[Any]:
        """The validation images likewise."""
        return super().validation_batches(batch_size=min(batch_size, self.options.test_batch))


class SemanticSegmentation(ImageTask):
    """A class for each pixel, by cross-entropy over the pixels that are not of the ignored class, and by soft IoU.

    With several processes the loss is that over the pixels of all, however many of each are ignored. The released code
    divides by all pixels, ignored ones as well.
    """

    monitor: str = "miou"
    options: SegmentationOptions
    set_elsewhere: ClassVar[Mapping[str, str]] = {"num_classes": "--data", "img_size": "--crop"}
    writes: ClassVar[bool] = True
    baselines: ClassVar[tuple[str, ...]] = ("majority",)

    @classmethod
    def load_data(cls, config: TrainConfig, like: Mapping[str, Any] | None = None) -> PixelData:
        """The scenes of `config.data.data`; with `like` normalised as that run's, and of the same classes."""
        data = load_scenes(config.data.data, want="classes", seed=config.loop.seed).split(
            validation=config.data.validation
        )
        if len(data.classes) > MOST_CLASSES:
            raise UserError(
                f"{config.data.data!r} has {len(data.classes)} classes; a mask has colours for {MOST_CLASSES}"
            )
        if like is not None:
            check_names(config.data.data, data.classes, like["classes"])
            data = replace(data, mean=tuple(like["mean"]), std=tuple(like["std"]))
        else:
            _check_learnable(data, config.options.crops, config.data.limit)
        return PixelData(data, config)

    @classmethod
    def build_model(cls, config: TrainConfig, data: Mapping[str, Any]) -> nn.Module:
        """The segmenter of that name, with the data's classes, built for its crops."""
        given: dict[str, Any] = {"num_classes": len(data["classes"]), "img_size": tuple(data["img_size"])}
        given |= config.model.model_kwargs
        if is_foreign(config.model.model):
            return create_foreign(config.model.model, "segmenter", in_chans=data["channels"], **given)
        model: Any = create_model(config.model.model, **given)
        # Convolutions of a CPU and of half precision on a GPU are faster with the channels last.
        return model if model.fixed_size else model.to(memory_format=torch.channels_last)

    @classmethod
    def view(cls, model: nn.Module, file: Path, data: Mapping[str, Any]) -> View:
        """The whole image as it is.

        Its middle for a model that takes only one size, or attends between positions: N x N would not fit.
        """
        mixers = [part for part in getattr(model, "context", model).modules() if isinstance(part, Mixer)]
        if getattr(model, "fixed_size", False) or any(mixer.capabilities.map == "tokens" for mixer in mixers):
            pixels = read_image(file, data["channels"], tuple(data["img_size"]))
        else:
            pixels = stored_picture(file)
        return image_view(pixels, data["mean"], data["std"])

    @classmethod
    @torch.no_grad()
    def name_prediction(cls, model: nn.Module, inputs: Tensor, data: Mapping[str, Any]) -> dict[str, Any] | None:
        """The share of each class."""
        classes = data.get("classes")
        return {"shares": shares(model(inputs)[0].argmax(0), classes)} if classes else None

    @property
    def segmenter(self) -> Segmenter:
        """The model, or one from elsewhere with what a segmenter of ours has."""
        return as_segmenter(self.model, len(self.data["classes"]), self.data["img_size"])

    def loss(self, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross-entropy over the pixels of this step's crops that are not ignored, plus `iou_loss` of the soft IoU."""
        logits, ignore = self.segmenter(batch["image"]).float(), self.data["ignore"]
        classes = own_rows(self.segmenter, batch["classes"], 1)
        entropy = self.part_weight * pixel_entropy(logits, classes, ignore)
        if not self.options.iou_loss:
            return entropy, {}
        overlap = soft_iou_loss(logits, classes, ignore)
        parts = {"cross_entropy": entropy.detach(), "iou_loss": overlap.detach()}
        return entropy + self.options.iou_loss * overlap, parts

    def count(self, batch: Mapping[str, Any]) -> int:
        """Pixels that are not ignored, in the rows of this process."""
        return int((own_rows(self.segmenter, batch["classes"], 1) != self.data["ignore"]).sum())

    def evaluate(self, batch: Mapping[str, Any]) -> Rows:
        """Logits of whole images, as the options look at them, against their classes."""
        images, model, parts = batch["image"], self.segmenter, []
        for tile in self._tiles(tuple(images.shape[2:])):
            logits = pixel_logits(model, images[..., *tile.seen], self.options)
            classes = own_rows(model, batch["classes"][..., *tile.kept], 1)
            parts.append(self.judged(logits[..., *tile.inner], classes, batch["index"]))
        return joined(parts)

    def _tiles(self, size: tuple[int, int]) -> list[Tile]:
        """Those of an image; the whole of one that several processes share, since they split it for that."""
        if self.own_samples == slice(None):
            return tiles(self.segmenter, size, self.options)
        whole = slice(0, size[0]), slice(0, size[1])
        return [Tile(whole, whole)]

    def judged(self, logits: Tensor, targets: Tensor, index: Tensor) -> Rows:
        """The counts of the pixels of images, or of parts of them, and the sums of their cross-entropies."""
        ignore = int(self.data["ignore"])
        # Image by image: without a reduction the loss takes three times as long.
        each = zip(logits.float().split(1), targets.split(1))
        loss = [F.cross_entropy(*one, ignore_index=ignore, reduction="sum") for one in each]
        counts = class_counts(logits.argmax(1), targets, len(self.data["classes"]), ignore)
        return {"index": index, "counts": counts.int(), "loss": torch.stack(loss)}

    @classmethod
    def make_metrics(cls, config: TrainConfig, data: Mapping[str, Any]) -> dict[str, Metric]:
        """Pixel accuracy, mean IoU and that of each class, -1 for one that never occurs; loss."""

        def losses(rows: Rows) -> Tensor:
            return torch.stack([rows["loss"].double(), rows["counts"][:, 1].sum(1).double()], 1)

        return {
            "accuracy": Metric.of_sums(accuracy_of, itemgetter("counts")),
            "miou": Metric.of_sums(lambda sums: iou_of(sums).nanmean(-1), itemgetter("counts")),
            "class_iou": Metric.of_sums(iou_of, itemgetter("counts"), names=data["classes"], undefined=-1.0),
            "loss": Metric.of_sums(quotient, losses, higher_is_better=False),
        }

    def on_validation_epoch_end(self) -> None:
        """As of every task; `UserError` if no pixel counted."""
        super().on_validation_epoch_end()
        if isnan(self.results["miou"]):
            raise UserError(
                f"every pixel of the test images of {self.config.data.data!r} has the ignored class "
                f"{self.data['ignore']}, so nothing can be measured; give masks with classes"
            )

    def parameter_groups(self) -> nn.Module | list[dict[str, Any]]:
        """As for every task, with a rate of its own for biases if asked for."""
        if self.options.bias_lr == 1.0:
            return super().parameter_groups()
        optim, named = self.config.optim, [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        biases = [p for name, p in named if name.endswith("bias") and p.dim() == 1]
        norms = [p for name, p in named if not name.endswith("bias") and p.dim() <= 1]
        return [
            {"params": [p for _, p in named if p.dim() > 1], "weight_decay": optim.weight_decay},
            {"params": norms, "weight_decay": 0.0},
            {"params": biases, "weight_decay": 0.0, "lr": self.options.bias_lr * optim.lr},
        ]

    def plain_samples(self, data: PixelData, part: Literal["train", "test"]) -> Iterator[PlainSamples]:
        """The classes of the pixels."""
        for batch in data.batches_of(part, 8):
            yield PlainSamples(None, batch["classes"])

    def show(self, batch: Mapping[str, Any]) -> list[Shown]:
        """Each image under the colours of its classes, and of those predicted."""
        levels = batch["image"].cpu() * channel_columns(self.data["std"]) + channel_columns(self.data["mean"])
        found = []
        for pixels, classes in zip(levels.mul(255).round().clamp(0, 255).byte(), batch["classes"].cpu()):
            image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
            masks = (classes, self.answer(pixels))
            found.append(Shown(image, *(veiled(image, mask, self.data["palette"]) for mask in masks)))
        return found

    def example(self) -> dict[str, Tensor]:
        """Two crops of noise."""
        return {"images": torch.randn(2, self.data["channels"], *self.data["img_size"])}

    @torch.no_grad()
    def answer(self, image: Tensor) -> Tensor:
        """The class of each pixel, uint8 (H, W), of an image uint8 (3, H, W) of any size."""
        size = (image.shape[1], image.shape[2])
        classes = torch.empty(size, dtype=torch.uint8)
        mean, std = channel_columns(self.data["mean"]), channel_columns(self.data["std"])
        for tile in self._tiles(size):
            seen = image[:, *tile.seen].float().div_(255).sub_(mean).div_(std)[None].to(next(self.model.parameters()))
            logits = pixel_logits(self.segmenter, seen, self.options)
            found = all_rows(self.segmenter, logits.argmax(1, keepdim=True).byte())
            classes[tile.kept] = found[0, 0][tile.inner].cpu()
        return classes

    def predict(self, inputs: Sequence[str | Path]) -> list[dict[str, Any]]:
        """Size and share of each class of each image, which may have any size."""
        return [self._answer(file, None) for file in inputs]

    def predict_into(self, inputs: Sequence[str | Path], out: Path) -> list[dict[str, Any]]:
        """The same; for each image a mask in colours, an overlay, and shares and run lengths as JSON in `out`."""
        check_stems(inputs)
        return [self._answer(file, out) for file in inputs]

    def _answer(self, file: str | Path, out: Path | None) -> dict[str, Any]:
        self.eval()
        picture, names = stored_picture(file), self.data["classes"]
        classes = self.answer(picture)
        told = {"file": str(file), "size": list(classes.shape), "shares": shares(classes, names)}
        if out is None:
            return told
        stem = out / Path(file).stem
        return {**told, "written": write_answer(picture, classes, told, names, self.data["palette"], stem)}


def _check_learnable(data: SceneData, crops: int, limit: int | None) -> None:
    """Raise `UserError` if no pixel of the training images counts, and warn if all that do have one class; the second
    class ends the search."""
    samples, shown = PixelSamples(data, repeated(data.train, crops)), set[int]()
    for index in spread(len(samples), limit).tolist():
        shown |= samples.shown(index)
        if len(shown) > 1:
            return
    if not shown:
        raise UserError(
            f"every pixel of the training images of {data.spec!r} has the ignored class {data.ignore}, so nothing "
            "can be learned; give masks with classes"
        )
    log(
        f"the training images of {data.spec} show no class but {data.classes[shown.pop()]!r}; their pixels of "
        f"{data.ignore} are ignored"
    )
