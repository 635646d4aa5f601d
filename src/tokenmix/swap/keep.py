"""Which weights of an attention layer go on in the mixer that takes its place, and why.

A weight is kept where the new layer uses it for what the old one did: to read queries, keys or values from the same
tokens, or to write what was read to the same tokens. Everything else starts new.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tokenmix.layers.base import Mixer
from tokenmix.layers.external import ExternalAttention
from tokenmix.layers.less_attention import LessAttention
from tokenmix.layers.multihead_external import MultiHeadExternalAttention
from tokenmix.layers.self_attention import SelfAttention
from tokenmix.layers.simplified import SimplifiedSelfAttention
from tokenmix.swap.host import Affine, Source

__all__ = ["Kept", "keep_weights"]


class Kept(NamedTuple):
    """The projections that were kept, and why those."""

    names: tuple[str, ...]
    why: str


@torch.no_grad()
def keep_weights(source: Source, mixer: Mixer) -> Kept:
    """Copy into a new mixer what has a meaning there."""
    if source.remark and not any((source.query, source.key, source.value, source.out)):
        return Kept((), source.remark)
    rule = RULES.get(type(mixer))
    if rule is None:
        return Kept((), f"{type(mixer).__name__} has no place for the projections of attention")
    kept = rule(source, mixer)
    return (
        kept if not source.remark else Kept(kept.names, f"{kept.why}; {source.remark}" if kept.why else source.remark)
    )


def _self(source: Source, mixer: SelfAttention) -> Kept:
    weights = mixer.qkv.weight.chunk(3)
    biases = (None,) * 3 if mixer.qkv.bias is None else mixer.qkv.bias.chunk(3)
    same = "softmax over the keys" if mixer.normalization == "softmax" else "double normalisation of the map"
    return _attention(source, mixer, (*zip(weights, biases, strict=True),), f"the same projections, {same}")


def _less(source: Source, mixer: LessAttention) -> Kept:
    if mixer.qk is None:
        return Kept((), "query and key are those of the layer before")
    weights = (*mixer.qk.weight.chunk(2), mixer.v.weight)
    biases = (None,) * 3 if mixer.qk.bias is None else (*mixer.qk.bias.chunk(2), mixer.v.bias)
    why = "Theta and Psi start as the identity, so the layer starts as the attention it replaces"
    return _attention(source, mixer, (*zip(weights, biases, strict=True),), why)


def _attention(
    source: Source,
    mixer: SelfAttention | LessAttention,
    targets: tuple[tuple[Tensor, Tensor | None], ...],
    why: str,
) -> Kept:
    """Query, key and value by their targets, and the output projection."""
    kept = []
    same_heads = source.num_heads == mixer.num_heads
    if same_heads and _both(source.query, targets[0], source.key, targets[1]):
        kept += ["query", "key"]
    if _both(source.value, targets[2], source.out, (mixer.proj.weight, mixer.proj.bias)):
        kept += ["value", "out"]
    if len(kept) == 4:
        return Kept(tuple(kept), why)
    reasons = [
        "value and out go on reading and writing the same features" if "value" in kept else "",
        "" if same_heads else f"query and key were made for {source.num_heads} heads",
        "its query, key and value have no biases" if source.qkv_bias and targets[0][1] is None else "",
    ]
    return Kept(tuple(kept), "; ".join(filter(None, reasons)))


def _external(source: Source, mixer: ExternalAttention) -> Kept:
    kept = [name for name in ("query", "out") if _into(getattr(source, name), getattr(mixer, name))]
    return Kept(
        tuple(kept), "its memories stand for the keys and values that attention made from the tokens, so they are new"
    )


def _multihead_external(source: Source, mixer: MultiHeadExternalAttention) -> Kept:
    if mixer.expansion != 1 or mixer.num_heads != source.num_heads:
        heads = mixer.expansion * mixer.num_heads
        return Kept((), f"it has {heads} heads and attention {source.num_heads or 'none'}: copies would stay copies")
    kept = [name for name in ("query", "out") if _into(getattr(source, name), getattr(mixer, name))]
    return Kept(tuple(kept), "its memories, which all heads share, are new")


def _simplified(source: Source, mixer: SimplifiedSelfAttention) -> Kept:
    """W_v W_o as one: the mixer mixes the tokens themselves, so that what reads and what writes them are one map."""
    if not isinstance(mixer.proj, nn.Linear):
        return Kept((), "it has no weights; with output_projection=True it keeps value and out, as one map")
    if source.value is None or source.out is None:
        return Kept((), "")
    both = source.out.weight @ source.value.weight
    bias = torch.zeros_like(mixer.proj.bias) if source.out.bias is None else source.out.bias
    if source.value.bias is not None:
        # Rows of the map sum to 1, so the bias of the values reaches every token whole.
        bias = bias + source.out.weight @ source.value.bias
    mixer.proj.weight.copy_(both)
    mixer.proj.bias.copy_(bias)
    return Kept(("value", "out"), "value and out as one map, W_o W_v, behind the map of the tokens themselves")


RULES: dict[type[Mixer], Callable[[Source, Any], Kept]] = {
    SelfAttention: _self,
    LessAttention: _less,
    ExternalAttention: _external,
    MultiHeadExternalAttention: _multihead_external,
    SimplifiedSelfAttention: _simplified,
}


def _both(
    first: Affine | None,
    first_target: tuple[Tensor, Tensor | None],
    second: Affine | None,
    second_target: tuple[Tensor, Tensor | None],
) -> bool:
    """Copy two projections that have a meaning only together."""
    if not (_fits(first, *first_target) and _fits(second, *second_target)):
        return False
    return _copy(first, *first_target) and _copy(second, *second_target)


def _into(source: Affine | None, layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) and _copy(source, layer.weight, layer.bias)


def _fits(source: Affine | None, weight: Tensor, bias: Tensor | None) -> bool:
    if source is None or source.weight.shape != weight.shape:
        return False
    return bias is not None or source.bias is None


def _copy(source: Affine | None, weight: Tensor, bias: Tensor | None) -> bool:
    """Copy a projection, with bias 0 where it had none; False if it does not fit."""
    if source is None or not _fits(source, weight, bias):
        return False
    weight.copy_(source.weight)
    if bias is not None and source.bias is not None:
        bias.copy_(source.bias)
    elif bias is not None:
        bias.zero_()
    return True
