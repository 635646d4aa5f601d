"""A new mixer for each attention, before anything is changed."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from tokenmix.errors import UserError
from tokenmix.layers.base import Mixer
from tokenmix.layers.table import build
from tokenmix.models.isotropic import GridMixer
from tokenmix.swap.host import Refused, Source, is_causal
from tokenmix.swap.keep import Kept, keep_weights
from tokenmix.swap.places import Place
from tokenmix.swap.probe import Probe, count_alone
from tokenmix.swap.report import Skipped, SwapRow, count_parameters

__all__ = ["Order", "Plan", "make_plans"]


@dataclass(frozen=True)
class Order:
    """What is to be put in, and what is known of the model.

    Attributes:
        label: name of the mixer.
        layer: its class.
        kwargs: its arguments.
        num_tokens: N if the user gave it.
        grid: (height, width) on which the model's tokens lie, if it tells.
        probe: what a forward pass showed.
        strict: a place that cannot be swapped is an error.
    """

    label: str
    layer: type[Mixer]
    kwargs: Mapping[str, Any]
    num_tokens: int | None
    grid: tuple[int, int] | None
    probe: Probe
    strict: bool

    def counts(self, place: Place) -> list[int]:
        """Numbers of tokens that a place gets, one for each call in a forward pass."""
        seen = [call.num_tokens for call in self.probe.calls.get(id(place.module), [])]
        return seen or ([self.num_tokens] if self.num_tokens else [])


@dataclass(frozen=True)
class Plan:
    """A place, and what will stand there."""

    place: Place
    replacement: nn.Module
    row: SwapRow


def make_plans(places: Sequence[Place], order: Order) -> tuple[list[Plan], list[Skipped]]:
    """Plans, and the places that cannot be swapped; `UserError` if that is all of them, or any when `strict`."""
    plans, skipped = [], []
    for place in places:
        try:
            plans.append(_plan(place, order))
        except Refused as refusal:
            skipped.append(Skipped(place.name, place.kind, str(refusal)))
    if skipped and (order.strict or not plans):
        first = skipped[0]
        more = f" (and {len(skipped) - 1} more)" if len(skipped) > 1 else ""
        raise UserError(f"{first.name} ({first.kind}) cannot become {order.label}: {first.reason}{more}")
    return plans, skipped


def _plan(place: Place, order: Order) -> Plan:
    source = place.host.read(place.module)
    built = _build(place, source, order)
    for call in order.probe.calls.get(id(place.module), []):
        if call.refusal:
            raise Refused(call.refusal)
        if call.causal and not is_causal(built):
            raise Refused(_not_causal(order, "it is called with is_causal=True"))
    kept = keep_weights(source, built)
    mixer = _on_grid(built, order, order.counts(place))
    replacement = place.host.adapt(place.module, mixer).train(place.module.training)
    return Plan(place, replacement, _row(place, source, order, mixer, kept))


def _build(place: Place, source: Source, order: Order) -> Mixer:
    """The mixer, with what it can take over from the attention; the user's arguments come first."""
    parameters = inspect.signature(order.layer).parameters
    if source.causal and not order.layer.capabilities.causal:
        raise Refused(_not_causal(order, "it is causal"))
    offered = {
        "num_heads": source.num_heads if source.num_heads and source.dim % source.num_heads == 0 else None,
        "qkv_bias": source.qkv_bias,
        "dropout": source.dropout or None,
        "attention_dropout": source.attention_dropout or None,
        "causal": source.causal or None,
    }
    args = {name: value for name, value in offered.items() if value is not None and name in parameters}
    factory = {} if source.like is None else {"device": source.like.device, "dtype": source.like.dtype}
    args = {**args, **factory, **order.kwargs}
    return build(order.layer, f"mixer {order.label!r}", source.dim, _num_tokens(place, order), args)


def _num_tokens(place: Place, order: Order) -> int | None:
    """N to build for, None for a mixer that does not ask."""
    if "num_tokens" not in inspect.signature(order.layer).parameters:
        return None
    counts = order.counts(place)
    if order.layer.capabilities.length == "fixed" and len(set(counts)) > 1:
        raise Refused(
            f"it is called with {sorted(set(counts))} tokens, and {order.label} takes one number of them only"
        )
    found = order.num_tokens or max(counts, default=None)
    if found is None:
        reason = order.probe.note or "the forward pass does not call it"
        raise Refused(f"{order.label} learns over tokens, and how many is not known: give num_tokens ({reason})")
    return found


def _not_causal(order: Order, what: str) -> str:
    if order.layer.capabilities.causal:
        return f"{what}, and {order.label} is not: give mixer_kwargs={{'causal': True}}"
    return f"{what}, and {order.label} has no causal form"


def _on_grid(mixer: Mixer, order: Order, counts: Sequence[int]) -> Mixer:
    """A mixer of maps as one of tokens, which must lie on the model's grid."""
    if mixer.capabilities.layout != "2d":
        return mixer
    if order.grid is None or not counts:
        raise Refused(f"{order.label} works on maps (B, C, H, W), and the model does not tell a grid of its tokens")
    height, width = order.grid
    other = next((count for count in counts if count != height * width), None)
    if other is not None:
        raise Refused(
            f"{order.label} works on maps, and {other} tokens are no {height} x {width} grid: a class token or "
            "registers are among them; timm builds without by class_token=False, reg_tokens=0, global_pool='avg'"
        )
    return GridMixer(mixer, order.grid)


def _row(place: Place, source: Source, order: Order, mixer: Mixer, kept: Kept) -> SwapRow:
    counts, why = order.counts(place), kept.why
    if source.attention_dropout and "attention_dropout" not in inspect.signature(order.layer).parameters:
        why += f"; the dropout of {source.attention_dropout:g} on the map has no place in it"
    alone = {n: count_alone(place.module, place.host, source.dim, n) for n in set(counts)}
    return SwapRow(
        name=place.name,
        before=place.kind,
        after=order.label,
        num_tokens=max(counts, default=None),
        parameters_before=count_parameters(place.module),
        parameters_after=count_parameters(mixer),
        macs_before=sum(alone[n] for n in counts) if counts else None,
        macs_after=sum(mixer.macs(n) for n in counts) if counts else None,
        kept=kept.names,
        why=why,
    )
