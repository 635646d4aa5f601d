"""What detection and instance segmentation share: their data, their detector, its losses, and its answers."""

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from tokenmix.data.images.image_set import Skipped
from tokenmix.data.indexed import subset
from tokenmix.data.scenes import ObjectAugment, ObjectSamples, RepeatedScenes, SceneData, load_scenes
from tokenmix.errors import UserError
from tokenmix.models.registry import create_model
from tokenmix.registry import MODELS, load_object
from tokenmix.tasks.classification.output import check_stems, stored_images
from tokenmix.tasks.classification.view import channel_columns, shown_image
from tokenmix.tasks.detection.models.detector import IMAGENET
from tokenmix.tasks.detection.output import coco_results, draw_objects, image_numbers, object_rows, save_picture
from tokenmix.tasks.detection.tiling import Found, check_windows, find_in_windows
from tokenmix.tasks.fitting import check_model, check_own
from tokenmix.tasks.summary import summarize_image_model
from tokenmix.train.programs import View
from tokenmix.train.task import TaskModule, TaskRecipe
from tokenmix.train.task_data import IndexedData, check_names

__all__ = ["ObjectSettings", "ObjectTask"]

# What the data, the settings or --img-size say of a detector.
FROM_ELSEWHERE = {
    "num_classes": "--data", "image_mean": "--data", "image_std": "--data", "img_size": "--img-size",
    **dict.fromkeys(("min_size", "max_size", "score", "nms", "detections"), "--task-kwargs"),
    **dict.fromkeys(("kind", "heads"), "another --model"),
}  # fmt: skip


@dataclass(frozen=True)
class ObjectSettings:
    """Settings of detection and instance segmentation.

    Attributes:
        min_size: to what the shorter side of an image is brought; of several, one is drawn for each training image, and
            the last is that of evaluation. The model's own if None; --img-size if that is given.
        max_size: what the longer side may have at most.
        score: least score of an answer. mAP wants it low; pictures and tables are drawn from `shown` on.
        nms: overlap of two boxes of one class of which the worse is dropped.
        detections: most answers of an image, in evaluation too; COCO's is 100.
        crop: training learns from random crops of this side; the data set's own if None, 0 for whole images.
        crops: samples that an epoch takes of each training image, each augmented in its own way; for few large images.
        scales: factors by which training images are scaled before the crop.
        flip: chance that a training image is mirrored.
        window: evaluate and predict larger images in windows of this side, see `find_in_windows`.
        overlap: share of a window that it has in common with the next.
        shown: least score of what `predict` names and draws.
    """

    min_size: tuple[int, ...] | None = None
    max_size: int | None = None
    score: float = 0.05
    nms: float = 0.5
    detections: int = 100
    crop: int | None = None
    crops: int = 1
    scales: tuple[float, ...] = (1.0,)
    flip: float = 0.5
    window: int | None = None
    overlap: float = 0.25
    shown: float = 0.5


