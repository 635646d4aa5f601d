"""Options of the tasks on point clouds."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from tokenmix.train.config import TaskOptions, TeacherOptions
from tokenmix.train.schema import Part, Range


@dataclass(frozen=True, kw_only=True)
class VotingOptions(Part):
    """How clouds are evaluated and answered."""

    votes: Annotated[int, Range(least=1)] = 1
    """Predictions whose mean an evaluation takes: for the cloud as it is, and for stretched ones."""
    vote_scale: Annotated[float, Range(least=1)] = 1.25
    """The stretched ones have each axis multiplied by a factor in 1 / vote_scale to vote_scale."""


@dataclass(frozen=True, kw_only=True)
class CloudOptions(VotingOptions, TaskOptions):
    """How clouds are prepared, evaluated and answered."""

    evaluation: ClassVar[type[Part]] = VotingOptions

    num_points: Annotated[int, Range(least=1)] = 1024
    """Points to which larger clouds are cut."""
    features: Literal["auto", "xyz", "xyz+normals"] = "auto"
    """What the model is given of a point; auto takes normals where the data has them."""
    choice: Literal["first", "random", "farthest"] = "random"
    """Which points of a larger cloud training keeps."""
    augment: Literal["none", "light"] = "light"
    """light stretches and shifts clouds and drops points, as the next three say."""
    scale: Annotated[float, Range(least=1)] = 1.5
    """Each axis is multiplied by a factor in 1 / scale to scale."""
    shift: Annotated[float, Range(least=0)] = 0.2
    """Largest shift along each axis."""
    point_dropout: Annotated[float, Range(least=0, below=1)] = 0.0
    """Largest share of the points that is left out."""


@dataclass(frozen=True, kw_only=True)
class CloudClassificationOptions(CloudOptions, TeacherOptions):
    """The same, with label smoothing and a teacher."""

    smoothing: Annotated[float, Range(least=0, below=1)] = 0.1
    """Label smoothing."""
