"""Convert published checkpoints to our layout and back, and resize our checkpoints to another image size.

A layout is a table of renamings. The functions take state dicts: load files with safetensors, or with `torch.load(path,
weights_only=True)`.
"""

import copy
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from tokenmix.errors import UserError, unknown_name

__all__ = ["convert", "rename", "resize", "to_timm_gmlp"]

Source = Literal["eamlp", "eanet", "timm-gmlp"]

# Parts of keys in our gMLP: in timm's; the first part in a key applies.
TIMM_GMLP = {
    ".norm1.": ".norm.",
    ".mixer.proj_in.": ".mlp_channels.fc1.",
    ".mixer.gating.norm.": ".mlp_channels.gate.norm.",
    ".mixer.gating.": ".mlp_channels.gate.proj.",
    ".mixer.proj_out.": ".mlp_channels.fc2.",
}
# The authors' external attention block: (pattern of their key, our key).
BLOCK = [
    (r"(conv1\.(?:weight|bias))", r"\1"),
    (r"linear_0\.weight", r"memory.key_memory"),
    (r"linear_1\.weight", r"memory.value_memory"),
    (r"conv2\.0\.weight", r"conv2.weight"),
    (r"conv2\.1\.(\w+)", r"norm.\1"),
]
# (pattern of their key, our key); the first pattern that matches the whole key applies.
LAYOUTS: dict[str, list[tuple[str, str]]] = {
    "eamlp": [
        (r"tokens_to_token\.attention(\d)\.attn\.q_linear\.(\w+)", r"stem.attentions.<\1>.query.\2"),
        (r"tokens_to_token\.attention(\d)\.attn\.linear_0\.weight", r"stem.attentions.<\1>.key_memory"),
        (r"tokens_to_token\.attention(\d)\.attn\.linear_1\.weight", r"stem.attentions.<\1>.value_memory"),
        (r"tokens_to_token\.attention(\d)\.attn\.linear_1\.bias", r"stem.attentions.<\1>.value_bias"),
        (r"tokens_to_token\.attention(\d)\.attn\.proj\.(\w+)", r"stem.attentions.<\1>.proj.\2"),
        (r"tokens_to_token\.attention(\d)\.mlp\.fc1\.(\w+)", r"stem.attentions.<\1>.mlp.0.\2"),
        (r"tokens_to_token\.attention(\d)\.mlp\.fc2\.(\w+)", r"stem.attentions.<\1>.mlp.2.\2"),
        (r"tokens_to_token\.attention(\d)\.(norm[12]\.\w+)", r"stem.attentions.<\1>.\2"),
        (r"tokens_to_token\.(project\.\w+)", r"stem.\1"),
        (r"(blocks\.\d+)\.attn\.trans_dims\.(\w+)", r"\1.mixer.query.\2"),
        (r"(blocks\.\d+)\.attn\.linear_0\.weight", r"\1.mixer.memory.key_memory"),
        (r"(blocks\.\d+)\.attn\.linear_0\.bias", r"\1.mixer.memory.key_bias"),
        (r"(blocks\.\d+)\.attn\.linear_1\.weight", r"\1.mixer.memory.value_memory"),
        (r"(blocks\.\d+)\.attn\.linear_1\.bias", r"\1.mixer.memory.value_bias"),
        (r"(blocks\.\d+)\.attn\.proj\.(\w+)", r"\1.mixer.proj.\2"),
        (r"(blocks\.\d+)\.mlp\.fc1\.(\w+)", r"\1.mlp.0.\2"),
        (r"(blocks\.\d+)\.mlp\.fc2\.(\w+)", r"\1.mlp.2.\2"),
        (r"((?:blocks\.\d+\.norm[12]|norm|head)\.\w+|cls_token|pos_embed)", r"\1"),
    ],
    "eanet": [(rf"(?:.*\.)?{theirs}", ours) for theirs, ours in BLOCK],
    "eanet-network": [
        (r"extractor\.0\.(\d+\.\w+)", r"backbone.conv1.\1"),
        (r"extractor\.1\.(\w+)", r"backbone.bn1.\1"),
        *((rf"extractor\.{3 + i}\.(.+)", rf"backbone.layer{i}.\1") for i in range(1, 5)),
        (r"fc0\.conv\.(\w+)", r"reduce.0.\1"),
        (r"fc0\.bn\.(\w+)", r"reduce.1.\1"),
        *((rf"linu\.{theirs}", rf"context.{ours}") for theirs, ours in BLOCK),
        (r"fc1\.0\.conv\.(\w+)", r"head.0.\1"),
        (r"fc1\.0\.bn\.(\w+)", r"head.1.\1"),
        (r"fc2\.(\w+)", r"classifier.\1"),
    ],
    "timm-gmlp": [
        (r"(stem\.proj\.\w+|norm\.\w+|head\.\w+)", r"\1"),
        *((rf"(blocks\.\d+){re.escape(theirs)}(\w+)", rf"\1{ours}\2") for ours, theirs in TIMM_GMLP.items()),
    ],
}
# Substrings of keys that identify a whole model in another layout; ours never contains them.
MARKS = {"eamlp": "tokens_to_token.", "timm-gmlp": ".mlp_channels.", "eanet-network": "extractor."}
# Memories stored there as (d, S) or as a 1 x 1 convolution, and here as (S, d).
TRANSPOSED = ("value_memory",)


