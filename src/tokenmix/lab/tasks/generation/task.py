"""Image generation: class-conditional GANs with hinge loss, evaluated on a classifier's features; and their samples."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torchvision.utils import make_grid

from tokenmix.errors import UserError, unknown_name
from tokenmix.files import Values, make_folder, replacing, user_path
from tokenmix.lab.data.images import ImageData, ImageSet, load_images
from tokenmix.lab.data.indexed import hash_indices
from tokenmix.lab.tasks.generation import GenerationOptions
from tokenmix.lab.tasks.generation.features import INCEPTION, Features, features_kind, frechet_distance, thumbnails
from tokenmix.lab.tasks.images import ImageTask, image_data, with_size_of_start
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.load import load_task
from tokenmix.lab.train.metrics import Metric, Rows
from tokenmix.lab.train.plan import Configured
from tokenmix.lab.train.programs import Batch, Description
from tokenmix.lab.train.task import IndexedData
from tokenmix.layers.base import count_parameters
from tokenmix.models.generation import GAN
from tokenmix.models.registry import create_model

SIZES = (32, 64, 128)
ROWS = 10
# Spectral norm needs unsharded weights; of the 16-bit precisions, only bf16-mixed is supported.
ALLOWED = {"precision": ("32", "bf16-mixed"), "strategy": ("auto", "ddp")}


class ImageGeneration(ImageTask):
    """Class-conditional GAN: hinge loss, two Adams, one generator step per `d_steps` discriminator steps.

        L_D = mean relu(1 - D(x, c)) + mean relu(1 + D(G(z, c), c));   L_G = -mean D(G(z, c), c)

    Paper: Zhang et al., arXiv 1805.08318. Generated images have the classes c of the batch's real ones, and thus their
    frequencies; other implementations draw classes uniformly. Every training pass advances the power iteration of
    spectral norm; the authors' code skips it for generated images.

    Noise is a function of the seed and the position in the run; for test images, of the seed and the image's index.
    """

    monitor: str = "thumbnail_fd"
    automatic_optimization = False
    inspects: ClassVar[Literal["images", "text", "nothing"]] = "nothing"
    set_elsewhere: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("num_classes", "channels", "img_size"), "--data, --classes and --img-size"
    )
    options: GenerationOptions
    no_comparison: ClassVar[str] = (
        "a GAN has two networks that learn against each other, whose attention is none, SAGAN's or external and no "
        "other mixer; train --model resnet_gan_nano, then sagan_nano, then eagan_nano by tokenmix train "
        "image-generation, and read thumbnail_fd, the Fréchet distance, in result.json"
    )
    model: GAN  # pyrefly: ignore[bad-override-mutable-attribute]

    @property
    def classes(self) -> list[str]:
        return self.data["classes"]

    @cached_property
    def _judge(self) -> Features:
        """The feature network of the metrics; no module, so that ranks do not share it."""
        source = self.config.options.features
        judge = features_kind(source)(source)
        judge.check(self.classes, self.data["channels"])
        return judge

    def usual_monitor(self) -> str:
        judge = self.config.options.features
        return self.monitor if judge is None else features_kind(judge).monitor

    @classmethod
    def load_data(cls, config: TrainConfig, like: Description | None = None) -> IndexedData:
        """Images of the data in the selected classes, in -1 .. 1."""
        options: GenerationOptions = config.options
        images = load_images(
            config.data.data, img_size=options.img_size, seed=config.loop.seed, crop_pct=options.crop_pct
        )
        height, width = images.img_size
        if height != width or height not in SIZES:
            raise UserError(
                f"a GAN makes square images of 32, 64 or 128 px, those of {config.data.data} have {height} x {width}; "
                "give --img-size 32"
            )
        wanted = options.classes if like is None else tuple(like["classes"])
        limits = {name: getattr(config.data, name) for name in ("limit", "limit_eval", "validation")}
        images = keep_classes(images, wanted, **limits, seed=config.loop.seed)
        least = 2 if options.features is None else features_kind(options.features).least
        if len(images.test) < least:
            raise UserError(
                f"evaluating a GAN needs {least} test images or more, there are {len(images.test)} of "
                f"{config.data.data}; add some, or give --limit-eval {least} or more"
            )
        if images.validation is not None and len(images.validation) < least:
            raise UserError(
                f"evaluating a GAN needs {least} images or more, and --validation holds {len(images.validation)} out; "
                f"give --validation {least} or more, or 0 for none"
            )
        half = (0.5,) * images.channels
        images = dataclasses.replace(images, mean=half, std=half)
        if options.features is not None:
            features_kind(options.features)(options.features).check(images.classes, images.channels)
        # The task mirrors images itself. The generator would learn the shifts of `light`.
        return image_data(images, config, half, half, augment="none")

    @classmethod
    def build_model(cls, config: TrainConfig, data: Description) -> nn.Module:
        given: Values = {
            "num_classes": len(data["classes"]),
            "channels": data["channels"],
            "img_size": data["img_size"][0],
        }
        gan = create_model(config.model.model, **given, **config.model.model_kwargs)
        assert isinstance(gan, GAN)
        return gan if config.options.ema is None else gan.keep_average()

    @classmethod
    def with_absolute_paths(cls, config: TrainConfig) -> TrainConfig:
        """Also makes the feature network's path absolute, and takes the image size of an --init-from run."""
        config, judge = with_size_of_start(super().with_absolute_paths(config)), config.options.features
        if judge is None or judge == INCEPTION:
            return config
        return config.replace(features=str(user_path(judge).absolute()))

    @classmethod
    def check(cls, config: TrainConfig, batch_size: int) -> None:
        super().check(config, batch_size)
        steps = config.optim.d_steps
        for name, possible in ALLOWED.items():
            if getattr(config.loop, name) not in possible:
                raise UserError(
                    f"image-generation cannot be trained with {name}={getattr(config.loop, name)}; give one of "
                    f"{', '.join(possible)}"
                )
        if batch_size % steps:
            raise UserError(
                f"a batch of {batch_size} cannot be cut into d_steps={steps} equal parts; give a multiple of {steps}"
            )
        if batch_size // steps < 2:
            raise UserError(
                f"batch norm needs two images, a part of the batch has {batch_size // steps}; "
                f"give --batch-size {2 * steps} or more"
            )

    def configure_optimizers(self) -> Configured:
        """Adam of the discriminator, then Adam of the generator; metrics.csv shows the first learning rate."""
        betas = (self.config.optim.beta1, self.config.optim.beta2)
        judge = torch.optim.Adam(self.model.discriminator.parameters(), lr=self.config.optim.lr_d, betas=betas)
        return [judge, torch.optim.Adam(self.model.generator.parameters(), lr=self.config.optim.lr_g, betas=betas)]

    def num_parameters(self) -> int:
        """Of both networks, without the average."""
        return count_parameters(self.model.generator) + count_parameters(self.model.discriminator)

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        raise NotImplementedError("each network has its own loss; see training_step")

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Values:
        """`d_steps` discriminator steps, each on its part of the batch, and one generator step."""
        judging, generating = self.optimizers
        parts, judge, generator = self.config.optim.d_steps, self.model.discriminator, self.model.generator

        def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()

        # A batch is smaller if files have become unreadable, and yet every rank makes as many steps.
        count = len(batch["label"])
        places = torch.arange(max(parts, count), device=batch["label"].device) % count
        images, labels, losses = self._mirrored(batch["image"][places]), batch["label"][places], []
        for real, classes in zip(images.tensor_split(parts), labels.tensor_split(parts)):
            with torch.no_grad():
                fake = generator(self._noise(classes), classes)
            judged, wrong = (judge(images, classes).float() for images in (real, fake))
            losses.append(F.relu(1 - judged).mean() + F.relu(1 + wrong).mean())
            step(judging, losses[-1])
        # The generator's gradient passes through the discriminator, whose parameters need none.
        judge.requires_grad_(False)
        classes = labels.tensor_split(parts)[0]
        g_loss = -judge(generator(self._noise(classes), classes), classes).float().mean()
        step(generating, g_loss)
        judge.requires_grad_(True)
        if self.options.ema is not None:
            self.model.update_average(self.options.ema)
        d_loss, g_loss = torch.stack(losses).mean().detach(), g_loss.detach()
        return {"logs": {"loss": d_loss + g_loss, "d_loss": d_loss, "g_loss": g_loss}}

    def _noise(self, classes: Tensor) -> Tensor:
        # The trainer has seeded torch from the position in the run.
        return torch.randn(len(classes), self.model.generator.latent_dim, device=classes.device)

    def _mirrored(self, images: Tensor) -> Tensor:
        if self.options.augment == "none" or not self.data["flip"]:
            return images
        return torch.where(torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5, images.flip(-1), images)

    def evaluate(self, batch: Mapping[str, Tensor]) -> Rows:
        """Generate as many images as there are real ones, of the same classes."""
        real, labels = batch["image"], batch["label"]
        noise = noise_of(batch["index"].to(labels.device), self.model.generator.latent_dim, seed=self.config.loop.seed)
        fake = self.model(noise, labels).float()
        kept = {"index": batch["index"], "real_thumbnails": thumbnails(real), "fake_thumbnails": thumbnails(fake)}
        if self.options.features is not None:
            kept["fake_features"], kept["logits"] = self._judge(fake)
            kept |= {"real_features": self._judge(real)[0], "wanted": self._judge.wanted(labels)}
        return kept

    @classmethod
    def make_metrics(cls, config: TrainConfig, data: Description) -> dict[str, Metric]:
        names, judge = ("real_thumbnails", "fake_thumbnails"), config.options.features
        distance = Metric.of_columns(frechet_distance, *names, higher_is_better=False)
        return {"thumbnail_fd": distance, **({} if judge is None else features_kind(judge).metrics)}

    @torch.no_grad()
    def draw(self, folder: Path, step: int) -> None:
        """A grid of samples, a row for each of the first ten classes; at the end also strips between two noises."""
        training, columns = self.model.training, self.options.columns
        self.model.eval()
        folder.mkdir(exist_ok=True)
        classes = torch.arange(min(len(self.classes), ROWS), device=self.device)
        latent, seed = self.model.generator.latent_dim, self.config.loop.seed
        noise = noise_of(torch.arange(len(classes) * columns, device=self.device), latent, seed=seed, group=1)
        save_grid(self.model(noise, classes.repeat_interleave(columns)), columns, folder / f"step-{step:06d}.png")
        if step == self.total_steps:
            images = strips(self.model, latent, classes, columns, seed=seed)
            save_grid(images, columns, folder / "interpolation.png")
        self.model.train(training)

    def example(self) -> dict[str, Tensor]:
        noise = torch.randn(2, self.model.generator.latent_dim)
        return {"noise": noise, "label": torch.tensor([0, len(self.classes) - 1])}

    def inference_module(self) -> nn.Module:
        """The generator: noise (B, z) and classes (B,) to images (B, C, S, S) in -1 .. 1."""
        return self.model.generator if self.model.average is None else self.model.average

    def predict(self, inputs: Sequence[str | Path]) -> list[Values]:
        raise UserError(f"a run of image-generation reads no {str(inputs[0])!r}; use: tokenmix generate RUN --out DIR")


