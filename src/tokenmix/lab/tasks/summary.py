"""What `tokenmix info` says of models of images, and the published figures next to ours."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, cast

from tokenmix.errors import UserError
from tokenmix.lab.train.programs import model_summary
from tokenmix.models.interface import CountedModel
from tokenmix.models.registry import create_model, create_on_meta
from tokenmix.registry import MODELS


def summarize_image_model(name: str, sizes: Mapping[str, Any], model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters and multiply-adds of a model of images part by part; of one that counts none, its parameters."""
    other = next((size for size in sizes if size != "img_size"), None)
    if other is not None:
        raise UserError(f"{name} takes images; leave --{other.replace('_', '-')} {sizes[other]} out")
    network = create_model(name, **sizes, **model_kwargs)
    summary, model = model_summary(name, network), cast(object, network)
    if not isinstance(model, CountedModel):
        return summary
    return {
        **{key: summary[key] for key in ("model", "task")},
        "mixer": model.mixer_name,
        "image": list(model.img_size),
        "grid": list(model.grid_size),
        "tokens": model.num_tokens,
        **{key: summary[key] for key in ("parameters", "macs")},
        "blocks": [
            {key.replace("mixer_", "mixer "): value for key, value in row._asdict().items()}
            for row in model.cost_table()
        ],
        "warnings": model.warnings(),
        **published_beside(name),
    }


def published_beside(name: str) -> dict[str, Any]:
    """The paper's figures, and ours of the preset: what was asked for may have another size or other arguments."""
    theirs = MODELS[name].published if name in MODELS else None
    if theirs is None:
        return {"published": None}
    preset: Any = create_on_meta(name)
    if theirs.part is not None:
        row = next(row for row in preset.cost_table() if row[0] == theirs.part)
        return {"published": asdict(theirs), "preset": {"parameters": row.parameters}}
    ours: dict[str, Any] = {"parameters": sum(p.numel() for p in preset.parameters())}
    if theirs.macs is not None:
        ours |= {"image": list(preset.img_size), "macs": preset.macs()}
    return {"published": asdict(theirs), "preset": ours}