def convert(state_dict: Mapping[str, Tensor], source: Source, to: nn.Module) -> dict[str, Tensor]:
    """Convert a state dict from another code base to ours, checked against a model.

    Keys may have the prefix `module.` of `DataParallel`. BatchNorm's `num_batches_tracked`, which PyTorch before 0.4.1
    did not save, defaults to 0.

    Args:
        state_dict: the state dict to convert.
        source: `"eamlp"`, the authors' EAMLP; `"eanet"`, the authors' segmentation network or its block alone; or
            `"timm-gmlp"`, timm's gMLP.
        to: our model or layer; the result must have its keys and shapes.

    Returns:
        A state dict for `to.load_state_dict`.

    Raises:
        UserError: a key is unknown to the layout, one of our keys has no source, or a shape differs.
    """
    if source not in get_args(Source):
        raise unknown_name("checkpoint layout", source, get_args(Source))
    state_dict, wanted = _unwrapped(state_dict), to.state_dict()
    layout = (
        "eanet-network" if source == "eanet" and any(key.startswith("extractor.") for key in state_dict) else source
    )
    counters = {key: torch.tensor(0) for key in wanted if key.endswith("num_batches_tracked")}
    found = {**counters, **_translated(state_dict, layout, wanted)}
    missing, extra = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing or extra:
        what = f"lacks {missing[0]!r}" if missing else f"has {extra[0]!r}, which the model has not"
        raise UserError(f"the {source} checkpoint {what}; build the model with its depth and options")
    for name, value in found.items():
        if value.shape != wanted[name].shape:
            raise UserError(
                f"the {source} checkpoint has {name} of shape {tuple(value.shape)}, the model "
                f"{tuple(wanted[name].shape)}; build the model with the checkpoint's sizes and number of classes"
            )
    return found


def rename(state_dict: Mapping[str, Tensor], to: nn.Module) -> dict[str, Tensor]:
    """Rename a whole model's state dict (EAMLP, EANet, timm's gMLP, or ours) to our layout; shapes are not checked."""
    state_dict = _unwrapped(state_dict)
    for source, mark in MARKS.items():
        if any(mark in key for key in state_dict):
            return _translated(state_dict, source, to.state_dict())
    return dict(state_dict)