def keep_classes(
    images: ImageData,
    wanted: Sequence[str] | None,
    *,
    limit: int | None,
    limit_eval: int | None,
    validation: int | None = 0,
    seed: int,
) -> ImageData:
    """The images of the selected classes, numbered in their order; of all classes if None.

    One text may name several classes, separated by commas. The limits apply to the remaining images, as in
    `load_images`. `UserError` for an unknown class, a class named twice, or fewer than two classes.
    """
    known = list(images.classes)
    names = known
    if wanted is not None:
        split = (name.strip() for text in wanted for name in ([text] if text in known else text.split(",")))
        names = [name for name in split if name]
    check_class_names(names, known, f"class of {images.spec}")
    if len(names) < 2:
        raise UserError(
            f"image-generation is conditional on classes and needs at least two, got {', '.join(names) or 'none'}; "
            f"{images.spec} has {', '.join(known[:5])}"
        )
    numbers = torch.tensor([known.index(name) for name in names])

    def of_classes(whole: ImageSet) -> ImageSet:
        part = whole.subset(torch.isin(whole.labels, numbers).nonzero().flatten())
        part.labels = (part.labels[:, None] == numbers).long().argmax(1)
        return part

    train, test = of_classes(images.train), of_classes(images.test)
    return dataclasses.replace(images, train=train, test=test, classes=names).split(
        (train.labels, test.labels), limit=limit, limit_eval=limit_eval, validation=validation, seed=seed
    )


