"""Options of semantic segmentation."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from tokenmix.errors import UserError
from tokenmix.lab.train.config import DiagonalityOptions
from tokenmix.lab.train.schema import Factors, Numbers, Range, Section


@dataclass(frozen=True, kw_only=True)
class Inference(Section):
    """Inference on images of any size."""

    way: Literal["auto", "whole", "sliding"] = "auto"
    """whole: all pixels at once; sliding: in windows whose logits are averaged where they overlap.
    auto: whole unless the model takes only one size.
    Except with whole, images above 2^22 pixels or 2^28 logits are processed in overlapping tiles of 2^18 pixels."""
    window: Annotated[Numbers | None, Range(least=1)] = None
    """Side of a window in pixels, or height,width; the model's image size if not given."""
    stride: Annotated[Numbers | None, Range(least=1)] = None
    """Step between windows in pixels; two thirds of a window if not given."""
    scales: Annotated[Factors, Range(above=0)] = (1.0,)
    """Test-time augmentation: scale factors, separated by commas, whose probabilities are averaged."""
    mirror: Literal["no", "yes"] = "no"
    """Test-time augmentation: average with the prediction of the mirrored image."""
    chunk_size: Annotated[int, Range(least=0)] = 8192
    """Positions per chunk of external attention, to limit memory; 0 for all at once."""
    test_batch: Annotated[int, Range(least=1)] = 1
    """Images per evaluation batch; images of different sizes are padded unless it is 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # Of these, only the training options have a crop.
        for name in ("window", "stride", "crop"):
            value = getattr(self, name, None)
            if value is not None and len(value) not in (1, 2):
                raise UserError(f"{name} must be a side, or height and width, got {value}")
        if not self.scales:
            raise UserError("scales needs one factor or more; give 1 or 0.5,1")


@dataclass(frozen=True, kw_only=True)
class SegmentationOptions(Inference, DiagonalityOptions):
    """Augmentation, loss and inference."""

    evaluation: ClassVar[type[Section]] = Inference

    crop: Annotated[Numbers | None, Range(least=1)] = None
    """Side of the training crops in pixels, or height,width; the data set's own if not given."""
    crops: Annotated[int, Range(least=1)] = 1
    """Samples per training image and epoch, each augmented differently; for few large images."""
    train_scales: Annotated[Factors, Range(above=0)] = (1.0,)
    """Scale factors; one is drawn for each training image before the crop."""
    augment: Literal["none", "light"] = "light"
    """light flips images horizontally."""
    color_jitter: Annotated[float, Range(least=0, most=1)] = 0.0
    """Strength of the random change of brightness, contrast and saturation."""
    iou_loss: Annotated[float, Range(least=0)] = 0.0
    """Weight of the soft IoU loss, added to cross-entropy; it gives rare classes the weight of common ones."""
    bias_lr: Annotated[float, Range(least=0)] = 1.0
    """Learning rate of biases as a multiple of --lr; biases never have weight decay."""