def resize(
    state_dict: Mapping[str, Tensor], model: Any, *, img_size: int | tuple[int, int] | None = None
) -> dict[str, Tensor]:
    """Adapt a state dict in our layout to a model with another image size.

    Weights over the tokens (gates, score transforms, positional embeddings) are interpolated as in the model's
    `set_input_size`. Other entries are unchanged.

    Args:
        state_dict: of a model that differs from `model` only in its image size.
        model: one of our models, with the new image size.
        img_size: image size in training, for example (224, 288); inferred from the shapes for square images.

    Raises:
        UserError: img_size is missing and a number of tokens is not a square, or shapes do not fit img_size.
    """
    probe = copy.deepcopy(model).to("meta")
    probe.set_input_size((2 * model.img_size[0], 2 * model.img_size[1]))
    wanted, other = model.state_dict(), probe.state_dict()
    sized = [key for key in state_dict if key in wanted and wanted[key].shape != other[key].shape]
    differing = next((key for key in sized if state_dict[key].shape != wanted[key].shape), None)
    if img_size is None:
        if differing is None:
            return dict(state_dict)
        img_size = _square(differing, state_dict[differing], wanted[differing], model)
    twin = copy.deepcopy(model)
    twin.set_input_size(img_size)
    given, built = {key: state_dict[key] for key in sized}, twin.state_dict()
    for key, value in given.items():
        if value.shape != built[key].shape:
            raise UserError(
                f"the checkpoint has {key} of shape {tuple(value.shape)}, images of {img_size} px give "
                f"{tuple(built[key].shape)}; give the img_size=(height, width) at which it was trained"
            )
    twin.load_state_dict(given, strict=False)
    twin.set_input_size(model.img_size)
    return {**state_dict, **{key: value for key, value in twin.state_dict().items() if key in given}}


def _square(key: str, theirs: Tensor, ours: Tensor, model: Any) -> int:
    """Side of the square training image, from the number of tokens of a tensor."""
    axis = next(i for i, (a, b) in enumerate(zip(theirs.shape, ours.shape, strict=True)) if a != b)
    prefix = getattr(model, "num_prefix_tokens", 0) if key.endswith("pos_embed") else 0
    tokens, own = theirs.shape[axis] - prefix, ours.shape[axis] - prefix
    side = math.isqrt(max(tokens, 0))
    if side < 1 or side * side != tokens:
        raise UserError(
            f"the checkpoint has {key} for {tokens} tokens, which do not form a square grid; give the "
            "img_size=(height, width) at which it was trained"
        )
    # A grid may be rounded up, so take the nearest of the model's reductions.
    estimate = math.sqrt(math.prod(model.img_size) / own)
    reductions = [entry["reduction"] for entry in model.feature_info]
    return side * min(reductions, key=lambda reduction: abs(reduction - estimate))


def to_timm_gmlp(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the state dict of our gMLP to timm's layout."""
    renamed = {}
    for key, value in state_dict.items():
        ours = next((part for part in TIMM_GMLP if part in key), None)
        renamed[key if ours is None else key.replace(ours, TIMM_GMLP[ours])] = value
    return renamed


def _unwrapped(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    wrapped = all(key.startswith("module.") for key in state_dict)
    return {key.removeprefix("module.") if wrapped else key: value for key, value in state_dict.items()}


def _translated(state_dict: Mapping[str, Tensor], source: str, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for key, value in state_dict.items():
        matches = ((re.fullmatch(pattern, key), ours) for pattern, ours in LAYOUTS[source])
        match, ours = next(((match, ours) for match, ours in matches if match), (None, ""))
        if match is None:
            raise UserError(
                f"{key!r} is not a key of the {source} layout; give the layout of this checkpoint as source"
            )
        # <1> is an index from 1 in their names and from 0 in ours.
        name = re.sub(r"<(\d)>", lambda m: str(int(m[1]) - 1), match.expand(ours))
        if name.endswith(TRANSPOSED):
            value = value.flatten(1).mT.contiguous()
        elif name in wanted and value.dim() > wanted[name].dim():
            value = value.flatten(1)
        found[name] = value
    return found
