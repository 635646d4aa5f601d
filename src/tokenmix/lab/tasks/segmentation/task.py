"""Semantic segmentation: a class per pixel; images are processed whole, in tiles or windows, at several scales."""

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import islice, pairwise, product
from math import isnan, isqrt
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.v2.functional import to_pil_image

from tokenmix.errors import UserError, one_line
from tokenmix.files import Values, replacing, write_json
from tokenmix.lab.data.fetch import log
from tokenmix.lab.data.images.decode import read_image, read_stored
from tokenmix.lab.data.indexed import spread, validation_size
from tokenmix.lab.data.scenes import PixelSamples, SceneAugment, SceneData, load_scenes, repeated
from tokenmix.lab.data.scenes.coco import encode_mask
from tokenmix.lab.tasks.foreign import described_architecture, model_from_elsewhere
from tokenmix.lab.tasks.images import (
    LabelledImageTask,
    both_sides,
    channel_columns,
    check_stems,
    image_view,
    window_starts,
)
from tokenmix.lab.tasks.segmentation import Inference, SegmentationOptions
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.metrics import Metric, Rows, accuracy_of, class_counts, iou_of, joined, quotient
from tokenmix.lab.train.programs import Batch, Description, PlainSamples, Shown, View
from tokenmix.lab.train.task import IndexedData, check_names
from tokenmix.layers.base import Mixer
from tokenmix.layers.external import ExternalAttention2d
from tokenmix.models.registry import create_model
from tokenmix.models.segmentation import Segmenter

# Largest image processed whole, in pixels and in logits, and tile of larger images in pixels.
WHOLE = (1 << 22, 1 << 28)
TILE = 1 << 18
# Pixel limit of way=whole.
MOST_WHOLE = 1 << 26
FOREST_CROPS, FOREST_PIXELS = 1000, 100_000
MOST_CLASSES = 256
VEIL = 0.5


class ForeignSegmenter:
    """A third-party segmenter with the interface of ours, for images of any size."""

    fixed_size, context = False, None

    def __init__(self, model: nn.Module, num_classes: int, img_size: tuple[int, int]) -> None:
        self.model, self.num_classes, self.img_size = model, num_classes, img_size

    def __call__(self, images: Tensor) -> Tensor:
        try:
            logits: Tensor = self.model(images)
        except Exception as error:  # a third-party forward pass may raise anything
            size = tuple(images.shape[2:])
            if size == self.img_size:
                raise
            raise UserError(
                f"the model does not run on images of {size[0]} x {size[1]} ({one_line(error)}); give --way sliding"
            ) from error
        return logits


def own_rows(model: Segmenter, x: Tensor, dim: int) -> Tensor:
    """Rows of x, along `dim`, for which the model returns logits: this rank's under token parallelism, else all."""
    own: Any = getattr(model, "own_rows", None)
    return x if own is None else own(x, dim)


def all_rows(model: Segmenter, logits: Tensor) -> Tensor:
    """Logits (B, C, H, W) of all rows."""
    gather: Any = getattr(model, "all_rows", None)
    return logits if gather is None else gather(logits)


@dataclass(frozen=True)
class Tile:
    """Part of an image: rows and columns of the model's input, and of the kept output."""

    seen: tuple[slice, slice]
    kept: tuple[slice, slice]

    @property
    def inner(self) -> tuple[slice, slice]:
        """The kept part relative to the input's corner."""
        rows, columns = (slice(k.start - s.start, k.stop - s.start) for s, k in zip(self.seen, self.kept, strict=True))
        return rows, columns


