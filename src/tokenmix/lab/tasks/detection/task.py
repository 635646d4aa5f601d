"""Detection and instance segmentation; large images are searched in windows, whose objects are merged."""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch
from PIL import Image, ImageColor, ImageDraw, ImageFont
from torch import Tensor, nn
from torchvision.ops import batched_nms, box_convert
from torchvision.transforms.v2.functional import to_pil_image

from tokenmix.errors import UserError
from tokenmix.files import Values, replace_file, replacing
from tokenmix.lab.data.images.decode import read_stored
from tokenmix.lab.data.images.image_set import warn_of_shrinking
from tokenmix.lab.data.indexed import subset, validation_size
from tokenmix.lab.data.scenes import ObjectSamples, SceneAugment, load_scenes, repeated
from tokenmix.lab.data.scenes.coco import encode_mask
from tokenmix.lab.tasks.detection import ObjectOptions
from tokenmix.lab.tasks.detection.metrics import matched_rows, object_metrics
from tokenmix.lab.tasks.images import (
    LabelledImageTask,
    channel_columns,
    check_stems,
    shown_image,
    window_starts,
)
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.folder import RunFolder
from tokenmix.lab.train.metrics import Metric, Rows, joined
from tokenmix.lab.train.programs import Batch, Description, Shown, View
from tokenmix.lab.train.task import IndexedData, check_names
from tokenmix.models.detection.detector import IMAGENET, Detector
from tokenmix.models.detection.other import other_detector
from tokenmix.models.detection.pictures import PictureTransform, PlacedMasks, with_dense_masks
from tokenmix.models.registry import create_model
from tokenmix.registry import MODELS, Arguments, is_foreign, load_object

Found = Values
# Distance in pixels from a window's edge up to which a box counts as cut by the edge.
EDGE = 2.0
# Pieces compared with whole boxes at a time.
PIECES = 256


def find_in_windows(
    detect: Callable[[Sequence[Tensor]], list[Found]],
    image: Tensor,
    *,
    window: int,
    overlap: float,
    nms: float,
    count: int,
    at_once: int = 4,
) -> Found:
    """Objects of an image, found in square windows that share `overlap` of their side.

    A box cut by a window's edge is kept if less than half of the box is inside a box of its class: then no other window
    saw more of the object, so the overlap should exceed the largest object. NMS per class drops the one with the lower
    score of two boxes of a larger IoU than `nms`, and at most `count` objects remain. Masks are `PlacedMasks`.
    """
    height, width = image.shape[1:]
    step = max(round(window * (1 - overlap)), 1)
    rows, columns = window_starts(height, window, step), window_starts(width, window, step)
    parts, crops, seen = list[tuple[Tensor, ...]](), list[tuple[Tensor, int, int]](), list[Found]()
    for top in rows:
        seen = []
        for i in range(0, len(columns), at_once):
            seen += detect([image[:, top : top + window, left : left + window] for left in columns[i : i + at_once]])
        # Concatenate per row: thousands of small tensors between the detector's would keep its memory allocated.
        boxes, scores, labels = (torch.cat([one[name] for one in seen]) for name in ("boxes", "scores", "labels"))
        lefts = torch.tensor(columns).repeat_interleave(torch.tensor([len(one["boxes"]) for one in seen]))
        starts = torch.stack([lefts, torch.full_like(lefts, top)], 1).to(boxes)
        parts.append((starts, boxes + starts.repeat(1, 2), scores, labels))
        found = [(*crop, left) for one, left in zip(seen, columns) if "masks" in one for crop in one["masks"].crops]
        crops += [(mask, top + y, left + x) for mask, y, x, left in found]
    starts, boxes, scores, labels = map(torch.cat, zip(*parts))
    # Boxes that end at a window's edge inside the image.
    ends = starts + window
    at_start = (boxes[:, :2] < starts + EDGE) & (starts > 0)
    at_end = (boxes[:, 2:] > ends - EDGE) & (ends < boxes.new_tensor([width, height]))
    cut = (at_start | at_end).any(1)
    whole, pieces = (~cut).nonzero()[:, 0], cut.nonzero()[:, 0]
    whole = whole[batched_nms(boxes[whole], scores[whole], labels[whole], nms)]
    pieces = torch.cat([_uncovered(some, whole, boxes, labels) for some in pieces.split(PIECES)])
    keep = torch.cat([whole, pieces[batched_nms(boxes[pieces], scores[pieces], labels[pieces], nms)]])
    keep = keep[scores[keep].argsort(descending=True, stable=True)][:count]
    merged: Found = {"boxes": boxes[keep], "scores": scores[keep], "labels": labels[keep]}
    if "masks" in seen[0]:
        merged["masks"] = PlacedMasks([crops[place] for place in keep.tolist()], (height, width))
    return merged


