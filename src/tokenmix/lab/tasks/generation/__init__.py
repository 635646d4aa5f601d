"""Options of image generation by GANs, and of its two optimisers."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from tokenmix.lab.train.config import ManualOptim, TaskOptions
from tokenmix.lab.train.schema import Names, Range, Section, named


@dataclass(frozen=True, kw_only=True)
class AdversarialOptim(ManualOptim):
    """Adam for the generator and Adam for the discriminator, with constant learning rates."""

    lr_g: Annotated[float, Range(above=0)] = 1e-4
    """Learning rate of the generator."""
    lr_d: Annotated[float, Range(above=0)] = 4e-4
    """Learning rate of the discriminator."""
    beta1: Annotated[float, Range(least=0, below=1)] = 0.0
    """beta1 of both Adams."""
    beta2: Annotated[float, Range(least=0, below=1)] = 0.999
    """beta2 of both Adams."""
    d_steps: Annotated[int, Range(least=1)] = 1
    """Discriminator steps per generator step; the batch is split into this many parts."""


@dataclass(frozen=True, kw_only=True)
class JudgeOptions(Section):
    """Metrics of generated images."""

    features: Annotated[str, named("RUN|inception")] | None = None
    """Feature network of the metrics: a run folder of image-classification on the same data, or inception."""


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(JudgeOptions, TaskOptions):
    """Classes and size of generated images, and their metrics."""

    evaluation: ClassVar[type[Section]] = JudgeOptions

    img_size: Annotated[int | None, Range(least=1, most=16384)] = None
    """Side in pixels of the square that images are resized to, 32, 64 or 128; the data set's own if not given."""
    crop_pct: float | None = None
    """Share of a photograph that the centre crop keeps; 0.875 if not given."""
    augment: Literal["none", "light"] = "light"
    """light flips images horizontally if the data allows it."""
    classes: Names | None = None
    """Use only these classes of the data, separated by commas."""
    ema: Annotated[float | None, Range(above=0, below=1)] = None
    """Decay of an average of the generator, such as 0.999; the average is used for evaluation and generation."""
    columns: Annotated[int, Range(least=1)] = 8
    """Images per class in a grid of samples."""
