"""Build a point model from its preset."""

import dataclasses
from typing import Any

import torch

from tokenmix.errors import UserError, unknown_name
from tokenmix.models.points.embedding import NaiveEmbedding, NeighbourEmbedding
from tokenmix.models.points.heads import PointClassifier, PointSegmenter
from tokenmix.models.points.pct import PCT, make_block
from tokenmix.presets.points import POINT_MODELS, PointPreset

_OF_DATA = ("num_classes", "num_parts", "num_categories")
_OF_NEIGHBOURS = ("stem_dim", "stage_dims", "centres", "num_neighbours")


def create_point_model(
    name: str,
    *,
    num_classes: int | None = None,
    num_parts: int | None = None,
    num_categories: int | None = None,
    mixer: str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **changes: Any,
) -> PointClassifier | PointSegmenter:
    """Build a point model.

    Args:
        name: one of `POINT_MODELS`.
        num_classes: classes of a classifier; 40, as ModelNet40 has, if not given.
        num_parts, num_categories: of a segmenter; 50 and 16, as ShapeNet-part has, if not given.
        mixer: of the attention layers, a name of the table; the preset's own if not given.
        **changes: other fields of `PointPreset`, for example `in_chans=6`.

    Raises:
        UserError: an unknown name, field or mixer, a field that the embedding has no use for, or a number that does not
            fit the model's predictions.
    """
    if name not in POINT_MODELS:
        raise unknown_name("point model", name, POINT_MODELS)
    fields = [f.name for f in dataclasses.fields(PointPreset) if f.name not in ("answers", "about")]
    for field in changes:
        if field not in fields:
            raise unknown_name(f"argument of {name}", field, [*fields, *_OF_DATA])
    changes |= {} if mixer is None else {"mixer": mixer}
    preset = dataclasses.replace(POINT_MODELS[name], **changes)
    unused = next((field for field in changes if field in _OF_NEIGHBOURS), None)
    if preset.embedding == "naive" and unused is not None:
        raise UserError(f"{name} processes each point by itself and has no {unused}; leave it out")
    place = {"device": device, "dtype": dtype}
    trunk = _trunk(preset, place)
    head = {"head_dims": preset.head_dims, "drop_rate": preset.drop_rate, **place}
    if preset.answers == "class":
        if num_parts is not None or num_categories is not None:
            raise UserError(f"{name} classifies clouds; omit num_parts and num_categories, or take a *_part model")
        return PointClassifier(trunk, 40 if num_classes is None else num_classes, **head)
    if num_classes is not None:
        raise UserError(f"{name} segments parts; give num_parts and num_categories instead of num_classes")
    parts, categories = 50 if num_parts is None else num_parts, 16 if num_categories is None else num_categories
    return PointSegmenter(trunk, parts, categories, **head)


def _trunk(preset: PointPreset, place: dict[str, Any]) -> PCT:
    if preset.in_chans < 3:
        raise UserError(
            f"a point has 3 coordinates at least, got in_chans={preset.in_chans}; give 3, or 6 with normals"
        )
    if preset.depth < 1:
        raise UserError(f"depth={preset.depth} must be at least 1; the paper has 4")
    if preset.embedding == "neighbour":
        embedding = NeighbourEmbedding(
            preset.in_chans,
            preset.dim,
            stem_dim=preset.stem_dim,
            stage_dims=preset.stage_dims,
            centres=preset.centres,
            num_neighbours=preset.num_neighbours,
            **place,
        )
    elif preset.embedding == "naive":
        embedding = NaiveEmbedding(preset.in_chans, preset.dim, **place)
    else:
        raise unknown_name("embedding", preset.embedding, ("neighbour", "naive"))
    blocks = [make_block(preset.mixer, preset.dim, preset.mixer_kwargs, **place) for _ in range(preset.depth)]
    return PCT(embedding, blocks, fuse_dim=preset.fuse_dim, position=preset.position, name=preset.mixer, **place)
