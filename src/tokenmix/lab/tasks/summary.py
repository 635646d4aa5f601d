"""What `tokenmix info` says of models of images, and the published figures next to ours."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tokenmix.errors import UserError
from tokenmix.lab.train.programs import model_summary
from tokenmix.layers import LessAttention, SelfAttention
from tokenmix.models.registry import create_model, create_on_meta
from tokenmix.registry import MODELS


def summarize_image_model(name: str, sizes: Mapping[str, Any], model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters and multiply-adds of a model of images part by part; of one that counts none, its parameters."""
    other = next((size for size in sizes if size != "img_size"), None)
    if other is not None:
        raise UserError(f"{name} takes images; leave --{other.replace('_', '-')} {sizes[other]} out")
    model: Any = create_model(name, **sizes, **model_kwargs)
    summary = model_summary(name, model)
    if not hasattr(model, "mixer_name"):
        return summary
    return {
        **{key: summary[key] for key in ("model", "task")},
        "mixer": model.mixer_name,
        "image": list(model.img_size),
        "grid": list(model.grid_size),
        "tokens": model.num_tokens,
        **{key: summary[key] for key in ("parameters", "macs")},
        "blocks": _blocks(model),
        "warnings": model.warnings() if hasattr(model, "warnings") else _warnings(model),
        **published_beside(name),
    }


def _blocks(model: Any) -> list[dict[str, Any]]:
    """One row for each block; models of several parts have rows of their own."""
    if hasattr(model, "cost_table"):
        return [row._asdict() for row in model.cost_table()]
    return [
        {
            "block": i,
            "mixer": type(getattr(b.mixer, "inner", b.mixer)).__name__,
            "mixer parameters": sum(p.numel() for p in b.mixer.parameters()),
            "mixer macs": b.mixer.macs(model.num_tokens),
        }
        for i, b in enumerate(model.blocks)
    ]


def _warnings(model: Any) -> list[str]:
    """Less-attention that takes no fewer multiply-adds than the self-attention in its place would."""
    mixers = [getattr(block.mixer, "inner", block.mixer) for block in getattr(model, "blocks", ())]
    less = [mixer for mixer in mixers if isinstance(mixer, LessAttention)]
    if not less:
        return []
    n, layer = model.num_tokens, less[0]
    own, vanilla = layer.macs(n), SelfAttention(layer.dim, num_heads=layer.num_heads, device="meta").macs(n)
    if own < vanilla:
        return []
    return [
        f"the {len(less)} less-attention layers do not pay at {n} tokens, {own / 1e6:.4g} M multiply-adds against "
        f"{vanilla / 1e6:.4g} M of self-attention; they do with fewer tokens, that is a smaller image or larger "
        "patches, or in a wider model"
    ]


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
