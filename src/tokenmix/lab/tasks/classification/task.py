"""Image classification with cross-entropy and classification metrics."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import timm
import torch
import torch.nn.functional as F
from timm.data.mixup import Mixup
from timm.models import resolve_pretrained_cfg, save_for_hf
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.files import Values
from tokenmix.lab.data.images import load_images, make_augment, read_image
from tokenmix.lab.registry import DATA_SETS, incompatible_model_error
from tokenmix.lab.tasks.classes import ClassTask, likeliest
from tokenmix.lab.tasks.classification import ClassificationOptions
from tokenmix.lab.tasks.classification.normalisation import STATS, normalisation, of_channels
from tokenmix.lab.tasks.foreign import described_architecture, model_from_elsewhere
from tokenmix.lab.tasks.images import LabelledImageTask, image_data, image_view, with_size_of_start
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.distillation import DistillingTask
from tokenmix.lab.train.metrics import Metric, Rows
from tokenmix.lab.train.programs import Description, HubForm, PlainSamples, View
from tokenmix.lab.train.task import IndexedData, check_names, input_sizes
from tokenmix.models import create_model
from tokenmix.models.registry import by_timm, check_source, fetching, of_size
from tokenmix.registry import MODELS, is_foreign, is_transformers, list_models, without_timm

THUMBNAIL = 32
HUB = HubForm(
    "timm",
    "image-classification",
    "vision",
    """\
import timm
import tokenmix.register

