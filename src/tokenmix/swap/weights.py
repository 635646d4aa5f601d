"""Which weights of an attention layer are kept in the mixer that replaces it, and why.

A weight is kept where the new layer uses it for what the old one did: to read queries, keys or values from the same
tokens, or to write what was read to the same tokens. Everything else starts new.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from tokenmix.layers.base import Mixer
from tokenmix.layers.external import ExternalAttention
from tokenmix.layers.less_attention import LessAttention
from tokenmix.layers.linear_attention import LinearAttention
from tokenmix.layers.multihead_external import MultiHeadExternalAttention
from tokenmix.layers.self_attention import SelfAttention
from tokenmix.layers.simplified import SimplifiedSelfAttention
from tokenmix.swap.adapter import Affine, AttentionWeights


class KeptWeights(NamedTuple):
    """The projections that were kept, and why those."""

    names: tuple[str, ...]
    why: str


@torch.no_grad()
def keep_weights(old: AttentionWeights, mixer: Mixer) -> KeptWeights:
    """Copy the weights that play the same role into a new mixer."""
    if old.remark and not any((old.query, old.key, old.value, old.out)):
        return KeptWeights((), old.remark)
    rule = RULES.get(type(mixer))
    if rule is None:
        return KeptWeights((), f"{type(mixer).__name__} has no place for the projections of attention")
    kept = rule(old, mixer)
    return KeptWeights(kept.names, "; ".join(filter(None, (kept.why, old.remark))))


def _self(old: AttentionWeights, mixer: SelfAttention) -> KeptWeights:
    same = "softmax over the keys" if mixer.normalization == "softmax" else "double normalisation of the map"
    return _attention(old, mixer, Affine.parts(mixer.qkv.weight, mixer.qkv.bias), f"the same projections, {same}")


def _linear(old: AttentionWeights, mixer: LinearAttention) -> KeptWeights:
    targets = Affine.parts(mixer.qkv.weight, mixer.qkv.bias)
    return _attention(old, mixer, targets, "the same projections, relu of query and key in place of the softmax")


def _less(old: AttentionWeights, mixer: LessAttention) -> KeptWeights:
    if mixer.qk is None:
        return KeptWeights((), "query and key are those of the layer before")
    targets = [*Affine.parts(mixer.qk.weight, mixer.qk.bias, 2), Affine.of(mixer.v)]
    why = "Theta and Psi start as the identity, so the layer starts as the attention it replaces"
    if mixer.residual_scale is not None:
        why = "the transformed scores of the layer before are added times 0 at the start"
    return _attention(old, mixer, targets, why)


def _attention(
    old: AttentionWeights, mixer: SelfAttention | LinearAttention | LessAttention, targets: Sequence[Affine], why: str
) -> KeptWeights:
    """Query, key and value by their targets, and the output projection."""
    kept = []
    same_heads = old.num_heads == mixer.num_heads
    if same_heads and _both(old.query, targets[0], old.key, targets[1]):
        kept += ["query", "key"]
    if _both(old.value, targets[2], old.out, Affine.of(mixer.proj)):
        kept += ["value", "out"]
    if len(kept) == 4:
        return KeptWeights(tuple(kept), why)
    reasons = [
        "value and out continue reading and writing the same features" if "value" in kept else "",
        "" if same_heads else f"query and key were made for {old.num_heads} heads",
        "its query, key and value have no biases" if old.qkv_bias and targets[0][1] is None else "",
    ]
    return KeptWeights(tuple(kept), "; ".join(filter(None, reasons)))


def _external(old: AttentionWeights, mixer: ExternalAttention) -> KeptWeights:
    pairs = {"query": (old.query, mixer.query), "out": (old.out, mixer.proj)}
    kept = [name for name, (theirs, ours) in pairs.items() if _into(theirs, ours)]
    return KeptWeights(
        tuple(kept), "its memories stand for the keys and values that attention made from the tokens, so they are new"
    )


def _multihead_external(old: AttentionWeights, mixer: MultiHeadExternalAttention) -> KeptWeights:
    if mixer.expansion != 1 or mixer.num_heads != old.num_heads:
        heads = mixer.expansion * mixer.num_heads
        return KeptWeights(
            (), f"it has {heads} heads and attention {old.num_heads or 'none'}: copies would stay copies"
        )
    pairs = {"query": (old.query, mixer.query), "out": (old.out, mixer.proj)}
    kept = [name for name, (theirs, ours) in pairs.items() if _into(theirs, ours)]
    return KeptWeights(tuple(kept), "its memories, which all heads share, are new")


def _simplified(old: AttentionWeights, mixer: SimplifiedSelfAttention) -> KeptWeights:
    """W_v W_o as one: the mixer mixes the tokens themselves, so that what reads and what writes them are one map."""
    if not isinstance(mixer.proj, nn.Linear):
        return KeptWeights((), "it has no weights; with output_projection=True it keeps value and out, as one map")
    if old.value is None or old.out is None:
        return KeptWeights((), "")
    both = old.out.weight @ old.value.weight
    bias = torch.zeros_like(mixer.proj.bias) if old.out.bias is None else old.out.bias
    if old.value.bias is not None:
        # Rows of the map sum to 1, so the bias of the values reaches every token whole.
        bias = bias + old.out.weight @ old.value.bias
    mixer.proj.weight.copy_(both)
    mixer.proj.bias.copy_(bias)
    return KeptWeights(("value", "out"), "value and out as one map, W_o W_v, after the map of the tokens themselves")


RULES: dict[type[Mixer], Callable[[AttentionWeights, Any], KeptWeights]] = {
    SelfAttention: _self,
    LinearAttention: _linear,
    LessAttention: _less,
    ExternalAttention: _external,
    MultiHeadExternalAttention: _multihead_external,
    SimplifiedSelfAttention: _simplified,
}


def _both(first: Affine | None, first_target: Affine, second: Affine | None, second_target: Affine) -> bool:
    """Copy two projections that have a meaning only together."""
    return _fits(second, second_target) and _copy(first, first_target) and _copy(second, second_target)


def _into(old: Affine | None, layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) and _copy(old, Affine.of(layer))


def _fits(old: Affine | None, target: Affine) -> bool:
    if old is None or old.weight.shape != target.weight.shape:
        return False
    return target.bias is not None or old.bias is None


def _copy(old: Affine | None, target: Affine) -> bool:
    """Copy a projection, with bias 0 where it had none; False if it does not fit."""
    if old is None or not _fits(old, target):
        return False
    target.weight.copy_(old.weight)
    if target.bias is not None:
        target.bias.copy_(torch.zeros_like(target.bias) if old.bias is None else old.bias)
    return True