def _uncovered(pieces: Tensor, whole: Tensor, boxes: Tensor, labels: Tensor) -> Tensor:
    """Pieces with at most half of their area in a whole box of their class; compares near boxes only."""
    if not len(pieces):
        return pieces
    low, high = boxes[pieces, :2].amin(0), boxes[pieces, 2:].amax(0)
    whole = whole[((boxes[whole, 2:] > low) & (boxes[whole, :2] < high)).all(1)]
    ours, theirs = boxes[pieces], boxes[whole]
    starts = torch.maximum(ours[:, None, :2], theirs[None, :, :2])
    common = (torch.minimum(ours[:, None, 2:], theirs[None, :, 2:]) - starts).clamp(min=0).prod(2)
    covered = common / (ours[:, 2:] - ours[:, :2]).clamp(min=0).prod(1, keepdim=True).clamp(min=1e-6)
    return pieces[((covered <= 0.5) | (labels[pieces, None] != labels[None, whole])).all(1)]


# Bright colours, visible on photographs with much green, blue and grey.
COLORS = ("#ffe11a", "#1ae5ff", "#ff4dff", "#ff8c1a", "#66ff33", "#ff3b3b", "#4d79ff", "#b366ff", "#99ffcc", "#ffb3c6")
VEIL = 0.45
BOXES, MOST = 10, 1_000
"""The simplest method: groups of boxes per class, and its number of training images."""


