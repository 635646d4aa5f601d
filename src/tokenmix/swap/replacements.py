"""Build a new mixer for each attention, before anything is changed."""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from tokenmix.errors import UserError
from tokenmix.layers.base import GridMixer, Mixer, count_parameters
from tokenmix.layers.less_attention import LessAttention
from tokenmix.layers.self_attention import SelfAttention
from tokenmix.layers.table import build_mixer, count_of
from tokenmix.swap.adapter import CROSS, AttentionWeights, SwapError, is_causal
from tokenmix.swap.carrying import Carrying
from tokenmix.swap.probe import Probe
from tokenmix.swap.report import SkippedAttention, SwapRow
from tokenmix.swap.sites import AttentionSite
from tokenmix.swap.weights import KeptWeights, keep_weights


@dataclass(frozen=True)
class SwapRequest:
    """The requested swap, and what is known of the model.

    Attributes:
        label: name of the mixer.
        layer: its class.
        kwargs: its arguments.
        num_tokens: N if the user gave it.
        grid: (height, width) of the model's tokens, if known.
        probe: what a forward pass showed.
        strict: a site that cannot be swapped is an error.
        drop_positions: positions inside an attention are left out; else it cannot be swapped.
    """

    label: str
    layer: type[Mixer]
    kwargs: Mapping[str, Any]
    num_tokens: int | None
    grid: tuple[int, int] | None
    probe: Probe
    strict: bool
    drop_positions: bool = False

    @property
    def carries(self) -> bool:
        """Whether the mixers transform the scores of the layer before."""
        given = self.kwargs.get("residual") or self.kwargs.get("scores_from") == "previous"
        return issubclass(self.layer, LessAttention) and bool(given)

    def counts(self, site: AttentionSite) -> list[int]:
        """Numbers of tokens that a site gets, one for each call in a forward pass."""
        seen = [call.num_tokens for call in self.probe.calls.get(id(site.module), [])]
        return seen or ([self.num_tokens] if self.num_tokens else [])


@dataclass(frozen=True)
class Replacement:
    """A site, and what replaces it."""

    site: AttentionSite
    replacement: nn.Module
    row: SwapRow
    carrying: Carrying | None = None


def plan_replacements(
    sites: Sequence[AttentionSite], request: SwapRequest
) -> tuple[list[Replacement], list[SkippedAttention]]:
    """The replacements, and the sites that are skipped; `UserError` if that is all of them, or any if `strict`."""
    replacements: list[Replacement] = []
    skipped: list[SkippedAttention] = []
    order = {module: place for place, module in reversed(list(enumerate(request.probe.order)))}
    for site in sorted(sites, key=lambda site: order.get(id(site.module), 0)) if request.carries else sites:
        try:
            replacements.append(_plan_one(site, request, replacements[-1] if replacements else None))
        except SwapError as refusal:
            skipped.append(SkippedAttention(site.name, site.kind, str(refusal)))
    if skipped and (request.strict or not replacements):
        alike: dict[str, list[SkippedAttention]] = {}
        for one in skipped:
            alike.setdefault(one.reason, []).append(one)
        reasons = [
            f"{first.name} ({first.kind}) cannot become {request.label}: {reason}"
            + (f" (and {len(others)} more)" if others else "")
            for reason, (first, *others) in alike.items()
        ]
        raise UserError("; ".join(reasons))
    if len(replacements) == 1 and replacements[0].carrying is not None:
        name = replacements[0].site.name
        raise UserError(f"{name} alone has no layer before it whose scores it could take; choose two or more by where")
    return replacements, skipped


def _plan_one(site: AttentionSite, request: SwapRequest, before: Replacement | None) -> Replacement:
    old = site.adapter.read(site.module)
    calls = request.probe.calls.get(id(site.module), [])
    # Stacks of ours pass scores on themselves.
    carries = request.carries and id(site.module) not in request.probe.mixed
    first = carries and before is None
    if first:
        # The first layer transforms nothing: it makes the scores.
        known = inspect.signature(SelfAttention).parameters
        kwargs = {name: value for name, value in request.kwargs.items() if name in known}
        request = replace(request, label="self", layer=SelfAttention, kwargs=kwargs)
    built = _build_replacement(site, old, request)
    if not calls:
        _check_unseen(site, request)
    for call in calls:
        if call.refusal:
            raise SwapError(call.refusal)
        if call.causal and not is_causal(built):
            raise SwapError(_not_causal(request, "it is called with is_causal=True"))
    positions = tuple(dict.fromkeys([*old.positions, *(name for call in calls for name in call.positions)]))
    if positions and not request.drop_positions:
        raise SwapError(
            f"{', '.join(positions)} adds positions to its scores, which {request.label} has no place for; "
            "drop='positions' leaves them out"
        )
    kept = keep_weights(old, built)
    if first:
        kept = kept._replace(why=f"{kept.why}; as self, which makes the scores of the layers after it")
    mixer = _on_grid(built, request, request.counts(site))
    row = _row(site, old, request, mixer, kept, positions)
    carrying = None
    if carries:
        if before is not None:
            _check_one_grid(before, site, row, built, request)
        link = None if before is None or before.carrying is None else before.carrying.after
        mixer = carrying = Carrying(mixer, link)
        if before is not None and before.carrying is not None:
            before.carrying.last = False
    replacement = site.adapter.adapt(site.module, mixer, drop_positions=request.drop_positions)
    return Replacement(site, replacement.train(site.module.training), row, carrying)