def check_class_names(names: Sequence[str], known: Sequence[str], what: str) -> None:
    """Raise `UserError` for a repeated name, or an unknown one with the nearest names."""
    for place, name in enumerate(names):
        if name not in known:
            raise unknown_name(what, name, known)
        if name in names[:place]:
            raise UserError(f"class {name!r} is given twice; remove one")


def noise_of(indices: Tensor, latent_dim: int, *, seed: int, group: int = 0) -> Tensor:
    """Normal noise (n, latent_dim), a row per index: a function of (seed, group, index), not of batch or rank."""
    rows = []
    for bits in hash_indices(seed, group, indices.cpu(), purpose=3).tolist():
        generator = torch.Generator().manual_seed(bits & 0x7FFFFFFFFFFFFFFF)
        rows.append(torch.randn(latent_dim, generator=generator))
    return torch.stack(rows).to(indices.device)


def between(first: Tensor, last: Tensor, count: int) -> Tensor:
    """`count` points (count, z) on the great circle between two noises (z,); a line would pass too near to 0."""
    angle = torch.arccos((first @ last / (first.norm() * last.norm())).clamp(-1, 1))
    shares = torch.linspace(0, 1, count, device=first.device)[:, None]
    if angle < 1e-4:
        return first + shares * (last - first)
    return (torch.sin((1 - shares) * angle) * first + torch.sin(shares * angle) * last) / torch.sin(angle)