class ObjectTask(LabelledImageTask):
    """A torchvision detector, trained on the sum of its losses; crowd regions neither train nor count, as in COCO."""

    monitor: str = "map"
    options: ObjectOptions
    want: ClassVar[Literal["boxes", "masks"]]
    set_elsewhere: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("num_classes", "image_mean", "image_std"), "--data"),
        **{name: f"--{name.replace('_', '-')}" for name in ("img_size", "min_size", "max_size")},
        **{name: f"--{name}" for name in ("score", "nms", "detections")},
        **dict.fromkeys(("kind", "heads"), "another --model"),
    }

    @classmethod
    def load_data(cls, config: TrainConfig, like: Description | None = None) -> IndexedData:
        data = load_scenes(config.data.data, want=cls.want, seed=config.loop.seed)
        held = validation_size(len(data.train), config.data.validation, config.data.limit)
        data = data.split(validation=held)
        if like is not None:
            check_names(config.data.data, data.classes, like["classes"])
        options: ObjectOptions = config.options
        scenes = repeated(data.train, options.crops)
        if like is None:
            _check_learnable(ObjectSamples(scenes), config, cls.want)
        crop = data.crop if options.crop is None else (options.crop, options.crop)
        augment = SceneAugment(
            seed=config.loop.seed,
            crop=crop if options.crop != 0 else None,
            scales=options.scales,
            flip=options.flip,
            color_jitter=options.color_jitter,
            fill=data.mean,
        )
        train = ObjectSamples(scenes, None if options.augment == "none" else augment)
        held = None if data.validation is None else ObjectSamples(data.validation)
        theirs = config.model.pretrained or config.model.model_kwargs.get("pretrained_backbone")
        mean, std = IMAGENET if theirs else (data.mean, data.std)
        if options.min_size:
            side = options.min_size[-1]
        elif options.img_size is not None:
            side = options.img_size
        elif is_foreign(config.model.model):
            side = 800  # torchvision's usual side
        else:
            entry = MODELS[config.model.model]
            side = entry.arguments.get("img_size", _builder_arguments(config.model.model)["img_size"].default)
        if like is None:
            most, option = options.window, "--min-size" if options.min_size else "--img-size"
            warn_of_shrinking(
                lambda index: data.train.scene(index).image[0, :most, :most].shape,  # None is the whole image
                len(data.train),
                (side, side),
                option,
            )
        own = {"mean": list(mean), "std": list(std), "img_size": [side, side]}
        described = {
            "classes": list(data.classes),
            "channels": 3,
            **(own if like is None else {key: like[key] for key in own}),
            "category_ids": data.notes.get("category_ids"),
            "source": data.source,
            "skipped": [f"{one.path}: {one.reason}" for one in data.skipped],
        }
        # One at a time: normalisation and attention see the padding of a batch.
        tested = ObjectSamples(data.test)
        return IndexedData(train, tested, held, config=config, description=described, test_batch=1)

    @classmethod
    def build_model(cls, config: TrainConfig, data: Description) -> nn.Module:
        options = config.options
        given: Values = {
            "num_classes": len(data["classes"]),
            "score": options.score,
            "nms": options.nms,
            "detections": options.detections,
        }
        if not _fixed_size(config.model.model):
            sides = {"min_size": options.min_size, "max_size": options.max_size}
            if options.img_size is not None:
                sides = {name: value or options.img_size for name, value in sides.items()}
            given |= {name: value for name, value in sides.items() if value is not None}
        if is_foreign(config.model.model):
            return other_detector(config.model.model, masks=cls.want == "masks", **given, **config.model.model_kwargs)
        given |= {"image_mean": data["mean"], "image_std": data["std"], "img_size": tuple(data["img_size"])}
        return create_model(config.model.model, **given, **config.model.model_kwargs)

    @classmethod
    def with_absolute_paths(cls, config: TrainConfig) -> TrainConfig:
        """Also with the image size of the --init-from run, unless a size is given."""
        config = super().with_absolute_paths(config)
        run = None if config.loop.init_from is None else RunFolder.of_weights(config.loop.init_from)
        sizes = ("img_size", "min_size", "max_size")
        if run is None or any(getattr(config.options, name) for name in sizes):
            return config
        return config.replace(**{name: getattr(run.saved_config.options, name, None) for name in sizes})

    @classmethod
    def check(cls, config: TrainConfig, batch_size: int) -> None:
        super().check(config, batch_size)
        if config.loop.precision == "bf16":
            raise UserError("boxes need float32: give --precision bf16-mixed, in which only the backbone is bfloat16")
        options: ObjectOptions = config.options
        if (options.min_size or options.max_size) and _fixed_size(config.model.model):
            raise UserError(
                f"{config.model.model} takes square images of one size, for which its learned matrices are built: give "
                "--img-size instead of min_size and max_size"
            )

    @classmethod
    def view(cls, model: nn.Module, file: Path, data: Description) -> View:
        """The whole image at the detector's scale."""
        detector: Any = model
        picture = read_stored(file, upright=True)
        # Only our transform takes 8 bits.
        own = isinstance(detector.net.transform, PictureTransform)
        seen, _ = detector.net.transform([picture if own else picture.float() / 255])
        levels = seen.tensors[0] * channel_columns(detector.std) + channel_columns(detector.mean)
        return View(shown_image(levels), seen.tensors)

    def swap_example(self) -> tuple[list[Tensor]]:
        return ([torch.rand(3, *self.data["img_size"])],)

    def answer_loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        targets = [_learned(target) for target in batch["targets"]]
        losses: dict[str, Tensor] = self.model(batch["images"], targets)
        total = self.part_weight * torch.stack(list(losses.values())).sum()
        return total, {name: value.detach() for name, value in losses.items()}

    def count(self, batch: Batch) -> int:
        """Number of images: torchvision's losses are means over images, or over equally many anchors of each."""
        return len(batch["images"])

    def evaluate(self, batch: Batch) -> Rows:
        each = zip(self.find(batch["images"]), batch["targets"], batch["index"].tolist(), strict=True)
        return joined([matched_rows(with_dense_masks(found), there, index, self.want) for found, there, index in each])

    def plain_answers(self, data: IndexedData) -> dict[str, Rows]:
        """The same boxes in every image: means of groups of training boxes per class, with the groups' frequencies."""
        from sklearn.cluster import KMeans

        # Whole images, as in the test.
        plain = self.config.replace(augment="none", crop=None, crops=1, scales=(1.0,))
        data = self.load_data(plain, like=self.data)
        boxes, labels, seen = list[Tensor](), list[Tensor](), 0
        for batch in data.batches_of("train", 1):
            target = _learned(batch["targets"][0])
            boxes.append(target["boxes"] / _sides(batch["images"][0]))
            labels.append(target["labels"])
            seen += 1
            if seen == MOST:
                break
        place, label, parts = torch.cat(boxes), torch.cat(labels), list[Found]()
        for one in label.unique():
            some = place[label == one]
            groups = KMeans(min(BOXES, len(some.unique(dim=0))), random_state=0, n_init=1).fit(some.numpy())
            counts = torch.from_numpy(groups.labels_).bincount()
            centres = torch.from_numpy(groups.cluster_centers_).float()
            parts.append({"boxes": centres, "labels": one.expand(len(counts)), "scores": counts / seen})
        means = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        rows = list[Rows]()
        for batch in data.test_batches(batch_size=1):
            (image,), (target,) = batch["images"], batch["targets"]
            found = {**means, "boxes": means["boxes"] * _sides(image)}
            if self.want == "masks":
                found["masks"] = _filled(found["boxes"], image.shape[1:])
            rows.append(matched_rows(found, target, int(batch["index"]), self.want))
        return {"mean boxes": joined(rows)}

    @classmethod
    def make_metrics(cls, config: TrainConfig, data: Description) -> dict[str, Metric]:
        return object_metrics(cls.want, data["classes"])

    def show(self, batch: Batch) -> list[Shown]:
        images = [Image.fromarray(image.mul(255).byte().permute(1, 2, 0).cpu().numpy()) for image in batch["images"]]
        targets: list[Values] = [
            {"scores": torch.ones(len(target["labels"])), **_learned(target)} for target in batch["targets"]
        ]
        for target, image in zip(targets, images):
            if "masks" in target:
                whole = [(mask.bool().cpu(), 0, 0) for mask in target["masks"]]
                target["masks"] = PlacedMasks(whole, (image.height, image.width))
        classes, samples = self.data["classes"], []
        for image, target, found in zip(images, targets, self.find(batch["images"])):
            both = (target, self._shown(found))
            truth, prediction = (draw_objects(image.copy(), found=one, classes=classes) for one in both)
            labels = sorted({label for one in both for label in one["labels"].tolist()})
            colors = {classes[label]: COLORS[label % len(COLORS)] for label in labels}
            samples.append(Shown(None, truth, prediction, colors))
        return samples

    def example(self) -> dict[str, Tensor]:
        """Two images of noise, in RetinaNet's image size."""
        if self.model.kind != "retinanet":
            raise UserError(
                f"{self.config.model.model} cannot be exported: the number of {self.want} in its second stage depends "
                "on the image; train a retinanet_* model for detection, whose boxes and scores are exported before NMS"
            )
        return {"images": torch.rand(2, 3, *self.data["img_size"])}

    def inference_module(self) -> nn.Module:
        """Module from images (B, 3, H, W) to (B, A, 4 + classes): boxes and scores of every anchor, before NMS."""
        return AllAnchors(self.model)

    def run_example(self) -> None:
        self.model.eval()
        cast(Detector, self.model).find([torch.rand(3, *self.data["img_size"])])

    @torch.no_grad()
    def find(self, images: Sequence[Tensor]) -> list[Found]:
        """Detections on the CPU for images (3, H, W), in 0..1 or uint8; in windows if the options say so."""
        options = self.options

        def detect(images: Sequence[Tensor]) -> list[Found]:
            found = cast(Detector, self.model).find(images)
            return [{name: value.cpu() for name, value in one.items()} for one in found]

        if options.window is None or all(max(image.shape[1:]) <= options.window for image in images):
            return detect(images)
        how = {"window": options.window, "overlap": options.overlap, "nms": options.nms, "count": options.detections}
        return [
            find_in_windows(detect, image, **how) if max(image.shape[1:]) > options.window else detect([image])[0]
            for image in images
        ]

    def predict(self, inputs: Sequence[str | Path]) -> list[Values]:
        """Label, score and box (left, top, width, height in pixels) of each object with at least the score `shown`."""
        rows = list[Values]()
        for file in inputs:
            (found,) = self.find([read_stored(file, upright=True)])
            rows += object_rows(str(file), self._shown(found), self.data["classes"])
        return rows

    def predict_into(self, inputs: Sequence[str | Path], out: Path) -> list[Values]:
        """The same; also writes NAME-overlay.png, and results.json in COCO's format with all scores from `score` on."""
        check_stems(inputs)
        rows, results = [], []
        classes = self.data["classes"]
        ids = self.data.get("category_ids") or [label + 1 for label in range(len(classes))]
        for number, file in zip(image_numbers(inputs), map(Path, inputs), strict=True):
            picture = read_stored(file, upright=True)
            (found,) = self.find([picture])
            shown = self._shown(found)
            rows += object_rows(str(file), shown, classes)
            results += coco_results(found, image_id=number, file=file.name, category_ids=ids)
            with replacing(out / f"{file.stem}-overlay.png") as partial:
                draw_objects(to_pil_image(picture), found=shown, classes=classes).save(partial)
            del picture  # Free it before the next one is read.
        replace_file(out / "results.json", (json.dumps(results) + "\n").encode())
        return rows

    def _shown(self, found: Found) -> Found:
        keep = found["scores"] >= self.options.shown
        return {name: value[keep] for name, value in found.items()}


