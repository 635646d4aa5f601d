"""Point models by name: the paper's sizes, the same with external attention, and small ones for short runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tokenmix.registry import MODELS, ModelEntry, Published

Position = Literal["none", "each-layer"]


@dataclass(frozen=True)
class PointPreset:
    """Architecture of a point model; every field may be given to `create_point_model`.

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
        fuse_dim: width after the attention layers.
        head_dims: widths of the head.
        position: whether each layer gets the coordinates again.
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


_PCT = PointPreset("class", "PCT with neighbour embedding")
_NAIVE = PointPreset("class", "PCT point by point (NPCT)", embedding="naive", dim=128)
_PARTS = replace(_NAIVE, about="PCT for parts, point by point as released", answers="parts")
_NANO = PointPreset(
    "class",
    "PCT at nano size",
    dim=64,
    stem_dim=32,
    stage_dims=(48, 64),
    centres=(128, 64),
    num_neighbours=16,
    fuse_dim=256,
    head_dims=(128, 64),
    drop_rate=0.3,
)
_NANO_NAIVE = replace(_NANO, about="NPCT at nano size", embedding="naive")
_NANO_PARTS = replace(
    _NANO,
    about="PCT for parts at nano size, every point with its neighbours",
    answers="parts",
    centres="all",
    stage_dims=(32, 64),
    num_neighbours=12,
)

POINT_MODELS: dict[str, PointPreset] = {
    "pct_cls": _PCT,
    "pct_naive_cls": _NAIVE,
    "pct_part": _PARTS,
    "eapct_cls": replace(_PCT, about="PCT with external attention in its four layers", mixer="external"),
    "eapct_part": replace(_PARTS, about="PCT for parts with external attention in its four layers", mixer="external"),
    "pct_cls_nano": _NANO,
    "pct_naive_cls_nano": _NANO_NAIVE,
    "pct_part_nano": _NANO_PARTS,
    "eapct_cls_nano": replace(_NANO, about="external attention at nano size", mixer="external"),
    "eapct_part_nano": replace(_NANO_PARTS, about="external attention for parts at nano size", mixer="external"),
}
"""By name. The first two have the parameter counts that were reported for them (test_point_models.py)."""

_COUNTED = "arXiv:2012.09688, ModelNet40 with 40 classes"
_PUBLISHED = {
    "pct_cls": Published(2.88, None, None, _COUNTED),
    "pct_naive_cls": Published(1.36, None, None, _COUNTED),
}

MODELS.register(
    *(
        ModelEntry(
            name=name,
            tasks=("point-classification",) if preset.answers == "class" else ("point-segmentation",),
            about=preset.about,
            build="tokenmix.models.points.builder:create_point_model",
            arguments={"name": name},
            published=_PUBLISHED.get(name),
        )
        for name, preset in POINT_MODELS.items()
    )
)