class ObjectTask(TaskModule):
    """A detector of torchvision's, learning from the sum of its own losses.

    Crowd regions are not learnt, and what is found in them is not counted as wrong, as COCO has it.
    """

    headline: ClassVar[str] = "map"
    direction: ClassVar[Literal["max", "min"]] = "max"
    settings_type: ClassVar[type] = ObjectSettings
    writes: ClassVar[bool] = True
    looks_at: ClassVar[Literal["images", "text", "nothing"]] = "images"
    want: ClassVar[Literal["boxes", "masks"]]

    @classmethod
    def load_data(cls, config: TaskRecipe, like: Mapping[str, Any] | None = None) -> IndexedData:
        """Read the scenes of `config.data`."""
        data = load_scenes(config.data, want=cls.want, seed=config.seed)
        if like is not None:
            check_names(config.data, data.classes, like["classes"])
        settings = cls.settings_of(config)
        scenes = RepeatedScenes(data.train, settings.crops)
        if like is None:
            _check_learnable(ObjectSamples(scenes), config, cls.want)
        train = ObjectSamples(scenes, _augment(config, settings, data))
        return IndexedData(train, ObjectSamples(data.test), config=config, description=_describe(config, data, like))

    @classmethod
    def build_model(cls, config: TaskRecipe, data: Mapping[str, Any]) -> nn.Module:
        """The detector of that name for the classes of the data."""
        check_own(config.model_kwargs, FROM_ELSEWHERE)
        settings = cls.settings_of(config)
        given: dict[str, Any] = {
            "num_classes": len(data["classes"]), "image_mean": data["mean"], "image_std": data["std"],
            "score": settings.score, "nms": settings.nms, "detections": settings.detections,
            "img_size": tuple(data["img_size"]),
        }  # fmt: skip
        return create_model(config.model, **given, **_sizes(config, settings), **config.model_kwargs)

    @classmethod
    def check(cls, config: TaskRecipe, batch_size: int) -> None:
        """A detector that this task can train, and settings that it can have."""
        check_model(config.task, config.model)
        for name in ("mixup", "cutmix", "reprob"):
            if getattr(config, name):
                raise UserError(f"{config.task} has no {name}, got {getattr(config, name)}; leave it out")
        if config.precision == "bf16":
            raise UserError("boxes need float32: give --precision bf16-mixed, in which the backbone alone is bfloat16")
        _check_settings(config, cls.settings_of(config))

    @classmethod
    def summarize_model(cls, name: str, sizes: Mapping[str, Any], model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Its parts, and the published figures."""
        return summarize_image_model(name, sizes, model_kwargs)

    @classmethod
    def view(cls, model: nn.Module, file: Path, data: Mapping[str, Any]) -> View:
        """The whole image at the detector's own scale."""
        detector: Any = model
        ((_, pixels),) = stored_images([file])
        seen, _ = detector.net.transform([pixels.float().div(255)])
        levels = seen.tensors[0] * channel_columns(detector.std) + channel_columns(detector.mean)
        return View(shown_image(levels), seen.tensors)

    def loss(self, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of torchvision's losses, and each of them for the log."""
        targets = [_without_crowds(target) for target in batch["targets"]]
        losses: dict[str, Tensor] = self.model(batch["images"], targets)
        return torch.stack(list(losses.values())).sum(), {name: value.detach() for name, value in losses.items()}

    def evaluate(self, batch: Mapping[str, Any]) -> None:
        """What is found against what is there."""
        targets = [{**target, "iscrowd": target["iscrowd"].long()} for target in batch["targets"]]
        self.scores.update(self.find(batch["images"]), targets)

    def on_validation_epoch_end(self) -> None:
        """Keep the metrics as plain values, those of the classes by name."""
        super().on_validation_epoch_end()
        self.name_classes(*(name for name in self.results if name.endswith("per_class")))

    @torch.no_grad()
    def find(self, images: Sequence[Tensor]) -> list[Found]:
        """Detections in each image (3, H, W) in 0..1, larger ones in windows if the settings say so."""
        settings: ObjectSettings = self.settings
        large = [settings.window is not None and max(image.shape[1:]) > settings.window for image in images]
        if not any(large):
            return self.model(images)
        return [
            find_in_windows(
                self.model, image, window=settings.window or 0, overlap=settings.overlap, nms=settings.nms,
                count=settings.detections,
            ) if cut else self.model([image])[0]
            for image, cut in zip(images, large)
        ]  # fmt: skip

    def predict(self, inputs: Sequence[str | Path]) -> list[dict[str, Any]]:
        """Label, score and box (left, top, width, height in pixels) of each object, from the score `shown` on."""
        return [row for file, _, found in self._found(inputs) for row in self._rows(file, found)]

    def predict_into(self, inputs: Sequence[str | Path], out: Path) -> list[dict[str, Any]]:
        """The same, with NAME-overlay.png, the image with what is shown drawn on it, and results.json in COCO's form,
        which has all from the score `score` on.
        """
        check_stems(inputs)
        rows, results = [], []
        ids = self.data.get("category_ids") or [label + 1 for label in range(len(self.data["classes"]))]
        for number, (file, image, found) in zip(image_numbers(inputs), self._found(inputs), strict=True):
            rows += self._rows(file, found)
            results += coco_results(found, image_id=number, file=file.name, category_ids=ids)
            picture = draw_objects(image, self._shown(found), self.data["classes"])
            save_picture(picture, out / f"{file.stem}-overlay.png")
        (out / "results.json").write_text(json.dumps(results) + "\n")
        return rows

    def _found(self, inputs: Sequence[str | Path]) -> Iterator[tuple[Path, Tensor, Found]]:
        self.eval()
        for file, image in stored_images(inputs):
            found = self.find([image.to(self.device).float() / 255])[0]
            yield file, image, {name: value.cpu() for name, value in found.items()}

    def _shown(self, found: Found) -> Found:
        keep = found["scores"] >= self.settings.shown
        return {name: value[keep] for name, value in found.items()}

    def _rows(self, file: Path, found: Found) -> list[dict[str, Any]]:
        return object_rows(str(file), self._shown(found), self.data["classes"])


def _check_learnable(whole: ObjectSamples, config: TaskRecipe, want: Literal["boxes", "masks"]) -> None:
    """Raise `UserError` if no training image shows an object to learn; the first that does ends the search."""
    samples = subset(whole, config.limit)
    targets = (samples.read(torch.tensor([place]), 0)["targets"][0] for place in range(len(samples)))
    if not any((~target["iscrowd"]).any() for target in targets):
        taken = "" if config.limit is None else f" that --limit {config.limit} takes"
        empty = "a mask that is not empty" if want == "masks" else "a box of some area"
        raise UserError(
            f"no training image of {config.data!r}{taken} has an object with {empty}, so only background could be "
            "learnt; give annotations of objects"
        )


def _without_crowds(target: Mapping[str, Tensor]) -> dict[str, Tensor]:
    keep = ~target["iscrowd"].bool()
    return {name: target[name][keep] for name in ("boxes", "labels", "masks") if name in target}


def _augment(config: TaskRecipe, settings: ObjectSettings, data: SceneData) -> ObjectAugment | None:
    if config.augment == "none":
        return None
    crop = data.crop if settings.crop is None else (settings.crop, settings.crop)
    return ObjectAugment(
        config.seed, crop=crop if settings.crop != 0 else None, scales=settings.scales, flip=settings.flip,
        color_jitter=config.color_jitter, fill=data.mean,
    )  # fmt: skip


def _describe(config: TaskRecipe, data: SceneData, like: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the run folder keeps."""
    mean, std = IMAGENET if config.model_kwargs.get("pretrained_backbone") else (data.mean, data.std)
    side = config.img_size or _argument(config.model, "img_size")
    own = {"mean": list(mean), "std": list(std), "img_size": [side, side]}
    kept = own if like is None else {key: like[key] for key in own}
    return {
        "classes": list(data.classes), "channels": 3, **kept, "category_ids": data.notes.get("category_ids"),
        "source": data.source, "skipped": [_skipped(one) for one in data.skipped],
    }  # fmt: skip


def _skipped(one: Skipped) -> str:
    return f"{one.path}: {one.reason}"


def _argument(model: str, name: str) -> Any:
    """What a model gives its builder, or the builder's own value."""
    entry = MODELS[model]
    return entry.arguments.get(name, inspect.signature(load_object(entry.build)).parameters[name].default)


def _fixed_size(model: str) -> bool:
    """Whether it looks at squares of one size alone."""
    return "min_size" not in inspect.signature(load_object(MODELS[model].build)).parameters


def _sizes(config: TaskRecipe, settings: ObjectSettings) -> dict[str, Any]:
    """Arguments of a detector that looks at images of any size."""
    if _fixed_size(config.model):
        return {}
    wanted = {"min_size": settings.min_size, "max_size": settings.max_size}
    if config.img_size is not None:
        wanted = {"min_size": settings.min_size or (config.img_size,), "max_size": settings.max_size or config.img_size}
    return {name: value for name, value in wanted.items() if value is not None}


def _check_settings(config: TaskRecipe, settings: ObjectSettings) -> None:
    check_windows(settings.window, settings.overlap)
    if _fixed_size(config.model) and (settings.min_size or settings.max_size):
        raise UserError(
            f"{config.model} looks at squares of one size, whose learned matrices it is built for: give --img-size "
            "instead of min_size and max_size"
        )
    for name in ("score", "nms", "shown"):
        if not 0 <= getattr(settings, name) <= 1:
            raise UserError(f"{config.task}: {name} lies in 0..1, got {getattr(settings, name)}")
    for name in ("detections", "crops"):
        if getattr(settings, name) < 1:
            raise UserError(f"{config.task}: {name} must be at least 1, got {getattr(settings, name)}")
    if settings.crop is not None and settings.crop < 0:
        raise UserError(f"{config.task}: crop is a side in pixels, or 0 for whole images; got {settings.crop}")
    if config.augment not in ("none", "light"):
        raise UserError(
            f"{config.task} has the augmentations none and light, got {config.augment!r}; scales, crop and flip are "
            "--task-kwargs"
        )
    if config.augment == "none" and (settings.scales != (1.0,) or settings.crop):
        raise UserError("scales and crop are augmentation; leave --augment none out")