def _learnable(target: Mapping[str, Tensor]) -> Tensor:
    """Which objects of an image train: no crowd regions, and with masks those that have a pixel."""
    keep = ~target["iscrowd"].bool()
    return keep & target["masks"].flatten(1).any(1) if "masks" in target else keep


def _check_learnable(whole: ObjectSamples, config: TrainConfig, want: Literal["boxes", "masks"]) -> None:
    """Raise `UserError` if no training image shows an object to learn; the search ends at the first that does."""
    samples = subset(whole, config.data.limit)
    targets = (samples.read(torch.tensor([place]), 0)["targets"][0] for place in range(len(samples)))
    if not any(_learnable(target).any() for target in targets):
        taken = "" if config.data.limit is None else f" that --limit {config.data.limit} takes"
        empty = "a mask that is not empty" if want == "masks" else "a box of some area"
        raise UserError(
            f"no training image of {config.data.data!r}{taken} has an object with {empty}, so only background could be "
            "learned; give annotations of objects"
        )


def _sides(image: Tensor) -> Tensor:
    height, width = image.shape[1:]
    return torch.tensor([width, height, width, height], dtype=torch.float32)


def _filled(boxes: Tensor, size: Sequence[int]) -> Tensor:
    rows, columns = (torch.arange(length) + 0.5 for length in size)
    left, top, right, bottom = boxes.unbind(1)
    inside = [
        (low[:, None] <= at) & (at < high[:, None]) for at, low, high in ((rows, top, bottom), (columns, left, right))
    ]
    return inside[0][:, :, None] & inside[1][:, None]


