"""Options of image classification."""

from dataclasses import dataclass
from typing import Annotated, Literal

from tokenmix.lab.train.config import ClassOptions, TeacherOptions
from tokenmix.lab.train.schema import Range, named


@dataclass(frozen=True, kw_only=True)
class ClassificationOptions(TeacherOptions, ClassOptions):
    """Preprocessing, augmentation and losses."""

    img_size: Annotated[int | None, Range(least=1, most=16384)] = None
    """Side in pixels of the square that images are resized to; that of the --init-from run if not given.
    Without such a run the data set's own: 64 for folder, 224 for imagefolder and wds."""
    in_chans: Literal[1, 3] | None = None
    """Channels of the images: 1 for grey, 3 for RGB; the data set's own if not given, and 3 for your own files."""
    crop_pct: float | None = None
    """Share of a photograph of imagefolder and wds that the centre crop keeps in evaluation; 0.875 if not given."""
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
    diagonality: Annotated[float, Range(least=0)] = 0.0
    """Weight of the diagonality loss on the scores of less-attention; it materialises the N x N map of every layer."""
    diagonality_form: Literal["hinge", "printed"] = "hinge"
    """hinge: bounded below, mean over layers; printed: the paper's sums, which push the diagonal down."""