def tiles(model: Segmenter, size: tuple[int, int], how: Inference, *, shared: bool = False) -> list[Tile]:
    """Tiles of an image of this height and width; one tile up to `WHOLE`, with way=whole, and if ranks share images.

    Neighbours overlap by an eighth, and each is kept up to the middle of the overlap. Memory depends on the tile, not
    on the image. `UserError` for way=whole with more than `MOST_WHOLE` pixels.
    """
    pixels, whole = size[0] * size[1], (slice(0, size[0]), slice(0, size[1]))
    if how.way == "whole" and pixels > MOST_WHOLE and not shared:
        raise UserError(
            f"{size[1]} x {size[0]} pixels at once are more than {MOST_WHOLE:,}; omit way=whole for an answer in tiles"
        )
    if shared or how.way == "whole" or pixels <= min(WHOLE[0], WHOLE[1] // model.num_classes):
        return [Tile(whole, whole)]
    side = isqrt(TILE)
    window = both_sides(how.window) if how.window else model.img_size

    def spans(length: int, side: int) -> list[tuple[slice, slice]]:
        starts = window_starts(length, side, max(1, side - side // 8))
        edges = [0, *((left + side + right) // 2 for left, right in pairwise(starts)), length]
        seen = (slice(start, min(start + side, length)) for start in starts)
        return list(zip(seen, (slice(*kept) for kept in pairwise(edges)), strict=True))

    rows, columns = (spans(length, max(side, least)) for length, least in zip(size, window, strict=True))
    return [Tile((row[0], column[0]), (row[1], column[1])) for row, column in product(rows, columns)]


@torch.no_grad()
def pixel_logits(model: Segmenter, images: Tensor, how: Inference) -> Tensor:
    """Logits (B, classes, H, W) of images (B, C, H, W) of any size; under token parallelism, of this rank's rows.

    With test-time augmentation the logits are logarithms of mean probabilities. `UserError` if the whole image is
    requested and the model takes only one size, or if windows leave gaps.
    """
    looks = list(product(how.scales, (False, True) if how.mirror == "yes" else (False,)))
    if looks == [(1.0, False)]:
        return _look(model, images, how)
    total: Tensor | None = None
    for scale, mirrored in looks:
        seen = images.flip(-1) if mirrored else images
        if scale != 1.0:
            size = [max(1, round(side * scale)) for side in images.shape[2:]]
            seen = F.interpolate(seen, size=size, mode="bilinear", align_corners=False, antialias=True)
        logits = all_rows(model, _look(model, seen, how))
        if logits.shape[2:] != images.shape[2:]:
            logits = F.interpolate(logits, size=images.shape[2:], mode="bilinear", align_corners=False)
        probabilities = (logits.flip(-1) if mirrored else logits).softmax(1)
        total = probabilities if total is None else total.add_(probabilities)
    assert total is not None
    return own_rows(model, total.div_(len(looks)).clamp_min_(1e-12).log_(), 2)


def _look(model: Segmenter, images: Tensor, how: Inference) -> Tensor:
    """Logits of the images as they are: all pixels at once, or means over sliding windows."""
    if how.way == "whole" and model.fixed_size and tuple(images.shape[2:]) != model.img_size:
        raise UserError(
            f"the model takes images of {model.img_size[0]} x {model.img_size[1]} only, got "
            f"{images.shape[2]} x {images.shape[3]}; omit way=whole, or give way=sliding"
        )
    if how.way != "sliding" and not (how.way == "auto" and model.fixed_size):
        with _streaming(model, images, how.chunk_size):
            return model(images).float()
    window = both_sides(how.window) if how.window else model.img_size
    if model.fixed_size and window != model.img_size:
        raise UserError(
            f"the model takes windows of {model.img_size[0]} x {model.img_size[1]} only, got {window}; leave window out"
        )
    stride = both_sides(how.stride) if how.stride else (max(1, 2 * window[0] // 3), max(1, 2 * window[1] // 3))
    if stride[0] > window[0] or stride[1] > window[1]:
        raise UserError(f"a stride of {stride} leaves gaps between windows of {window}; give at most the window")
    height, width = images.shape[2:]
    grown = F.pad(images, (0, max(0, window[1] - width), 0, max(0, window[0] - height)))
    rows, columns = (window_starts(grown.shape[2 + i], window[i], stride[i]) for i in (0, 1))
    total = images.new_zeros(len(images), model.num_classes, *grown.shape[2:], dtype=torch.float32)
    count = images.new_zeros(grown.shape[2:], dtype=torch.float32)
    for top, left in product(rows, columns):
        place = (..., slice(top, top + window[0]), slice(left, left + window[1]))
        total[place] += all_rows(model, model(grown[place]).float())
        count[place] += 1
    return own_rows(model, total.div_(count)[..., :height, :width], 2)


@contextmanager
def _streaming(model: Segmenter, images: Tensor, chunk_size: int) -> Iterator[None]:
    """Run external attention in chunks within the block, if the map is larger than a chunk."""
    block, pixels = model.context, images.shape[2] * images.shape[3]
    if not isinstance(block, ExternalAttention2d) or not (
        0 < chunk_size < pixels // model.feature_info[-1]["reduction"] ** 2
    ):
        yield
        return
    before = block.memory.options
    block.memory.options = {**before, "chunk_size": chunk_size}
    try:
        yield
    finally:
        block.memory.options = before


def pixel_entropy(logits: Tensor, classes: Tensor, ignore: int) -> Tensor:
    """Cross-entropy over this rank's pixels that are not ignored; 0 if there are none.

    Shape: logits (B, C, H, W), classes (B, H, W) to ().
    """
    count = (classes != ignore).sum().float()
    return F.cross_entropy(logits, classes, ignore_index=ignore, reduction="sum") / count.clamp_min(1)


def soft_iou_loss(logits: Tensor, classes: Tensor, ignore: int) -> Tensor:
    """One minus the mean over classes of the soft intersection over union of prediction and truth.

        loss = 1 - mean_c [ sum_n p_nc t_nc / sum_n (p_nc + t_nc - p_nc t_nc) ],   p = softmax(logits)

    with t_nc = 1 if pixel n is of class c. n runs over the pixels of all images of the step that are not ignored, c
    over the classes that occur in them. Rare classes weigh as much as common ones, as in the mean IoU. 0 if every pixel
    is ignored.

    Paper: Rahman and Wang, Optimizing Intersection-Over-Union in Deep Neural Networks for Image Segmentation, 2016, for
    one class.

    Shape: logits (B, C, H, W), classes (B, H, W) to ().
    """
    probabilities, counted = logits.softmax(1), classes != ignore
    labels = classes.where(counted, 0).flatten()
    right = probabilities.gather(1, labels.view_as(classes).unsqueeze(1)).squeeze(1) * counted
    nothing = probabilities.new_zeros(probabilities.shape[1])
    both = nothing.index_add(0, labels, right.flatten())
    answered = torch.einsum("bchw,bhw->c", probabilities, counted.to(probabilities.dtype))
    there = nothing.index_add(0, labels, counted.flatten().to(probabilities.dtype))
    both, answered, there = _of_all(torch.stack([both, answered, there]))
    present = there > 0
    overlap = both[present] / (answered + there - both)[present]
    return (1 - overlap).sum() / present.sum().clamp_min(1)


def _of_all(own: Tensor) -> Tensor:
    """Sum over the ranks, with gradients that are correct after averaging over the ranks."""
    if not dist.is_initialized():
        return own
    total = own.detach().clone()
    dist.all_reduce(total)
    return total + dist.get_world_size() * (own - own.detach())


class SemanticSegmentation(LabelledImageTask):
    """A class per pixel, by cross-entropy over the pixels that are not ignored, and optionally soft IoU.

    The loss is a mean over the pixels of all ranks, whatever number each rank ignores. The released code divides by all
    pixels, including ignored ones.
    """

    monitor: str = "miou"
    options: SegmentationOptions
    set_elsewhere: ClassVar[Mapping[str, str]] = {"num_classes": "--data", "img_size": "--crop"}
    baselines: ClassVar[tuple[str, ...]] = ("majority",)

    @classmethod
    def load_data(cls, config: TrainConfig, like: Description | None = None) -> IndexedData:
        options: SegmentationOptions = config.options
        data = load_scenes(config.data.data, want="classes", seed=config.loop.seed)
        held = validation_size(len(data.train), config.data.validation, config.data.limit)
        data = data.split(validation=held)
        if len(data.classes) > MOST_CLASSES:
            raise UserError(
                f"{config.data.data!r} has {len(data.classes)} classes, and a mask {MOST_CLASSES} colours; merge some"
            )
        if like is not None:
            check_names(config.data.data, data.classes, like["classes"])
            data = replace(data, mean=tuple(like["mean"]), std=tuple(like["std"]))
        else:
            _check_learnable(data, options.crops, config.data.limit)
        crop = both_sides(options.crop) if options.crop else data.crop
        augment = SceneAugment(
            seed=config.loop.seed,
            crop=crop,
            ignore=data.ignore,
            scales=options.train_scales,
            flip=0.0 if options.augment == "none" else 0.5,
            color_jitter=options.color_jitter,
            fill=data.mean,
        )
        size = crop or tuple(PixelSamples(data, data.train).read(torch.tensor([0]), 0)["image"].shape[2:])
        return IndexedData(
            PixelSamples(data, repeated(data.train, options.crops), augment),
            PixelSamples(data, data.test),
            None if data.validation is None else PixelSamples(data, data.validation),
            config=config,
            test_batch=options.test_batch,
            description={
                **{name: getattr(data, name) for name in ("classes", "ignore", "palette", "mean", "std", "source")},
                "channels": 3,
                "img_size": size,
                "skipped": [asdict(one) for one in data.skipped],
                **described_architecture(config, like),
            },
        )

    @classmethod
    def build_model(cls, config: TrainConfig, data: Description) -> nn.Module:
        theirs = model_from_elsewhere(config, data, "segmenter", "AutoModelForSemanticSegmentation")
        if theirs is not None:
            return theirs
        given: Values = {"num_classes": len(data["classes"]), "img_size": tuple(data["img_size"])}
        return create_model(config.model.model, **given, **config.model.model_kwargs)

    @classmethod
    def view(cls, model: nn.Module, file: Path, data: Description) -> View:
        """The whole image; a centre crop if the model takes only one size, or attends between positions (N x N)."""
        context: Any = getattr(model, "context", model)
        mixers = [part for part in context.modules() if isinstance(part, Mixer)]
        if getattr(model, "fixed_size", False) or any(mixer.capabilities.map == "tokens" for mixer in mixers):
            pixels = read_image(file, data["channels"], tuple(data["img_size"]))
        else:
            pixels = read_stored(file)
        return image_view(pixels, data["mean"], data["std"])

    @property
    def segmenter(self) -> Segmenter:
        """The model, or a third-party model with the interface of our segmenters."""
        if hasattr(self.model, "fixed_size"):
            return cast(Segmenter, self.model)
        return cast(Segmenter, ForeignSegmenter(self.model, len(self.data["classes"]), tuple(self.data["img_size"])))

    def answer_loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross-entropy over the step's pixels that are not ignored, plus `iou_loss` times the soft IoU loss."""
        logits, ignore = self.segmenter(batch["image"]).float(), self.data["ignore"]
        classes = own_rows(self.segmenter, batch["classes"], 1)
        entropy = self.part_weight * pixel_entropy(logits, classes, ignore)
        if not self.options.iou_loss:
            return entropy, {}
        overlap = soft_iou_loss(logits, classes, ignore)
        parts = {"cross_entropy": entropy.detach(), "iou_loss": overlap.detach()}
        return entropy + self.options.iou_loss * overlap, parts

    @property
    def image_weight(self) -> float:
        """`count` is of pixels."""
        return 1.0

    def count(self, batch: Batch) -> int:
        """Number of pixels that are not ignored, in this rank's rows."""
        return int((own_rows(self.segmenter, batch["classes"], 1) != self.data["ignore"]).sum())

    def evaluate(self, batch: Batch) -> Rows:
        images, model, parts = batch["image"], self.segmenter, []
        for tile in tiles(model, tuple(images.shape[2:]), self.options, shared=self.own_samples != slice(None)):
            logits = pixel_logits(model, images[..., *tile.seen], self.options)
            classes = own_rows(model, batch["classes"][..., *tile.kept], 1)
            parts.append(self.judged(logits[..., *tile.inner], classes, batch["index"]))
        return joined(parts)

    def judged(self, logits: Tensor, targets: Tensor, index: Tensor) -> Rows:
        """Pixel counts, and sums of cross-entropies, of images or parts of images."""
        ignore = int(self.data["ignore"])
        # Image by image: the loss takes three times as long without a reduction.
        each = zip(logits.float().split(1), targets.split(1))
        loss = [F.cross_entropy(*one, ignore_index=ignore, reduction="sum") for one in each]
        counts = class_counts(logits.argmax(1), targets, len(self.data["classes"]), ignore)
        return {"index": index, "counts": counts.int(), "loss": torch.stack(loss)}

    @classmethod
    def make_metrics(cls, config: TrainConfig, data: Description) -> dict[str, Metric]:
        """Pixel accuracy, mean IoU, IoU of each class, loss. The IoU of an absent class is nan, null in JSON."""

        def losses(rows: Rows) -> Tensor:
            return torch.stack([rows["loss"].double(), rows["counts"][:, 1].sum(1).double()], 1)

        return {
            "accuracy": Metric.of_sums(accuracy_of, itemgetter("counts")),
            "miou": Metric.of_sums(lambda sums: iou_of(sums).nanmean(-1), itemgetter("counts")),
            "class_iou": Metric.of_sums(iou_of, itemgetter("counts"), names=data["classes"]),
            "loss": Metric.of_sums(quotient, losses, higher_is_better=False),
        }

    def on_validation_epoch_end(self) -> None:
        """As for every task; `UserError` if all pixels are ignored."""
        super().on_validation_epoch_end()
        if isnan(self.results["miou"]):
            raise UserError(
                f"every pixel of the test images of {self.config.data.data!r} has the ignored class "
                f"{self.data['ignore']}, so nothing can be measured; give masks with classes"
            )

    def parameter_groups(self) -> nn.Module | list[Values]:
        """As for every task, optionally with a learning rate for biases."""
        if self.options.bias_lr == 1.0:
            return super().parameter_groups()
        optim, named = self.config.optim, [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        biases = [p for name, p in named if name.endswith("bias") and p.dim() == 1]
        model: Any = self.model
        kept = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
        plain = [p for name, p in named if not name.endswith("bias") and (p.dim() <= 1 or name in kept)]
        taken = {*biases, *plain}
        return [
            {"params": [p for _, p in named if p not in taken], "weight_decay": optim.weight_decay},
            {"params": plain, "weight_decay": 0.0},
            {"params": biases, "weight_decay": 0.0, "lr": self.options.bias_lr * optim.lr},
        ]

    def plain_samples(self, data: IndexedData, part: Literal["train", "test"]) -> Iterator[PlainSamples]:
        for batch in data.batches_of(part, 8):
            if (counts := batch["index"] >= 0).any():
                yield PlainSamples(None, batch["classes"][counts])

    def plain_answers(self, data: IndexedData) -> dict[str, Rows]:
        """A random forest on a pixel's colours, and their means and deviations in windows around it; of some pixels."""
        from sklearn.ensemble import RandomForestClassifier

        generator, ignore = torch.Generator().manual_seed(0), self.data["ignore"]

        def drawn(batch: Batch, number: int) -> tuple[Tensor, Tensor]:
            """Features (n, 15) and classes (n,) of random pixels of each image, without the ignored ones."""
            parts = [images := batch["image"]]
            for side in (9, 33):
                mean, square = (F.avg_pool2d(x, side, 1, side // 2, False, False) for x in (images, images.square()))
                parts += [mean, (square - mean.square()).clamp_min(0).sqrt()]
            count = batch["classes"][0].numel()
            index = torch.randint(count, (number,), generator=generator) if number < count else torch.arange(count)
            classes = batch["classes"].flatten(1)[:, index]
            return torch.cat(parts, 1).flatten(2)[..., index].mT[known := classes != ignore], classes[known]

        # In the size and colours of the test images.
        data = self.load_data(self.config.replace(train_scales=(1.0,), color_jitter=0.0), like=self.data)
        learned, crops = list[tuple[Tensor, Tensor]](), min(data.num_train, FOREST_CROPS)
        for batch in islice(data.batches_of("train", 8), -(-crops // 8)):
            learned.append(drawn(batch, FOREST_PIXELS // crops))
        features, classes = map(torch.cat, zip(*learned))
        forest = RandomForestClassifier(100, min_samples_leaf=5, random_state=0).fit(features, classes)
        rows = list[Rows]()
        for batch in data.test_batches(batch_size=1):
            features, classes = drawn(batch, max(1000, 3 * FOREST_PIXELS // data.num_test))
            if batch["index"] >= 0 and len(classes):
                found = torch.zeros(len(classes), len(self.data["classes"]))
                found[:, forest.classes_] = torch.from_numpy(forest.predict_proba(features)).float()
                rows.append(
                    self.judged(found.clamp_min(1e-6).log().mT[None, :, None], classes[None, None], batch["index"])
                )
        return {"random forest": joined(rows)} if rows else {}

    def show(self, batch: Batch) -> list[Shown]:
        levels = batch["image"].cpu() * channel_columns(self.data["std"]) + channel_columns(self.data["mean"])
        found = []
        for pixels, classes in zip(levels.mul(255).round().clamp(0, 255).byte(), batch["classes"].cpu()):
            image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
            masks = (classes, self.answer(pixels))
            truth, prediction = (veiled(image, mask, self.data["palette"]) for mask in masks)
            there = torch.cat([mask.unique() for mask in masks]).tolist()
            found.append(Shown(image, truth, prediction, self.colors(there)))
        return found

    def colors(self, classes: Container[int]) -> dict[str, str]:
        named = enumerate(zip(self.data["classes"], self.data["palette"]))
        return {name: "#{:02x}{:02x}{:02x}".format(*colour) for i, (name, colour) in named if i in classes}

    @torch.no_grad()
    def answer(self, image: Tensor) -> Tensor:
        """Class of each pixel, uint8 (H, W), of an image uint8 (3, H, W) of any size."""
        size = (image.shape[1], image.shape[2])
        classes = torch.empty(size, dtype=torch.uint8)
        mean, std = channel_columns(self.data["mean"]), channel_columns(self.data["std"])
        for tile in tiles(self.segmenter, size, self.options, shared=self.own_samples != slice(None)):
            seen = image[:, *tile.seen].float().div_(255).sub_(mean).div_(std)[None].to(next(self.model.parameters()))
            logits = pixel_logits(self.segmenter, seen, self.options)
            found = all_rows(self.segmenter, logits.argmax(1, keepdim=True).byte())
            classes[tile.kept] = found[0, 0][tile.inner].cpu()
        return classes

    def predict(self, inputs: Sequence[str | Path]) -> list[Values]:
        """Size, and share of each class, of each image; images may have any size."""
        return [self._answer(file)[2] for file in inputs]

    def predict_into(self, inputs: Sequence[str | Path], out: Path) -> list[Values]:
        """The same; also writes NAME-mask.png, NAME-overlay.png and NAME.json with shares, colours and run lengths."""
        check_stems(inputs)
        names, palette = self.data["classes"], self.data["palette"]
        answers = []
        for file in inputs:
            picture, classes, answer = self._answer(file)
            mask = Image.fromarray(classes.numpy(), mode="P")
            mask.putpalette([level for colour in palette for level in colour])
            files = [out / f"{Path(file).stem}{end}" for end in ("-mask.png", "-overlay.png", ".json")]
            with replacing(files[0]) as partial:
                mask.save(partial)
            with replacing(files[1]) as partial:
                Image.blend(to_pil_image(picture), mask.convert("RGB"), VEIL).save(partial)
            del picture  # Free it before the next one is read.
            colors = self.colors([i for i, name in enumerate(names) if name in answer["shares"]])
            write_json(files[2], {**answer, "colors": colors, "masks": run_lengths(classes, names)})
            answers.append({**answer, "written": [str(file) for file in files]})
        return answers

    def _answer(self, file: str | Path) -> tuple[Tensor, Tensor, Values]:
        picture, names = read_stored(file), self.data["classes"]
        classes = self.answer(picture)
        counts = sorted(zip(pixel_counts(classes, len(names)), names, strict=True), reverse=True)
        shares = {name: round(count / classes.numel(), 6) for count, name in counts if count}
        return picture, classes, {"file": str(file), "size": list(classes.shape), "shares": shares}


def veiled(image: Image.Image, classes: Tensor, palette: Sequence[Sequence[int]]) -> Image.Image:
    """The image under the colours of its classes; pixels of a class without a colour are unchanged."""
    table = torch.tensor(palette, dtype=torch.uint8)
    known = (classes >= 0) & (classes < len(table))
    colours = Image.fromarray(table[torch.where(known, classes.long(), 0)].numpy())
    blended = Image.blend(image.convert("RGB"), colours, VEIL)
    return Image.composite(blended, image.convert("RGB"), Image.fromarray(known.byte().mul(255).numpy()))


def pixel_counts(classes: Tensor, count: int) -> list[int]:
    return classes.flatten().bincount(minlength=count).tolist()


def run_lengths(classes: Tensor, names: Sequence[str]) -> list[Values]:
    """One mask for each class that occurs, in COCO's compressed run lengths; empty without pycocotools."""
    if find_spec("pycocotools") is None:
        return []
    # Column by column, like run lengths, and one mask at a time: each is as large as the image.
    mask, found = torch.empty(classes.shape[::-1], dtype=torch.bool).T, []
    for i, count in enumerate(pixel_counts(classes, len(names))):
        if count:
            torch.eq(classes, i, out=mask)
            found.append({"category_id": i, "category": names[i], "area": count, "segmentation": encode_mask(mask)})
    return found


def _check_learnable(data: SceneData, crops: int, limit: int | None) -> None:
    """Raise `UserError` if no training pixel counts, and warn if all have one class; stops at the second class."""
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