def _learned(target: Mapping[str, Tensor]) -> dict[str, Tensor]:
    keep = _learnable(target)
    return {name: target[name][keep] for name in ("boxes", "labels", "masks") if name in target}


def _fixed_size(model: str) -> bool:
    """Whether the model is ours and only takes squares of one size."""
    return not is_foreign(model) and "min_size" not in _builder_arguments(model)


def _builder_arguments(model: str) -> Mapping[str, inspect.Parameter]:
    """Parameters of the function that builds one of our models."""
    return inspect.signature(load_object(MODELS[model].build)).parameters


class Detection(ObjectTask):
    """Boxes by RetinaNet or Faster R-CNN; COCO's average precision of boxes."""

    want: ClassVar[Literal["boxes", "masks"]] = "boxes"


class InstanceSegmentation(ObjectTask):
    """Masks by Mask R-CNN; COCO's average precision of masks, and with prefix `box_` of their boxes."""

    want: ClassVar[Literal["boxes", "masks"]] = "masks"


class AllAnchors(nn.Module):
    """The image-independent part of a RetinaNet: boxes (left, top, right, bottom) and scores of all anchors.

        out = [decode(regression, anchors), sigmoid(logits)]

    Images have one size and values in 0..1; they are normalised, not resized.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, detector: Any) -> None:
        super().__init__()
        self.net: Any = detector.net
        self.register_buffer("mean", channel_columns(detector.mean))
        self.register_buffer("std", channel_columns(detector.std))

    def forward(self, images: Tensor) -> Tensor:
        maps = list(self.net.backbone((images - self.mean) / self.std).values())
        found = self.net.head(maps)
        grids = [list(x.shape[2:]) for x in maps]
        strides = [[images.shape[2] // grid[0], images.shape[3] // grid[1]] for grid in grids]
        anchors = torch.cat(self.net.anchor_generator.grid_anchors(grids, strides)).to(images)
        shifts = found["bbox_regression"]
        # Not len(shifts), which an export would make a constant.
        boxes = self.net.box_coder.decode_single(shifts.flatten(0, 1), anchors.repeat(shifts.shape[0], 1))
        return torch.cat([boxes.view_as(shifts), found["cls_logits"].sigmoid()], dim=2)


def class_color(label: int) -> tuple[int, ...]:
    """Red, green and blue, 0 to 255, of a class's objects; ten colours repeat."""
    return ImageColor.getrgb(COLORS[label % len(COLORS)])


