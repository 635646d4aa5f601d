"""Options of image classification."""

from dataclasses import dataclass
from typing import Annotated, Literal

from tokenmix.errors import UserError
from tokenmix.lab.train.config import ClassOptions, DiagonalityOptions, TeacherOptions
from tokenmix.lab.train.schema import Factors, Range, named


@dataclass(frozen=True, kw_only=True)
class ClassificationOptions(TeacherOptions, ClassOptions, DiagonalityOptions):
    """Preprocessing, augmentation and losses."""

    img_size: Annotated[int | None, Range(least=1, most=16384)] = None
    """Side in pixels of the square that images are resized to; that of the --init-from run if not given.
    Without such a run the data set's own: 64 for folder, 224 for imagefolder and wds."""
    in_chans: Literal[1, 3] | None = None
    """Channels of the images: 1 for grey, 3 for RGB; the data set's own if not given, and 3 for your own files."""
    crop_pct: float | None = None
    """Share of a photograph of imagefolder and wds that the centre crop keeps in evaluation; 0.875 if not given."""
    mean: Annotated[Factors | None, Range(least=0, most=1)] = None
    """Mean of each channel for normalisation, in 0..1; if not given, that of the initial weights, else of the data.
    Known are those of an --init-from run, and of timm's, torchvision's and transformers' weights."""
    std: Annotated[Factors | None, Range(least=1e-6, most=1e6)] = None
    """Standard deviation of each channel for normalisation; give it together with --mean."""
    augment: Annotated[str, named("NAME")] = "light"
    """none, light, or a timm RandAugment string such as rand-m9-mstd0.5-inc1.
    light: random shift and horizontal flip; for imagefolder and wds, random resized crop."""
    color_jitter: Annotated[float, Range(least=0)] = 0.0
    """Strength of the random change of brightness, contrast and saturation, in addition to light."""
    reprob: Annotated[float, Range(least=0, most=1)] = 0.0
    """Probability of random erasing (timm)."""
    mixup: Annotated[float, Range(least=0)] = 0.0
    """Mixup alpha (timm)."""
    cutmix: Annotated[float, Range(least=0)] = 0.0
    """CutMix alpha (timm)."""
    smoothing: Annotated[float, Range(least=0, below=1)] = 0.1
    """Label smoothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.mean or ()) != len(self.std or ()) or () in (self.mean, self.std):
            raise UserError("give mean and std together, one number for each channel, such as 0.5,0.5,0.5")
