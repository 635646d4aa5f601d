"""Options of object detection and instance segmentation."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from tokenmix.errors import UserError
from tokenmix.lab.train.config import DiagonalityOptions
from tokenmix.lab.train.schema import Factors, Numbers, Range, Section


@dataclass(frozen=True, kw_only=True)
class FindingOptions(Section):
    """Image size, inference, and which predictions count."""

    min_size: Annotated[Numbers | None, Range(least=1)] = None
    """Shorter side of an image in pixels; --img-size, or the model's own, if not given.
    Of several, one is drawn for each training image, and the last is used for evaluation."""
    max_size: Annotated[int | None, Range(least=1)] = None
    """Limit of the longer side in pixels."""
    score: Annotated[float, Range(least=0, most=1)] = 0.05
    """Lowest score of a prediction; mAP needs a low value, figures and tables start at --shown."""
    nms: Annotated[float, Range(least=0, most=1)] = 0.5
    """IoU of two boxes of one class above which the one with the lower score is dropped (NMS)."""
    detections: Annotated[int, Range(least=1)] = 100
    """Maximum number of predictions per image, also in evaluation; 100 in COCO."""
    window: Annotated[int | None, Range(least=16)] = None
    """Evaluate and predict larger images in sliding windows of this side, in pixels; whole images if not given."""
    overlap: Annotated[float, Range(least=0, below=1)] = 0.25
    """Overlap of neighbouring windows, as a share of their side."""
    shown: Annotated[float, Range(least=0, most=1)] = 0.5
    """Lowest score that `predict` prints and draws."""


@dataclass(frozen=True, kw_only=True)
class ObjectOptions(FindingOptions, DiagonalityOptions):
    """Augmentation, image size, inference, and which predictions count."""

    evaluation: ClassVar[type[Section]] = FindingOptions

    img_size: Annotated[int | None, Range(least=1, most=16384)] = None
    """Side in pixels of the square that images are resized to; the model's own if not given."""
    augment: Literal["none", "light"] = "light"
    """light scales, crops and flips images."""
    color_jitter: Annotated[float, Range(least=0, most=1)] = 0.0
    """Strength of the random change of brightness, contrast and saturation, in addition to light."""
    crop: Annotated[int | None, Range(least=0)] = None
    """Side of the random training crops in pixels; the data set's own if not given, 0 for whole images."""
    crops: Annotated[int, Range(least=1)] = 1
    """Samples per training image and epoch, each augmented differently; for few large images."""
    scales: Annotated[Factors, Range(above=0)] = (1.0,)
    """Scale factors; one is drawn for each training image before the crop."""
    flip: Annotated[float, Range(least=0, most=1)] = 0.5
    """Probability of a horizontal flip."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.augment == "none" and (self.scales != (1.0,) or self.crop):
            raise UserError("scales and crop are augmentation; leave --augment none out")