def _check_one_grid(before: Replacement, site: AttentionSite, row: SwapRow, mixer: Mixer, request: SwapRequest) -> None:
    """Raise `UserError` unless the layer can take the scores of the layer before."""
    reason = ""
    if before.carrying is None:
        reason = "one of them passes scores on by itself and the other does not"
    elif len(request.probe.calls.get(id(site.module), [])) != 1:
        reason = f"the forward pass calls the second {len(request.probe.calls.get(id(site.module), []))} times"
        reason = f"the order of the layers is unknown ({request.probe.note})" if request.probe.note else reason
    elif before.row.num_tokens != row.num_tokens:
        reason = f"the first has {before.row.num_tokens} tokens and the second {row.num_tokens}"
    elif (heads := before.carrying.inner.num_heads) != mixer.num_heads:
        reason = f"the first has {heads} heads and the second {mixer.num_heads}"
    elif re.sub(r"\d+", "*", before.site.name) != re.sub(r"\d+", "*", site.name):
        reason = "they are of two stacks"
    if reason:
        raise UserError(
            f"{before.site.name} cannot pass its scores to {site.name}: {reason}; choose layers of one grid by where"
        )


def _check_unseen(site: AttentionSite, request: SwapRequest) -> None:
    """Raise `SwapError` for attention that was not seen called, unless it attends to its own tokens or is named."""
    own = site.adapter.attends_to_itself(site.module, site.holder)
    if own is False:
        raise SwapError(CROSS)
    if own is None and not request.strict:
        raise SwapError(
            f"whether it attends to its own tokens is unknown ({_why_unseen(request)}); give example_inputs, or "
            f"where=[{site.name!r}] if it does"
        )


def _why_unseen(request: SwapRequest) -> str:
    return request.probe.note or "the forward pass does not call it"


def _build_replacement(site: AttentionSite, old: AttentionWeights, request: SwapRequest) -> Mixer:
    """The mixer, with what it can take over from the attention; the user's arguments come first."""
    parameters = inspect.signature(request.layer).parameters
    if old.causal and not request.layer.capabilities.causal:
        raise SwapError(_not_causal(request, "it is causal"))
    offered = {
        "num_heads": old.num_heads if old.num_heads and old.dim % old.num_heads == 0 else None,
        "qkv_bias": old.qkv_bias,
        "dropout": old.dropout or None,
        "attention_dropout": old.attention_dropout or None,
        "causal": old.causal or None,
    }
    args = {name: value for name, value in offered.items() if value is not None and name in parameters}
    factory: dict[str, Any] = {} if old.like is None else {"device": old.like.device, "dtype": old.like.dtype}
    # A mixer of the user's may be built without them.
    args = {**args, **{name: value for name, value in factory.items() if name in parameters}, **request.kwargs}
    built = build_mixer(request.layer, f"mixer {request.label!r}", old.dim, _num_tokens(site, request), args)
    return built.to(**factory)


def _num_tokens(site: AttentionSite, request: SwapRequest) -> int | None:
    """N to build for, None for a mixer that does not ask."""
    if "num_tokens" not in inspect.signature(request.layer).parameters:
        return None
    counts = request.counts(site)
    if request.layer.capabilities.length == "fixed" and len(set(counts)) > 1:
        raise SwapError(
            f"it is called with {sorted(set(counts))} tokens, and {request.label} takes one number of tokens only"
        )
    found = request.num_tokens or max(counts, default=None)
    if found is None:
        raise SwapError(
            f"{request.label} learns a matrix over tokens, and their number is unknown: give num_tokens "
            f"({_why_unseen(request)})"
        )
    return found


def _not_causal(request: SwapRequest, what: str) -> str:
    if request.layer.capabilities.causal:
        return f"{what}, and {request.label} is not: give mixer_kwargs={{'causal': True}}"
    return f"{what}, and {request.label} has no causal form"


def _on_grid(mixer: Mixer, request: SwapRequest, counts: Sequence[int]) -> Mixer:
    """A mixer of maps as one of tokens, which must be on the model's grid."""
    if mixer.capabilities.layout != "2d":
        return mixer
    if request.grid is None or not counts:
        raise SwapError(f"{request.label} works on maps (B, C, H, W), and the grid of the model's tokens is unknown")
    height, width = request.grid
    other = next((count for count in counts if count != height * width), None)
    if other is not None:
        raise SwapError(
            f"{request.label} works on maps, and {other} tokens do not form a {height} x {width} grid: a class token "
            "or registers are among them; in timm, omit them by class_token=False, reg_tokens=0, global_pool='avg'"
        )
    return GridMixer(mixer, request.grid)


def _row(
    site: AttentionSite,
    old: AttentionWeights,
    request: SwapRequest,
    mixer: Mixer,
    kept: KeptWeights,
    dropped: tuple[str, ...],
) -> SwapRow:
    counts, why = request.counts(site), kept.why
    calls = [(call.num_tokens, call.samples) for call in request.probe.calls.get(id(site.module), [])]
    calls = calls or [(n, 1) for n in counts]
    if old.attention_dropout and "attention_dropout" not in inspect.signature(request.layer).parameters:
        why += f"; the dropout of {old.attention_dropout:g} on the map has no place in it"
    alone = {n: site.adapter.macs(site.module, n) for n in set(counts)}
    return SwapRow(
        name=site.name,
        before=site.kind,
        after=request.label,
        num_tokens=max(counts, default=None),
        parameters_before=count_parameters(site.module),
        parameters_after=count_parameters(mixer),
        macs_before=sum(samples * alone[n] for n, samples in calls) if calls else None,
        macs_after=sum(samples * count_of(mixer, n) for n, samples in calls) if calls else None,
        kept=kept.names,
        why=why,
        dropped=dropped,
    )
