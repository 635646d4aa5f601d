"""What detection and instance segmentation share: their data, their detector, its losses, and its predictions."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch
from PIL import Image
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.files import replace_file
from tokenmix.lab.data.indexed import subset
from tokenmix.lab.data.scenes import ObjectSamples, SceneAugment, load_scenes, repeated
from tokenmix.lab.tasks.detection.metrics import matched_rows, object_metrics
from tokenmix.lab.tasks.detection.options import ObjectOptions
from tokenmix.lab.tasks.detection.output import coco_results, draw_objects, image_numbers, object_rows
from tokenmix.lab.tasks.detection.tiling import Found, find_in_windows
from tokenmix.lab.tasks.images import ImageTask, channel_columns, check_stems, drawn_png, shown_image, stored_picture
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.metrics import Metric, Rows
from tokenmix.lab.train.predictions import joined
from tokenmix.lab.train.programs import Shown, View
from tokenmix.lab.train.task import IndexedData, check_names
from tokenmix.models.detection.detector import IMAGENET, Detector
from tokenmix.models.detection.pictures import PlacedMasks, with_dense_masks
from tokenmix.models.registry import create_model
from tokenmix.registry import MODELS, load_object


class ObjectTask(ImageTask):
    """A torchvision detector, trained on the sum of its own losses.

    Crowd regions are not trained on, and detections in them are not counted as wrong, as in COCO.
    """

    monitor: str = "map"
    options: ObjectOptions
    writes: ClassVar[bool] = True
    want: ClassVar[Literal["boxes", "masks"]]
    set_elsewhere: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("num_classes", "image_mean", "image_std"), "--data"),
        **{name: f"--{name.replace('_', '-')}" for name in ("img_size", "min_size", "max_size")},
        **{name: f"--{name}" for name in ("score", "nms", "detections")},
        **dict.fromkeys(("kind", "heads"), "another --model"),
    }

    @classmethod
    def load_data(cls, config: TrainConfig, like: Mapping[str, Any] | None = None) -> IndexedData:
        """Read the scenes of `config.data.data`."""
        data = load_scenes(config.data.data, want=cls.want, seed=config.loop.seed).split(
            validation=config.data.validation
        )
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
        mean, std = IMAGENET if config.model.model_kwargs.get("pretrained_backbone") else (data.mean, data.std)
        entry = MODELS[config.model.model]
        default = inspect.signature(load_object(entry.build)).parameters["img_size"].default
        side = options.img_size or entry.arguments.get("img_size", default)
        own = {"mean": list(mean), "std": list(std), "img_size": [side, side]}
        described = {
            "classes": list(data.classes),
            "channels": 3,
            **(own if like is None else {key: like[key] for key in own}),
            "category_ids": data.notes.get("category_ids"),
            "source": data.source,
            "skipped": [f"{one.path}: {one.reason}" for one in data.skipped],
        }
        return IndexedData(train, ObjectSamples(data.test), held, config=config, description=described)

    @classmethod
    def build_model(cls, config: TrainConfig, data: Mapping[str, Any]) -> nn.Module:
        """The detector of that name for the classes of the data."""
        options = config.options
        given: dict[str, Any] = {
            "num_classes": len(data["classes"]),
            "image_mean": data["mean"],
            "image_std": data["std"],
            "score": options.score,
            "nms": options.nms,
            "detections": options.detections,
            "img_size": tuple(data["img_size"]),
        }
        if not _fixed_size(config.model.model):
            sides = {"min_size": options.min_size, "max_size": options.max_size}
            if options.img_size is not None:
                sides = {name: value or options.img_size for name, value in sides.items()}
            given |= {name: value for name, value in sides.items() if value is not None}
        return create_model(config.model.model, **given, **config.model.model_kwargs)

    @classmethod
    def check(cls, config: TrainConfig, batch_size: int) -> None:
        """Also options that a detector can have."""
        super().check(config, batch_size)
        if config.loop.precision == "bf16":
            raise UserError("boxes need float32: give --precision bf16-mixed, in which only the backbone is bfloat16")
        options: ObjectOptions = config.options
        if _fixed_size(config.model.model) and (options.min_size or options.max_size):
            raise UserError(
                f"{config.model.model} takes square images of one size, for which its learned matrices are built: give "
                "--img-size instead of min_size and max_size"
            )

    @classmethod
    def view(cls, model: nn.Module, file: Path, data: Mapping[str, Any]) -> View:
        """The whole image at the detector's own scale."""
        detector: Any = model
        seen, _ = detector.net.transform([stored_picture(file)])
        levels = seen.tensors[0] * channel_columns(detector.std) + channel_columns(detector.mean)
        return View(shown_image(levels), seen.tensors)

    def swap_example(self) -> tuple[list[Tensor]]:
        """One image of noise."""
        return ([torch.rand(3, *self.data["img_size"])],)

    def loss(self, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of torchvision's losses, and each of them for the log."""
        targets = [_without_crowds(target) for target in batch["targets"]]
        losses: dict[str, Tensor] = self.model(batch["images"], targets)
        total = self.part_weight * torch.stack(list(losses.values())).sum()
        return total, {name: value.detach() for name, value in losses.items()}

    def count(self, batch: Mapping[str, Any]) -> int:
        """Images: torchvision's losses are means over them, or over equally many anchors of each."""
        return len(batch["images"])

    def evaluate(self, batch: Mapping[str, Any]) -> Rows:
        """What is found in each image against what is there."""
        each = zip(self.find(batch["images"]), batch["targets"], batch["index"].tolist(), strict=True)
        return joined([matched_rows(found, there, index, self.want) for found, there, index in each])

    @classmethod
    def make_metrics(cls, config: TrainConfig, data: Mapping[str, Any]) -> dict[str, Metric]:
        """COCO's, of boxes, or of masks and under `box_*` of their boxes."""
        return object_metrics(cls.want, data["classes"])

    def show(self, batch: Mapping[str, Any]) -> list[Shown]:
        """Each image with the objects in it drawn on it, and with those found."""
        images = [Image.fromarray(image.mul(255).byte().permute(1, 2, 0).cpu().numpy()) for image in batch["images"]]
        targets: list[dict[str, Any]] = [
            {"scores": torch.ones(len(target["labels"])), **_without_crowds(target)} for target in batch["targets"]
        ]
        for target, image in zip(targets, images):
            if "masks" in target:
                whole = [(mask.bool().cpu(), 0, 0) for mask in target["masks"]]
                target["masks"] = PlacedMasks(whole, (image.height, image.width))
        found = [{name: value.cpu() for name, value in one.items()} for one in self._find(batch["images"])]
        return [
            Shown(None, *(draw_objects(image.copy(), one, self.data["classes"]) for one in (target, self._shown(here))))
            for image, target, here in zip(images, targets, found)
        ]

    def find(self, images: Sequence[Tensor]) -> list[Found]:
        """Detections in each image (3, H, W) in 0..1, larger ones in windows if the options say so."""
        return [with_dense_masks(found) for found in self._find(images)]

    @torch.no_grad()
    def _find(self, images: Sequence[Tensor]) -> list[Found]:
        detector, options = cast(Detector, self.model), self.options
        large = [options.window is not None and max(image.shape[1:]) > options.window for image in images]
        if not any(large):
            return detector.find(images)
        return [
            find_in_windows(
                detector.find,
                image,
                window=options.window or 0,
                overlap=options.overlap,
                nms=options.nms,
                count=options.detections,
            )
            if cut
            else detector.find([image])[0]
            for image, cut in zip(images, large)
        ]

    def predict(self, inputs: Sequence[str | Path]) -> list[dict[str, Any]]:
        """Label, score and box (left, top, width, height in pixels) of each object, from the score `shown` on."""
        return [row for file in map(Path, inputs) for row in self._rows(file, self._found(stored_picture(file)))]

    def predict_into(self, inputs: Sequence[str | Path], out: Path) -> list[dict[str, Any]]:
        """The same, with NAME-overlay.png, the image with what is shown drawn on it, and results.json in COCO's form,
        which has all from the score `score` on.
        """
        check_stems(inputs)
        rows, results = [], []
        ids = self.data.get("category_ids") or [label + 1 for label in range(len(self.data["classes"]))]
        for number, file in zip(image_numbers(inputs), map(Path, inputs), strict=True):
            found = self._found(picture := stored_picture(file))
            rows += self._rows(file, found)
            results += coco_results(found, image_id=number, file=file.name, category_ids=ids)
            shown = self._shown(found)
            replace_file(out / f"{file.stem}-overlay.png", drawn_png(picture, self._drawing(shown, picture)))
            del picture  # No second one while the next is read.
        replace_file(out / "results.json", (json.dumps(results) + "\n").encode())
        return rows

    def _drawing(self, shown: Found, picture: Tensor) -> Callable[[Image.Image, int], Image.Image]:
        classes, size = self.data["classes"], (picture.shape[1], picture.shape[2])
        return lambda strip, first: draw_objects(strip, shown, classes, first, size)

    def _found(self, picture: Tensor) -> Found:
        self.eval()
        return {name: value.cpu() for name, value in self._find([picture])[0].items()}

    def _shown(self, found: Found) -> Found:
        keep = found["scores"] >= self.options.shown
        return {name: value[keep] for name, value in found.items()}

    def _rows(self, file: Path, found: Found) -> list[dict[str, Any]]:
        return object_rows(str(file), self._shown(found), self.data["classes"])


def _check_learnable(whole: ObjectSamples, config: TrainConfig, want: Literal["boxes", "masks"]) -> None:
    """Raise `UserError` if no training image shows an object to learn; the first that does ends the search."""
    samples = subset(whole, config.data.limit)
    targets = (samples.read(torch.tensor([place]), 0)["targets"][0] for place in range(len(samples)))
    if not any((~target["iscrowd"]).any() for target in targets):
        taken = "" if config.data.limit is None else f" that --limit {config.data.limit} takes"
        empty = "a mask that is not empty" if want == "masks" else "a box of some area"
        raise UserError(
            f"no training image of {config.data.data!r}{taken} has an object with {empty}, so only background could be "
            "learned; give annotations of objects"
        )


def _without_crowds(target: Mapping[str, Tensor]) -> dict[str, Tensor]:
    keep = ~target["iscrowd"].bool()
    return {name: target[name][keep] for name in ("boxes", "labels", "masks") if name in target}


def _fixed_size(model: str) -> bool:
    """Whether it takes only squares of one size."""
    return "min_size" not in inspect.signature(load_object(MODELS[model].build)).parameters


class Detection(ObjectTask):
    """Boxes by RetinaNet or Faster R-CNN; COCO's average precision of boxes."""

    want: ClassVar[Literal["boxes", "masks"]] = "boxes"

    def example(self) -> dict[str, Tensor]:
        """Two images of noise, of the size at which RetinaNet looks."""
        if self.model.kind != "retinanet":
            raise UserError(
                f"{self.config.model.model} cannot be exported: the number of boxes in its second stage depends on "
                "the image; train a retinanet_* model, whose boxes and scores are exported before NMS"
            )
        return {"images": torch.rand(2, 3, *self.data["img_size"])}

    def answering(self) -> nn.Module:
        """Images (B, 3, H, W) of one size to (B, A, 4 + classes): boxes and scores of every anchor, before NMS."""
        return AllAnchors(self.model)


class InstanceSegmentation(ObjectTask):
    """Masks by Mask R-CNN; COCO's average precision of masks, and under `box_*` that of its boxes."""

    want: ClassVar[Literal["boxes", "masks"]] = "masks"

    def example(self) -> dict[str, Any]:
        """Not to be had."""
        raise UserError(
            f"{self.config.model.model} cannot be exported: the number of masks depends on the image; train a "
            "retinanet_* model for detection, whose boxes and scores are exported before NMS"
        )


class AllAnchors(nn.Module):
    """A RetinaNet without what depends on the image: boxes (left, top, right, bottom) and scores of all anchors.

        out = [decode(regression, anchors), sigmoid(logits)]

    Images are of one size and in 0..1; they are not resized, only normalised.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, detector: Any) -> None:
        super().__init__()
        self.net: Any = detector.net
        self.register_buffer("mean", channel_columns(detector.mean))
        self.register_buffer("std", channel_columns(detector.std))

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W) to (B, A, 4 + classes)."""
        maps = list(self.net.backbone((images - self.mean) / self.std).values())
        found = self.net.head(maps)
        grids = [list(x.shape[2:]) for x in maps]
        strides = [[images.shape[2] // grid[0], images.shape[3] // grid[1]] for grid in grids]
        anchors = torch.cat(self.net.anchor_generator.grid_anchors(grids, strides)).to(images)
        shifts = found["bbox_regression"]
        # Not len(shifts), which export would make a constant.
        boxes = self.net.box_coder.decode_single(shifts.flatten(0, 1), anchors.repeat(shifts.shape[0], 1))
        return torch.cat([boxes.view_as(shifts), found["cls_logits"].sigmoid()], dim=2)
