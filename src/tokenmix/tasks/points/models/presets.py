"""Point models by name: the paper's sizes, external attention in their place, and small ones for short runs."""

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tokenmix.errors import UserError, unknown_name
from tokenmix.tasks.points.models.embedding import NaiveEmbedding, NeighbourEmbedding
from tokenmix.tasks.points.models.heads import PointClassifier, PointSegmenter
from tokenmix.tasks.points.models.pct import PCT, Position, make_block

__all__ = ["POINT_MODELS", "PointPreset", "create_point_model", "list_point_models"]


@dataclass(frozen=True)
class PointPreset:
    """What makes a point model; every field may be given to `create_point_model`.

    Attributes:
        answers: `"class"` of a cloud, or `"parts"` of its points.
        about: one line.
        mixer: of the attention layers, a name of the table.
        mixer_kwargs: its arguments.
        embedding: `"neighbour"` or `"naive"`.
        in_chans: channels of a point, 3 or with its normal 6.
        dim: width of the attention layers.
        depth: their number.
        stem_dim, stage_dims, centres, num_neighbours: of the neighbour embedding.
        fuse_dim: width behind the attention layers.
        head_dims: widths of the head.
        position: whether each layer is told the coordinates again.
        drop_rate: dropout of the head.
    """

    answers: Literal["class", "parts"]
    about: str
    mixer: str = "offset"
    mixer_kwargs: Mapping[str, Any] | None = None
    embedding: Literal["neighbour", "naive"] = "neighbour"
    in_chans: int = 3
    dim: int = 256
    depth: int = 4
    stem_dim: int = 64
    stage_dims: Sequence[int] = (128, 256)
    centres: Sequence[int] | Literal["all"] = (512, 256)
    num_neighbours: int = 32
    fuse_dim: int = 1024
    head_dims: Sequence[int] = (512, 256)
    position: Position = "none"
    drop_rate: float = 0.5


def _also(preset: PointPreset, about: str, **changes: Any) -> PointPreset:
    return dataclasses.replace(preset, about=about, **changes)


_PCT = PointPreset("class", "PCT with neighbour embedding")
_NAIVE = PointPreset("class", "PCT point by point (NPCT)", embedding="naive", dim=128)
_PARTS = _also(_NAIVE, "PCT for parts, point by point as released", answers="parts")
_NANO = PointPreset(
    "class", "PCT at nano size", dim=64, stem_dim=32, stage_dims=(48, 64), centres=(128, 64), num_neighbours=16,
    fuse_dim=256, head_dims=(128, 64), drop_rate=0.3,
)  # fmt: skip
_NANO_NAIVE = _also(_NANO, "NPCT at nano size", embedding="naive")
_NANO_PARTS = _also(
    _NANO, "PCT for parts at nano size, every point with its neighbours", answers="parts", centres="all",
    stage_dims=(32, 64), num_neighbours=12,
)  # fmt: skip

POINT_MODELS: dict[str, PointPreset] = {
    "pct_cls": _PCT,
    "pct_naive_cls": _NAIVE,
    "pct_part": _PARTS,
    "eapct_cls": _also(_PCT, "PCT with external attention in its four layers", mixer="external"),
    "eapct_part": _also(_PARTS, "PCT for parts with external attention in its four layers", mixer="external"),
    "pct_cls_nano": _NANO,
    "pct_naive_cls_nano": _NANO_NAIVE,
    "pct_part_nano": _NANO_PARTS,
    "eapct_cls_nano": _also(_NANO, "external attention at nano size", mixer="external"),
    "eapct_part_nano": _also(_NANO_PARTS, "external attention for parts at nano size", mixer="external"),
}
"""By name. The first two have the parameter counts that were reported for them (test_point_models.py)."""

_OF_DATA = ("num_classes", "num_parts", "num_categories")
_OF_NEIGHBOURS = ("stem_dim", "stage_dims", "centres", "num_neighbours")


def list_point_models(pattern: str = "*") -> list[str]:
    """The names that match a glob, for example `list_point_models("*_nano")`."""
    return fnmatch.filter(POINT_MODELS, pattern)


def create_point_model(
    name: str,
    *,
    num_classes: int | None = None,
    num_parts: int | None = None,
    num_categories: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **changes: Any,
) -> PointClassifier | PointSegmenter:
    """Build a point model.

    Args:
        name: a name of `list_point_models()`.
        num_classes: classes of a classifier; 40, as ModelNet40 has, if not given.
        num_parts, num_categories: of a segmenter; 50 and 16, as ShapeNet-part has, if not given.
        **changes: fields of `PointPreset`, for example `mixer="external"` or `in_chans=6`.

    Raises:
        UserError: an unknown name, field or mixer, a field that the embedding has no use for, or a number that does not
            fit the model's answers.
    """
    if name not in POINT_MODELS:
        raise unknown_name("point model", name, POINT_MODELS)
    fields = [f.name for f in dataclasses.fields(PointPreset) if f.name not in ("answers", "about")]
    for field in changes:
        if field not in fields:
            raise unknown_name(f"argument of {name}", field, [*fields, *_OF_DATA])
    preset = dataclasses.replace(POINT_MODELS[name], **changes)
    unused = next((field for field in changes if field in _OF_NEIGHBOURS), None)
    if preset.embedding == "naive" and unused is not None:
        raise UserError(f"{name} takes each point by itself and has no {unused}; leave it out")
    place = {"device": device, "dtype": dtype}
    trunk = _trunk(preset, place)
    head = {"head_dims": preset.head_dims, "drop_rate": preset.drop_rate, **place}
    if preset.answers == "class":
        if num_parts is not None or num_categories is not None:
            raise UserError(f"{name} tells classes; leave num_parts and num_categories out, or take a *_part model")
        return PointClassifier(trunk, 40 if num_classes is None else num_classes, **head)
    if num_classes is not None:
        raise UserError(f"{name} tells parts; give num_parts and num_categories in the place of num_classes")
    parts, categories = 50 if num_parts is None else num_parts, 16 if num_categories is None else num_categories
    return PointSegmenter(trunk, parts, categories, **head)


def _trunk(preset: PointPreset, place: dict[str, Any]) -> PCT:
    if preset.in_chans < 3:
        raise UserError(
            f"a point has 3 coordinates at least, got in_chans={preset.in_chans}; give 3, or 6 with normals"
        )
    if preset.depth < 1:
        raise UserError(f"depth={preset.depth} is not possible; give 1 or more, the paper has 4")
    if preset.embedding == "neighbour":
        embedding = NeighbourEmbedding(
            preset.in_chans, preset.dim, stem_dim=preset.stem_dim, stage_dims=preset.stage_dims,
            centres=preset.centres, num_neighbours=preset.num_neighbours, **place,
        )  # fmt: skip
    elif preset.embedding == "naive":
        embedding = NaiveEmbedding(preset.in_chans, preset.dim, **place)
    else:
        raise unknown_name("embedding", preset.embedding, ("neighbour", "naive"))
    blocks = [make_block(preset.mixer, preset.dim, preset.mixer_kwargs, **place) for _ in range(preset.depth)]
    return PCT(embedding, blocks, fuse_dim=preset.fuse_dim, position=preset.position, name=preset.mixer, **place)