def image_numbers(files: Sequence[str | Path]) -> list[int]:
    """COCO's image_id of each file, the number at the end of its name; if not all differ, the indices in the list."""
    ends = [re.search(r"(?<![0-9])[0-9]{1,15}$", Path(file).stem) for file in files]
    numbers = [int(end[0]) for end in ends if end]
    return numbers if len(set(numbers)) == len(files) else list(range(len(files)))


def object_rows(file: str, found: Arguments, classes: Sequence[str]) -> list[Values]:
    """One row per object, most confident first; a row without a label for an image without objects."""
    rows = []
    for i, (label, score, box) in enumerate(_objects(found)):
        row = {"file": file, "label": classes[label], "score": round(score, 4), "box": [round(v, 1) for v in box]}
        rows.append(row | ({"pixels": int(found["masks"].crops[i][0].count_nonzero())} if "masks" in found else {}))
    names = ("label", "score", "box", "pixels")[: 4 if "masks" in found else 3]
    return rows or [{"file": file, **dict.fromkeys(names)}]


def coco_results(found: Arguments, *, image_id: int, file: str, category_ids: Sequence[int]) -> list[Values]:
    """Objects of an image in COCO's results format: box as left, top, width, height; masks run-length encoded."""
    entries = []
    for i, (label, score, box) in enumerate(_objects(found)):
        entry: Values = {
            "image_id": image_id,
            "category_id": category_ids[label],
            "bbox": [round(v, 2) for v in box],
            "score": round(score, 5),
            "file_name": file,
        }
        if "masks" in found:
            entry["segmentation"] = encode_mask(found["masks"].whole(i))
        entries.append(entry)
    return entries


def draw_objects(image: Image.Image, *, found: Arguments, classes: Sequence[str]) -> Image.Image:
    """Draw masks, boxes, names and scores on the image; an RGB image is changed in place."""
    image = image if image.mode == "RGB" else image.convert("RGB")
    colors = [class_color(label) for label in found["labels"].tolist()]
    for color, (crop, top, left) in zip(colors, found["masks"].crops if "masks" in found else ()):
        if crop.numel():
            image.paste(color, (left, top), Image.fromarray(crop.numpy().astype("uint8") * round(255 * VEIL)))
    # Dozens of names would hide the objects.
    side = min(image.size)
    named, width = len(colors) <= 20 and side >= 200, 1 if side < 400 else 2
    pen, font = ImageDraw.Draw(image), ImageFont.load_default()
    for color, box, label, score in zip(
        colors, found["boxes"].long().tolist(), found["labels"].tolist(), found["scores"].tolist()
    ):
        pen.rectangle(box, width=width, outline=color)
        if named:
            corner = (box[0] + width + 1, box[1] + width + 1)
            pen.text(corner, f"{classes[label]} {score:.2f}", fill=color, font=font)
    return image


def _objects(found: Mapping[str, Tensor]) -> list[tuple[int, float, list[float]]]:
    boxes = box_convert(found["boxes"].float(), "xyxy", "xywh").tolist()
    return list(zip(found["labels"].tolist(), found["scores"].tolist(), boxes, strict=True))