@torch.no_grad()
def strips(gan: nn.Module, latent_dim: int, classes: Tensor, count: int, *, seed: int) -> Tensor:
    """Images (classes x count) between two noises, the same noises for each class."""
    ends = noise_of(torch.arange(2, device=classes.device), latent_dim, seed=seed)
    path = between(ends[0], ends[1], count)
    return gan(path.repeat(len(classes), 1), classes.repeat_interleave(count))


def save_grid(images: Tensor, columns: int, path: Path) -> Path:
    return save_image(make_grid(images.float().cpu(), nrow=columns, padding=2, pad_value=1.0), path)


def save_image(image: Tensor, path: Path) -> Path:
    """Write one image (C, H, W) in -1 .. 1 as PNG, grey if it has one channel."""
    levels = image.float().cpu().add(1).div(2).clamp(0, 1).mul(255).round().byte().permute(1, 2, 0).numpy()
    with replacing(path) as partial:
        Image.fromarray(levels[..., 0] if levels.shape[2] == 1 else levels).save(partial)
    return path


COLUMNS = 8
# Images generated at a time: thousands would exceed the memory.
BATCH = 64


def generate(
    run: Path,
    out: Path,
    *,
    classes: Sequence[str] = (),
    num: int = 8,
    seed: int = 0,
    interpolate: int | None = None,
) -> list[Values]:
    """Write `num` images of each class as PNG files, and all in grid.png, with a new row for each class.

    An image depends only on the run, the seed, its class and its number, not on the other images.

    Args:
        run: a run folder of image-generation.
        out: folder to write.
        classes: names of classes; all if empty.
        num: images per class.
        seed: seed of the noise.
        interpolate: also write strips.png, with this many steps between two noises for each class.

    Returns:
        For each class its name, number of images, and first file.

    Raises:
        UserError: a run of another task, an unknown or repeated class, or too small a number.
    """
    for name, value, least in (("num", num, 1), ("interpolate", interpolate, 2), ("seed", seed, 0)):
        if value is not None and value < least:
            raise UserError(f"{name} must be at least {least}, got {value}")
    task = load_task(run)
    if not isinstance(task, ImageGeneration):
        raise UserError(f"{run} is a run of {task.config.task}; generate takes one of image-generation")
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
        # White, like the space between images, to the end of the row.
        images += [made, made.new_ones(-num % columns, *made.shape[1:])]
    save_grid(torch.cat(images), columns, out / "grid.png")
    if interpolate is not None:
        path = strips(task.model, latent, numbers, interpolate, seed=seed)
        save_grid(path, interpolate, out / "strips.png")
    return rows
