"""Options of object detection and instance segmentation."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from tokenmix.errors import UserError
from tokenmix.train.config import TaskOptions
from tokenmix.train.schema import Part, Range
from tokenmix.train.words import Factors, Numbers


@dataclass(frozen=True, kw_only=True)
class FindingOptions(Part):
    """How objects are found in an image."""

    min_size: Annotated[Numbers | None, Range(least=1)] = None
    """To what the shorter side of an image is resized; of several, one is drawn for each training image, and the last
    is that of evaluation. --img-size, or the model's own, if not given."""
    max_size: Annotated[int | None, Range(least=1)] = None
    """Longest that the longer side may become."""
    score: Annotated[float, Range(least=0, most=1)] = 0.05
    """Lowest score of a prediction; mAP needs it low, figures and tables start at --shown."""
    nms: Annotated[float, Range(least=0, most=1)] = 0.5
    """Overlap of two boxes of one class from which on the worse is dropped."""
    detections: Annotated[int, Range(least=1)] = 100
    """Most predictions of an image, in evaluation too; COCO's is 100."""
    window: Annotated[int | None, Range(least=16)] = None
    """Evaluate and predict larger images in windows of this side, in pixels; whole images if not given."""
    overlap: Annotated[float, Range(least=0, below=1)] = 0.25
    """Share of a window that it has in common with the next."""
    shown: Annotated[float, Range(least=0, most=1)] = 0.5
    """Least score of what `predict` names and draws."""


@dataclass(frozen=True, kw_only=True)
class ObjectOptions(FindingOptions, TaskOptions):
    """How images are cropped and scaled, and how objects are found in them."""

    evaluation: ClassVar[type[Part]] = FindingOptions

    img_size: Annotated[int | None, Range(least=1, most=16384)] = None
    """Side of the square that images are resized to; the model's own if not given."""
    augment: Literal["none", "light"] = "light"
    """light scales, crops and mirrors images."""
    color_jitter: Annotated[float, Range(least=0)] = 0.0
    """Largest change of an image's brightness, contrast and saturation, in addition to light."""
    crop: Annotated[int | None, Range(least=0)] = None
    """Side of the random crops that training learns from; the data set's own if not given, 0 for whole images."""
    crops: Annotated[int, Range(least=1)] = 1
    """Samples that an epoch takes of each training image, each augmented in its own way; for few large images."""
    scales: Annotated[Factors, Range(above=0)] = (1.0,)
    """Factors of which one scales each training image before the crop."""
    flip: Annotated[float, Range(least=0, most=1)] = 0.5
    """Probability that a training image is mirrored."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.augment == "none" and (self.scales != (1.0,) or self.crop):
            raise UserError("scales and crop are augmentation; leave --augment none out")
