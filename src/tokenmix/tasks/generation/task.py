"""Image generation: class-conditional GANs by the hinge loss, judged by the features of a classifier."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from tokenmix.data.images import load_images
from tokenmix.errors import UserError
from tokenmix.models.registry import create_model
from tokenmix.tasks.classification.task import image_data
from tokenmix.tasks.fitting import check_model
from tokenmix.tasks.generation.classes import keep_classes
from tokenmix.tasks.generation.features import INCEPTION, Features, features_kind, make_features
from tokenmix.tasks.generation.metrics import ThumbnailFrechet
from tokenmix.tasks.generation.models import GAN
from tokenmix.tasks.generation.samples import noise_of, save_grid, strips
from tokenmix.tasks.summary import summarize_image_model
from tokenmix.train.task import TaskModule, TaskRecipe
from tokenmix.train.task_data import IndexedData

__all__ = ["GenerationSettings", "ImageGeneration"]

SIZES = (32, 64, 128)
ROWS = 10
# Of a run's config, what two optimisers of their own and a loss of their own leave no place for.
ELSEWHERE = {
    "lr": "give --task-kwargs lr_g and lr_d",
    "ema": "give --task-kwargs ema, which averages the generator alone",
    "accumulate": "a GAN's step takes the batch whole",
    "augment": "give light, which mirrors where the data allows it, or none",
    "precision": "give 32 or bf16-mixed",
    "strategy": "give ddp, since spectral norm needs a weight whole",
}
ALLOWED = {"augment": ("light", "none"), "precision": ("32", "bf16-mixed"), "strategy": ("auto", "ddp")}
UNUSED = (
    "min_lr", "schedule", "warmup_steps", "warmup_epochs", "cooldown_epochs", "opt", "opt_eps", "weight_decay",
    "clip_grad", "color_jitter", "reprob", "mixup", "cutmix", "smoothing", "diagonality",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GenerationSettings:
    """What --task-kwargs of image-generation takes.

    Attributes:
        lr_g, lr_d: learning rates of the two networks, constant.
        beta1, beta2: of both Adams.
        d_steps: steps of the discriminator for each of the generator; the batch is cut into as many parts.
        ema: decay of an average of the generator, which is then what is evaluated and generates; none without.
        classes: keep these classes of the data alone.
        features: a run folder of image-classification on the same data, whose classifier judges; or `inception`.
        columns: images of each class in a grid of samples.
    """

    lr_g: float = 1e-4
    lr_d: float = 4e-4
    beta1: float = 0.0
    beta2: float = 0.999
    d_steps: int = 1
    ema: float | None = None
    classes: tuple[str, ...] | None = None
    features: str | None = None
    columns: int = 8


class ImageGeneration(TaskModule):
    """Images of a class: hinge loss, two Adams of two rates, one step of the generator for `d_steps` of its judge.

        L_D = mean relu(1 - D(x, c)) + mean relu(1 + D(G(z, c), c));   L_G = -mean D(G(z, c), c)

    Paper: Zhang et al., arXiv 1805.08318. Classes c of generated images are those of the batch's real ones, so that
    they come as often; others draw them evenly. Power iteration of spectral norm moves on in every pass of a training
    network, where the authors' code leaves it out for generated images.

    All noise is a function of the seed and the place in the run, of test images of the seed and the image's index.
    """

    # An instance has another headline once a classifier judges.
    headline: str = "thumbnail_fd"  # pyright: ignore[reportIncompatibleVariableOverride]
    direction: ClassVar[Literal["max", "min"]] = "min"
    settings_type: ClassVar[type] = GenerationSettings
    comparison: ClassVar[str | None] = "--model resnet_gan_nano, then sagan_nano, then eagan_nano"
    model: GAN

    def __init__(self, model: nn.Module, config: TaskRecipe, data: Mapping[str, Any]) -> None:
        super().__init__(model, config, data)
        self.automatic_optimization = False
        self.classes: list[str] = list(data["classes"])
        # In a list, or the classifier would be a part of this module, and of what several processes share.
        self._judge: list[Features] = []
        if self.settings.features is not None:
            kind = features_kind(self.settings.features)
            self.headline = kind.headline  # pyright: ignore[reportIncompatibleVariableOverride]

    @classmethod
    def load_data(cls, config: TaskRecipe, like: Mapping[str, Any] | None = None) -> IndexedData:
        """The images of `config.data` and of the classes asked for, in -1 .. 1."""
        settings = cls.settings_of(config)
        images = load_images(config.data, img_size=config.img_size, seed=config.seed, crop_pct=config.crop_pct)
        height, width = images.img_size
        if height != width or height not in SIZES:
            raise UserError(
                f"a GAN makes square images of 32, 64 or 128 px, those of {config.data} have {height} x {width}; "
                "give --img-size 32"
            )
        wanted = settings.classes if like is None else tuple(like["classes"])
        images = keep_classes(images, wanted, limit=config.limit, limit_eval=config.limit_eval, seed=config.seed)
        least = 2 if settings.features is None else features_kind(settings.features).least
        if len(images.test) < least:
            raise UserError(
                f"a GAN is judged by {least} test images or more, there are {len(images.test)} of {config.data}; add "
                f"some, or give --limit-eval {least} or more"
            )
        half = (0.5,) * images.channels
        images = dataclasses.replace(images, mean=half, std=half)
        if settings.features is not None:
            make_features(settings.features).check(images.classes, images.channels)
        # The task mirrors them itself. Shifts, of which `light` has some, are what the generator would learn to make.
        return image_data(images, config, half, half, augment="none")

    @classmethod
    def build_model(cls, config: TaskRecipe, data: Mapping[str, Any]) -> nn.Module:
        """The GAN of that name for the data's classes, channels and size, with an average if asked for."""
        given: dict[str, Any] = {
            "num_classes": len(data["classes"]), "channels": data["channels"], "img_size": data["img_size"][0]
        }  # fmt: skip
        clash = next((key for key in given if key in config.model_kwargs), None)
        if clash is not None:
            raise UserError(f"model argument {clash}={config.model_kwargs[clash]!r} is set by the data; leave it out")
        gan: Any = create_model(config.model, **given, **config.model_kwargs)
        # On a CPU steps are a quarter shorter this way; the layout of the weights is that of what they make.
        gan = gan.to(memory_format=torch.channels_last)
        return gan if cls.settings_of(config).ema is None else gan.keep_average()

    @classmethod
    def with_absolute_paths(cls, config: Any) -> Any:
        """The path of the judge as well as that of the data."""
        config, judge = super().with_absolute_paths(config), config.task_kwargs.get("features")
        if not isinstance(judge, str) or judge == INCEPTION:
            return config
        path = str(Path(judge).expanduser().absolute())
        return dataclasses.replace(config, task_kwargs={**config.task_kwargs, "features": path})

    @classmethod
    def check(cls, config: TaskRecipe, batch_size: int) -> None:
        """Refuse what would be ignored, and numbers that no run can have."""
        check_model(config.task, config.model)
        _check_unused(config)
        settings: GenerationSettings = cls.settings_of(config)
        for name in ("lr_g", "lr_d"):
            if not getattr(settings, name) > 0:
                raise UserError(f"{name} must be positive, got {getattr(settings, name)}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(settings, name) < 1:
                raise UserError(f"{name} must lie in [0, 1), got {getattr(settings, name)}")
        if settings.ema is not None and not 0 < settings.ema < 1:
            raise UserError(f"ema is a decay in (0, 1) such as 0.999, or None to switch it off; got {settings.ema}")
        if settings.columns < 1:
            raise UserError(f"columns must be at least 1, got {settings.columns}")
        if settings.d_steps < 1 or batch_size % settings.d_steps:
            raise UserError(f"a batch of {batch_size} cannot be cut into d_steps={settings.d_steps} equal parts")
        if batch_size // settings.d_steps < 2:
            raise UserError(f"batch norm needs two images, a part of the batch has {batch_size // settings.d_steps}")

    @classmethod
    def summarize_model(cls, name: str, sizes: Mapping[str, Any], model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Its parts, and the published figures."""
        return summarize_image_model(name, sizes, model_kwargs)

    def configure_optimizers(self) -> Any:
        """Adam of the discriminator, then Adam of the generator; metrics.csv shows the first one's rate."""
        betas = (self.settings.beta1, self.settings.beta2)
        judge = torch.optim.Adam(self.model.discriminator.parameters(), lr=self.settings.lr_d, betas=betas)
        return [judge, torch.optim.Adam(self.model.generator.parameters(), lr=self.settings.lr_g, betas=betas)]

    def loss(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """There is not one loss."""
        raise NotImplementedError("each network has its own loss; see training_step")

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> dict[str, Any]:
        """`d_steps` steps of the discriminator, each on its part of the batch, and one of the generator."""
        judging, generating = self.optimizers()  # type: ignore[misc]
        parts = self.settings.d_steps
        images, labels = self._mirrored(batch["image"]), batch["label"]
        # A batch is smaller if one of its files could not be read any more.
        losses = []
        for real, classes in zip(images.chunk(parts), labels.chunk(parts)):
            losses.append(self._judge_loss(real, classes))
            self._step(judging, losses[-1])
        # The generator's gradient goes through the discriminator, which needs none of its own.
        self.model.discriminator.requires_grad_(False)
        classes = labels.chunk(parts)[0]
        g_loss = -self.model.discriminator(self.model.generator(self._noise(classes), classes), classes).float().mean()
        self._step(generating, g_loss)
        self.model.discriminator.requires_grad_(True)
        if self.settings.ema is not None:
            self.model.update_average(self.settings.ema)
        d_loss, g_loss = torch.stack(losses).mean().detach(), g_loss.detach()
        return {"logs": {"loss": d_loss + g_loss, "d_loss": d_loss, "g_loss": g_loss}}

    def _judge_loss(self, real: Tensor, classes: Tensor) -> Tensor:
        with torch.no_grad():
            fake = self.model.generator(self._noise(classes), classes)
        judge = self.model.discriminator
        return F.relu(1 - judge(real, classes).float()).mean() + F.relu(1 + judge(fake, classes).float()).mean()

    def _step(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        self.manual_backward(loss)
        optimizer.step()

    def _noise(self, classes: Tensor) -> Tensor:
        # The trainer has seeded torch from the place in the run.
        return torch.randn(len(classes), self.model.generator.latent_dim, device=classes.device)

    def _mirrored(self, images: Tensor) -> Tensor:
        if self.config.augment == "none" or not self.data["flip"]:
            return images
        return torch.where(torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5, images.flip(-1), images)

    def evaluate(self, batch: Mapping[str, Tensor]) -> None:
        """As many generated images as real ones, of the same classes."""
        real, labels = batch["image"], batch["label"]
        noise = noise_of(batch["index"].to(labels.device), self.model.generator.latent_dim, seed=self.config.seed)
        fake = self.model(noise, labels).float()
        judged: dict[str, Tensor] = {}
        if self.settings.features is not None:
            if not self._judge:
                self._judge.append(make_features(self.settings.features))
                self._judge[0].check(self.classes, self.data["channels"])
            features, logits = self._judge[0](fake)
            judged = {
                "real_features": self._judge[0](real)[0], "fake_features": features, "logits": logits,
                "wanted": self._judge[0].wanted(labels),
            }  # fmt: skip
        self.scores.update(real=real, fake=fake, **judged)

    def metrics(self) -> MetricCollection:
        """Distance of thumbnails; with `features` what the classifier says besides."""
        chosen: dict[str, Metric] = {"thumbnail_fd": ThumbnailFrechet()}
        if self.settings.features is not None:
            chosen |= features_kind(self.settings.features).metrics()
        return MetricCollection({**chosen}, compute_groups=False)

    @torch.no_grad()
    def draw(self, folder: Path, step: int) -> None:
        """A grid of samples, a row for each of the first ten classes; at the end strips between two noises too."""
        training, columns = self.model.training, self.settings.columns
        self.model.eval()
        folder.mkdir(exist_ok=True)
        classes = torch.arange(min(len(self.classes), ROWS), device=self.device)
        latent, seed = self.model.generator.latent_dim, self.config.seed
        noise = noise_of(torch.arange(len(classes) * columns, device=self.device), latent, seed=seed, group=1)
        save_grid(self.model(noise, classes.repeat_interleave(columns)), columns, folder / f"step-{step:06d}.png")
        if step == self.total_steps:
            images = strips(self.model, latent, classes, columns, seed=seed)
            save_grid(images, columns, folder / "interpolation.png")
        self.model.train(training)

    def example(self) -> dict[str, Tensor]:
        """Two noises, for an image of the first class and of the last."""
        noise = torch.randn(2, self.model.generator.latent_dim)
        return {"noise": noise, "label": torch.tensor([0, len(self.classes) - 1])}

    def answering(self) -> nn.Module:
        """What generates: noise (B, z) and classes (B,) to images (B, C, S, S) in -1 .. 1."""
        return self.model.generator if self.model.average is None else self.model.average

    def predict(self, inputs: Sequence[str | Path]) -> list[dict[str, Any]]:
        """A generator answers to no file."""
        raise UserError(f"a run of image-generation reads no {str(inputs[0])!r}; use: tokenmix generate RUN --out DIR")


def _check_unused(config: TaskRecipe) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    for name in (*ELSEWHERE, *UNUSED):
        value = getattr(config, name, None)
        if value not in ALLOWED.get(name, (defaults.get(name, value),)):
            remedy = ELSEWHERE.get(name, "leave it out")
            raise UserError(f"image-generation does not take {name}={value!r}: {remedy}")
