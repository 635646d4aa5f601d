"""Options of image generation, and its two optimisers."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from tokenmix.train.config import ManualOptim, TaskOptions
from tokenmix.train.schema import Part, Range
from tokenmix.train.words import Names


@dataclass(frozen=True, kw_only=True)
class AdversarialOptim(ManualOptim):
    """Adam of the generator and Adam of the discriminator, at constant learning rates."""

    lr_g: Annotated[float, Range(above=0)] = 1e-4
    """Learning rate of the generator."""
    lr_d: Annotated[float, Range(above=0)] = 4e-4
    """Learning rate of the discriminator."""
    beta1: Annotated[float, Range(least=0, below=1)] = 0.0
    """Adam's first decay, of both."""
    beta2: Annotated[float, Range(least=0, below=1)] = 0.999
    """Adam's second decay, of both."""
    d_steps: Annotated[int, Range(least=1)] = 1
    """Steps of the discriminator for each of the generator; the batch is cut into as many parts."""


@dataclass(frozen=True, kw_only=True)
class JudgeOptions(Part):
    """What generated images are judged by."""

    features: str | None = None
    """A run folder of image-classification on the same data, whose classifier judges; or inception."""


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(JudgeOptions, TaskOptions):
    """What images are generated, and what they are judged by."""

    evaluation: ClassVar[type[Part]] = JudgeOptions

    img_size: Annotated[int | None, Range(least=1, most=16384)] = None
    """Side of the square that images are resized to, 32, 64 or 128; the data set's own size if not given."""
    crop_pct: float | None = None
    """Share of a photograph's centre that is taken; 0.875 if not given."""
    augment: Literal["none", "light"] = "light"
    """light mirrors images where the data allows it."""
    classes: Names | None = None
    """Keep these classes of the data alone, separated by commas."""
    ema: Annotated[float | None, Range(above=0, below=1)] = None
    """Decay of an average of the generator, such as 0.999, which is then what is evaluated and generates."""
    columns: Annotated[int, Range(least=1)] = 8
    """Images of each class in a grid of samples."""
