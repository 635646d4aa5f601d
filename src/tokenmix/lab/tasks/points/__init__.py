"""Options of point-cloud classification and segmentation."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from tokenmix.lab.train.config import ClassOptions, TaskOptions, TeacherOptions
from tokenmix.lab.train.schema import Range, Section


@dataclass(frozen=True, kw_only=True)
class VotingOptions(Section):
    """Test-time augmentation."""

    votes: Annotated[int, Range(least=1)] = 1
    """Predictions to average: one for the cloud itself, the others for stretched copies."""
    vote_scale: Annotated[float, Range(least=1)] = 1.25
    """Range of stretching: each axis is multiplied by a factor in 1 / vote_scale to vote_scale."""


@dataclass(frozen=True, kw_only=True)
class CloudOptions(VotingOptions, TaskOptions):
    """Preprocessing, augmentation and test-time augmentation."""

    evaluation: ClassVar[type[Section]] = VotingOptions

    num_points: Annotated[int, Range(least=1)] = 1024
    """Points of a cloud; larger clouds are subsampled."""
    features: Literal["auto", "xyz", "xyz+normals"] = "auto"
    """Input features of a point; auto uses normals if the data has them."""
    choice: Literal["first", "random", "farthest"] = "random"
    """Which points of a larger cloud are used; in evaluation always the same."""
    augment: Literal["none", "light"] = "light"
    """light stretches and shifts clouds and drops points, as set by the next three options."""
    scale: Annotated[float, Range(least=1)] = 1.5
    """Each axis is multiplied by a factor in 1 / scale to scale."""
    shift: Annotated[float, Range(least=0)] = 0.2
    """Largest shift along each axis."""
    point_dropout: Annotated[float, Range(least=0, below=1)] = 0.0
    """Largest share of points to drop."""


@dataclass(frozen=True, kw_only=True)
class CloudClassificationOptions(CloudOptions, TeacherOptions, ClassOptions):
    """Preprocessing, augmentation, test-time augmentation, label smoothing, classes of unequal size and a teacher."""

    smoothing: Annotated[float, Range(least=0, below=1)] = 0.1
    """Label smoothing."""