model = timm.create_model("hf-hub:{repo}", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
# of a PIL image: upright (ImageOps.exif_transpose), on white, 8-bit RGB, or L for a model of one channel
logits = model(transform(image)[None])
classes = model.pretrained_cfg["label_names"]""",
)


class ImageClassification(LabelledImageTask, ClassTask):
    """One label per image: cross-entropy with label smoothing, and optionally timm's Mixup and CutMix."""

    hub: ClassVar[HubForm | None] = HUB
    baselines: ClassVar[tuple[str, ...]] = ("majority", "logistic regression", "random forest")
    options: ClassificationOptions
    same_inputs: ClassVar[Mapping[str, str]] = {"channels": "--data", "img_size": "--img-size"}
    set_elsewhere: ClassVar[Mapping[str, str]] = {
        "num_classes": "--data",
        "in_chans": "--in-chans",
        "img_size": "--img-size",
    }

    def __init__(self, model: nn.Module, config: TrainConfig, data: Description) -> None:
        super().__init__(model, config, data)
        options, self.mixup = self.options, None
        if options.mixup or options.cutmix:
            self.mixup = Mixup(
                options.mixup, options.cutmix, label_smoothing=options.smoothing, num_classes=len(self.classes)
            )

    @classmethod
    def load_data(cls, config: TrainConfig, like: Description | None = None) -> IndexedData:
        options: ClassificationOptions = config.options
        size = options.img_size if like is None else tuple(like["img_size"])
        images = load_images(
            config.data.data,
            img_size=size,
            limit=config.data.limit,
            limit_eval=config.data.limit_eval,
            validation=config.data.validation,
            seed=config.loop.seed,
            crop_pct=options.crop_pct,
            channels=options.in_chans,
        )
        if like is not None:
            check_names(config.data.data, images.classes, like["classes"])
            if images.channels != like["channels"]:
                raise UserError(
                    f"{config.data.data!r} has {images.channels} channels, the run was trained on {like['channels']}; "
                    "give data with as many"
                )
        stats, note = normalisation(config, images) if like is None else ({name: like[name] for name in STATS}, "")
        augment = {name: getattr(options, name) for name in ("augment", "color_jitter", "reprob")}
        more = described_architecture(config, like)
        made = image_data(replace(images, **stats), config, **stats, more=more, **augment)
        made.notes = [note] if note else []
        return made

    @classmethod
    def build_model(cls, config: TrainConfig, data: Description) -> nn.Module:
        name, size = config.model.model, tuple(data["img_size"])
        side = size[0] if len(set(size)) == 1 else size
        auto = "AutoModelForImageClassification"
        theirs = model_from_elsewhere(config, data, "classifier", auto, image_size=side)
        if theirs is not None:
            return theirs
        given: Values = {"num_classes": len(data["classes"]), "in_chans": data["channels"]}
        build = partial(create_model, name, **given, **config.model.model_kwargs)
        return build(img_size=size) if name in MODELS else of_size(build, size)

    @classmethod
    def with_absolute_paths(cls, config: TrainConfig) -> TrainConfig:
        return with_size_of_start(super().with_absolute_paths(config))

    @classmethod
    def check(cls, config: TrainConfig, batch_size: int) -> None:
        super().check(config, batch_size)
        ours = {*list_models(task="image-classification"), *list_models(task=config.task)}
        name = config.model.model
        if not (name in ours or timm.is_model(name) or is_foreign(name) or is_transformers(name)):
            raise incompatible_model_error("image-classification", name)
        options: ClassificationOptions = config.options
        if (options.mixup or options.cutmix) and batch_size % 2:
            raise UserError(
                f"mixup and cutmix pair the images of a batch: {batch_size} is odd; give an even --batch-size"
            )
        _check_image_size(cls, config)
        unread = next((name for name in ("mixup", "cutmix", "diagonality") if getattr(options, name)), None)
        if options.distill_from == "layers" and unread is not None:
            raise UserError(f"distill_from=layers only uses the loss over layers; leave {unread} out")
        make_augment(options.augment, seed=0, flip=True, fill=None, color_jitter=options.color_jitter)

    @classmethod
    def view(cls, model: nn.Module, file: Path, data: Description) -> View:
        """The part of the image that predictions use."""
        image = read_image(file, data["channels"], tuple(data["img_size"]), crop_pct=data.get("crop_pct", 1.0))
        return image_view(image, data["mean"], data["std"])

    def answer_loss(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross-entropy; mixed images have mixed targets, which already include the smoothing."""
        images, targets, smoothing = batch["image"], batch["label"], self.options.smoothing
        # A batch is odd only if a file has become unreadable; its images cannot be paired.
        if self.mixup is not None and len(images) % 2 == 0:
            (images, targets), smoothing = self.mixup(images.clone(), targets), 0.0
        logits = self.model(images).float()
        loss, logs = self.distilled(self.class_loss(logits, targets, smoothing), logits, {"image": images})
        return self.part_weight * loss, logs

    def count(self, batch: Mapping[str, Tensor]) -> int:
        return len(batch["image"])

    def teacher_logits(self, teacher: DistillingTask, batch: Mapping[str, Tensor]) -> Tensor:
        """The teacher's logits on the images, normalised with the teacher's mean and standard deviation."""
        images = batch["image"]
        ours, theirs = (
            [images.new_tensor(data[k]).view(-1, 1, 1) for k in STATS] for data in (self.data, teacher.data)
        )
        if any(not torch.equal(mine, other) for mine, other in zip(ours, theirs)):
            images = (images * ours[1] + ours[0] - theirs[0]) / theirs[1]
        return teacher.model(images)

    @classmethod
    def named_teacher(cls, name: str, config: TrainConfig, data: Description) -> Self:
        """A pretrained timm classifier with as many classes as the data; users must check their order."""
        name = without_timm(name)
        if not (timm.is_model(name) or name.startswith(("hf-hub:", "local-dir:"))):
            raise UserError(
                f"no run folder {name} to distill from, and no timm model of that name; give the folder of a run, a "
                "name of timm's, hf-hub:OWNER/NAME or local-dir:FOLDER"
            )
        told = "give local-dir:FOLDER of its config.json and model.safetensors, fetched where there is a connection"
        if timm.is_model(name):
            check_source(name, resolve_pretrained_cfg(name), elsewhere=told)
        with fetching(name, told):
            build = partial(by_timm, name, pretrained=True, in_chans=data["channels"])
            model: Any = of_size(build, tuple(data["img_size"]))
        if model.num_classes != len(data["classes"]):
            raise UserError(
                f"the teacher {name} has {model.num_classes} classes and the data {len(data['classes'])}; train it on "
                "this data first, and give the run folder"
            )
        return cls(model, config, {**data, **of_channels(model.pretrained_cfg, data["channels"])})

    def evaluate(self, batch: Mapping[str, Tensor]) -> Rows:
        """Rows of the images; ranks that share images have some of the images each."""
        found = self.model(batch["image"]).float(), batch["label"], batch["index"]
        return self.judged(*(part[self.own_samples] for part in found))

    @classmethod
    def make_metrics(cls, config: TrainConfig, data: Description) -> dict[str, Metric]:
        found = super().make_metrics(config, data)
        return {**found, "top5": Metric.mean(lambda rows: rows["rank"] < 5)} if len(data["classes"]) > 5 else found

    def plain_samples(self, data: IndexedData, part: Literal["train", "test"]) -> Iterator[PlainSamples]:
        """Pixels without augmentation; above 32 px those of a thumbnail."""
        images = getattr(data.images, part)
        for indices in torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).split(512):
            pixels, kept = images.pixels(indices)
            height, width = (min(side, THUMBNAIL) for side in pixels.shape[2:])
            small = F.adaptive_avg_pool2d(pixels.float().div(255), (height, width))
            yield PlainSamples(small.flatten(1), images.labels[kept])

    def save_for_hub(self, folder: Path) -> nn.Module:
        """In timm's format: config.json with the data's classes, mean and std, and model.safetensors."""
        prepared = {"mean": self.data["mean"], "std": self.data["std"], "crop_pct": self.data.get("crop_pct", 1.0)}
        save_for_hf(
            self.model.to(memory_format=torch.contiguous_format),
            str(folder),
            safe_serialization=True,
            model_config={"label_names": self.classes},
            data_config={**prepared, "interpolation": "bicubic"},
        )
        return timm.create_model(f"local-dir:{folder}", pretrained=True)

    def predict(self, inputs: Sequence[str | Path]) -> list[Values]:
        """Label, probability and the five most probable classes of each file."""
        answers = []
        for file in map(Path, inputs):
            image = self.view(self.model, file, self.data).inputs.to(next(self.model.parameters()))
            probabilities = self.model(image).float().softmax(-1)[0]
            answers.append({"file": str(file), **likeliest(probabilities, self.classes)})
        return answers


def _check_image_size(task: type[ImageClassification], config: TrainConfig) -> None:
    """Build the model with shapes only, before images are read; `UserError` if the size does not fit its patches."""
    name = config.data.data.partition(":")[0]
    side = config.options.img_size or (DATA_SETS[name].img_size if name in DATA_SETS else None)
    if side is None or ":" in str(config.model.model_kwargs.get("mixer", "")) or is_foreign(config.model.model):
        return  # A user's mixer or model may need more than shapes.
    description = {"classes": ["0", "1"], "channels": config.options.in_chans or 3, "img_size": [side, side]}
    if config.model.model in MODELS:
        with torch.device("meta"):
            task.model_from_config(config, description)
        return
    try:
        with torch.device("meta"):
            model = task.build_model(config, description)
    except Exception:  # Some timm models cannot be built with shapes only; errors then come later.
        return
    patch = input_sizes(model).get("patch_size")
    if patch is not None and side % patch:
        near = max(1, round(side / patch)) * patch
        raise UserError(
            f"image size {side} is not a multiple of {config.model.model}'s patch size {patch}; give --img-size {near}"
        )
