"""Plan a new mixer for each attention, and the weights that it keeps, before the model changes.

A weight is kept if it has the same role in the new layer: to compute queries, keys or values of the same tokens, or to
write the output to the same tokens. All other weights are new.
"""

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from tokenmix.errors import UserError
from tokenmix.layers.base import Factory, GridMixer, Mixer, count_parameters
from tokenmix.layers.external import ExternalAttention, MultiHeadExternalAttention
from tokenmix.layers.less_attention import LessAttention
from tokenmix.layers.linear_attention import LinearAttention
from tokenmix.layers.self_attention import SelfAttention, SimplifiedSelfAttention
from tokenmix.layers.table import build_mixer, count_of
from tokenmix.registry import Arguments
from tokenmix.swap.adapter import CROSS, Affine, AttentionWeights, ObservedCall, SwapError, is_causal
from tokenmix.swap.carrying import Carrying
from tokenmix.swap.inserting import INSERTED
from tokenmix.swap.probe import Probe, evaluating
from tokenmix.swap.registry import OURS, AttentionSite
from tokenmix.swap.report import SkippedAttention, SwapRow


@dataclass(frozen=True)
class SwapRequest:
    """The requested swap, and facts about the model."""

    label: str  # name, class and arguments of the mixer
    layer: type[Mixer]
    kwargs: Arguments
    num_tokens: int | None  # N if the user gave it
    grid: tuple[int, int] | None  # (height, width) of the model's tokens if known
    probe: Probe  # result of a forward pass
    strict: bool  # a site that cannot be swapped is an error
    drop_positions: bool = False  # drop positions inside an attention, which otherwise prevent a swap

    @property
    def carries(self) -> bool:
        """Whether the mixers transform the scores of the previous layer."""
        given = self.kwargs.get("residual") or self.kwargs.get("scores_from") == "previous"
        return issubclass(self.layer, LessAttention) and bool(given)

    @property
    def why_unseen(self) -> str:
        """Why no call of an attention was observed."""
        return self.probe.note or "the forward pass does not call it"

    def calls(self, site: AttentionSite) -> Sequence[ObservedCall]:
        return [call for module, _, call in self.probe.seen if module == id(site.module)]

    def counts(self, site: AttentionSite) -> list[int]:
        """Numbers of tokens of a site, one per call in a forward pass."""
        seen = [call.num_tokens for call in self.calls(site)]
        return seen or ([self.num_tokens] if self.num_tokens else [])

    def not_causal(self, what: str) -> SwapError:
        if self.layer.capabilities.causal:
            return SwapError(f"{what}, and {self.label} is not: give mixer_kwargs={{'causal': True}}")
        return SwapError(f"{what}, and {self.label} has no causal form")


@dataclass(frozen=True)
class Replacement:
    site: AttentionSite
    replacement: nn.Module
    row: SwapRow
    carrying: Carrying | None = None


def plan_replacements(
    sites: Sequence[AttentionSite], request: SwapRequest
) -> tuple[list[Replacement], list[SkippedAttention]]:
    """The replacements and the skipped sites; `UserError` if all are skipped, or any with `strict`."""
    replacements: list[Replacement] = []
    skipped: list[SkippedAttention] = []
    order = {module: place for place, (module, _, _) in reversed(list(enumerate(request.probe.seen)))}
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
        raise UserError(f"{'; '.join(reasons)}; choose other layers by where, or another mixer")
    if len(replacements) == 1 and replacements[0].carrying is not None:
        name = replacements[0].site.name
        raise UserError(f"{name} alone has no layer before it whose scores it could take; choose two or more by where")
    return replacements, skipped


def _plan_one(site: AttentionSite, request: SwapRequest, before: Replacement | None) -> Replacement:
    if hasattr(site.module, INSERTED):
        raise SwapError("a block is inserted after it; take it out by tokenmix.swap.remove_inserted, swap, then insert")
    if "forward" in vars(site.module) or any(hasattr(part, "_hf_hook") for part in site.module.modules()):
        raise SwapError(
            "its forward was replaced on the instance, as hooks of accelerate do (device_map, cpu_offload); swap first"
        )
    old, calls, counts = site.adapter.read(site.module), request.calls(site), request.counts(site)
    # Our stacks pass scores themselves.
    passes = any(one == id(site.module) and method == "mix" for one, method, _ in request.probe.seen)
    carries = request.carries and not passes
    first = carries and before is None
    if first:
        # The first layer has no scores to transform; it computes them.
        known = inspect.signature(SelfAttention).parameters
        kwargs = {name: value for name, value in request.kwargs.items() if name in known}
        request = replace(request, label="self", layer=SelfAttention, kwargs=kwargs)
    label = request.label
    built = _build(site, old, request)
    if not calls:
        own = site.adapter.attends_to_itself(site.module, site.holder)
        if own is False:
            raise SwapError(CROSS)
        if own is None and not request.strict:
            raise SwapError(
                f"whether it attends to its own tokens is unknown ({request.why_unseen}); give img_size (--img-size "
                "in a command) or example_inputs, or name it in a list where=[...] if it does"
            )
    for call in calls:
        if call.refusal:
            raise SwapError(call.refusal)
        if call.causal and not is_causal(built):
            raise request.not_causal("it is called with is_causal=True")
    causal = old.causal or any(call.causal for call in calls)
    if calls and is_causal(built) and not causal and not isinstance(site.module, Mixer):
        raise SwapError("it is not causal; leave out causal=True")
    positions = tuple(dict.fromkeys([*old.positions, *(name for call in calls for name in call.positions)]))
    if positions and not request.drop_positions:
        raise SwapError(
            f"{', '.join(positions)} adds positions to its scores, which {label} has no place for; "
            "drop='positions' leaves them out (--drop positions; in train and compare --swap-drop positions)"
        )
    kept, why = keep_weights(old, built)
    if not request.strict and len(kept) < 4 and _alike(site.module, built):
        raise SwapError(
            f"it is this {label} already, and would lose its weights; name it in a list where=[...] for that"
        )
    why += "; as self, which makes the scores of the layers after it" if first else ""
    for name, rate, of in (("attention_dropout", old.attention_dropout, "map"), ("dropout", old.dropout, "output")):
        if rate and name not in inspect.signature(request.layer).parameters:
            why += f"; the dropout of {rate:g} on the {of} has no place in it"
    mixer = built
    if built.capabilities.layout == "2d":
        if request.grid is None or not counts:
            raise SwapError(f"{label} works on maps (B, C, H, W), and the grid of the model's tokens is unknown")
        height, width = request.grid
        other = next((count for count in counts if count != height * width), None)
        if other is not None:
            raise SwapError(
                f"{label} works on maps, and {other} tokens do not form a {height} x {width} grid: a class token or "
                "registers are among them; in timm, omit them by class_token=False, reg_tokens=0, global_pool='avg'"
            )
        mixer = GridMixer(built, request.grid)
    num_tokens, macs = max(counts, default=None), {n: count_of(mixer, n) for n in set(counts)}
    carrying = None
    if carries:
        if before is not None:
            _check_one_grid(before, site, num_tokens, built, request)
        link = None if before is None or before.carrying is None else before.carrying.after
        mixer = carrying = Carrying(mixer, link)
        if before is not None and before.carrying is not None:
            before.carrying.last = False
    replacement = site.adapter.adapt(site.module, mixer, drop_positions=request.drop_positions)
    times = [(call.num_tokens, call.samples) for call in calls] or [(n, 1) for n in counts]
    alone = {n: site.adapter.macs(site.module, n) for n in set(counts)}
    row = SwapRow(
        name=site.name,
        before=site.kind,
        after=label,
        num_tokens=num_tokens,
        parameters_before=count_parameters(site.module),
        parameters_after=count_parameters(replacement),  # with the norm of the attention's shortcut
        macs_before=sum(samples * alone[n] for n, samples in times) if times else None,
        macs_after=sum(samples * macs[n] for n, samples in times) if times else None,
        kept=kept,
        why=why,
        dropped=positions,
    )
    return Replacement(site, replacement.train(site.module.training), row, carrying)


def _alike(module: nn.Module, built: Mixer) -> bool:
    """Whether the module is a mixer of this class with these arguments, as far as weights and description show."""
    weights, others = ({name: value.shape for name, value in m.state_dict().items()} for m in (module, built))
    return type(module) is type(built) and weights == others and repr(module) == repr(built)


def _build(site: AttentionSite, old: AttentionWeights, request: SwapRequest) -> Mixer:
    """The mixer, with options of the attention that apply; the user's arguments take precedence."""
    parameters, label = inspect.signature(request.layer).parameters, request.label
    if old.causal and not request.layer.capabilities.causal:
        raise request.not_causal("it is causal")
    num_tokens = None
    if "num_tokens" in parameters:
        counts = request.counts(site)
        if request.layer.capabilities.length == "fixed" and len(set(counts)) > 1:
            raise SwapError(
                f"it is called with {sorted(set(counts))} tokens, and {label} takes one number of tokens only"
            )
        num_tokens = request.num_tokens or max(counts, default=None)
        if num_tokens is None:
            raise SwapError(
                f"{label} learns a matrix over tokens, and their number is unknown ({request.why_unseen}): give "
                "img_size (--img-size in a command), example_inputs or num_tokens"
            )
    factory: Factory = {} if old.like is None else {"device": old.like.device, "dtype": old.like.dtype}
    offered = {
        "num_heads": next((n for n in range(old.num_heads or 0, 0, -1) if old.dim % n == 0), None),
        "qkv_bias": old.qkv_bias,
        "dropout": old.dropout or None,
        "attention_dropout": old.attention_dropout or None,
        "causal": old.causal or None,
        **factory,  # a user's mixer may be built without them
    }
    args = {name: value for name, value in offered.items() if value is not None and name in parameters}
    built = build_mixer(request.layer, f"mixer {label!r}", old.dim, num_tokens, {**args, **request.kwargs})
    return built.to(**factory)


def _check_one_grid(
    before: Replacement, site: AttentionSite, num_tokens: int | None, mixer: Mixer, request: SwapRequest
) -> None:
    """Raise `UserError` unless the layer can take the scores of the previous layer."""
    reason, times = "", len(request.calls(site))
    if before.carrying is None:
        reason = "one of them passes scores on by itself and the other does not"
    elif times != 1:
        reason = f"the forward pass calls the second {times} times"
        reason = f"the order of the layers is unknown ({request.probe.note})" if request.probe.note else reason
    elif before.row.num_tokens != num_tokens:
        reason = f"the first has {before.row.num_tokens} tokens and the second {num_tokens}"
    elif (heads := before.carrying.inner.num_heads) != mixer.num_heads:
        reason = f"the first has {heads} heads and the second {mixer.num_heads}"
    elif re.sub(r"\d+", "*", before.site.name) != re.sub(r"\d+", "*", site.name):
        reason = "they are of two stacks"
    if reason:
        raise UserError(
            f"{before.site.name} cannot pass its scores to {site.name}: {reason}; choose layers of one grid by where"
        )


def lost_hooks(site: AttentionSite) -> bool:
    """Whether forward hooks of a user are on an attention or its parts."""
    hooks = [h for m in site.module.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    owners = {str(getattr(getattr(hook, "func", hook), "__module__", "")).partition(".")[0] for hook in hooks}
    return not owners <= {"transformers", "tokenmix"}


@torch.no_grad()
def misread_weights(site: AttentionSite) -> str:
    """A note if a user's adapter reads an attention whose outputs its projections do not give; else ""."""
    old = site.adapter.read(site.module)
    if id(site.adapter) in OURS or old.like is None or old.like.is_meta or not old.num_heads:
        return ""
    if any(part is None for part in (old.query, old.key, old.value, old.out)) or old.causal or old.positions:
        return ""
    factory: Factory = {"device": old.like.device, "dtype": old.like.dtype}
    try:
        with evaluating(site.module), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layer = SelfAttention(old.dim, num_heads=old.num_heads, qkv_bias=bool(old.qkv_bias), **factory)
            x = torch.randn(1, 5, old.dim).to(old.like)
            keep_weights(old, layer)
            outputs = [part(x) for part in (site.module, site.adapter.adapt(site.module, layer).eval())]
        own, ours = (out[0] if isinstance(out, tuple) else out for out in outputs)
        error = float((own - ours).abs().max() / own.abs().max().clamp_min(1e-12))
    except Exception:  # the module takes more than tokens, or returns something else
        return ""
    if not error > 0.05:
        return ""
    return (
        f"softmax attention with the projections of {site.name} that the adapter names differs from {site.kind} by "
        f"{error:.0%} of its largest output: check their order, the heads and the scale"
    )


Kept = tuple[tuple[str, ...], str]
"""Names of the kept projections, and the reason."""


@torch.no_grad()
def keep_weights(old: AttentionWeights, mixer: Mixer) -> Kept:
    """Copy weights with the same role into a new mixer; not into subclasses, which may use theirs differently."""
    if old.remark and not any((old.query, old.key, old.value, old.out)):
        return (), old.remark
    attends = isinstance(mixer, SelfAttention | LinearAttention | LessAttention)
    if attends and type(mixer) in (SelfAttention, LinearAttention, LessAttention):
        kept, why = _into_attention(old, mixer)
    elif type(mixer) is SimplifiedSelfAttention:
        kept, why = _into_simplified(old, mixer)
    elif type(mixer) is MultiHeadExternalAttention and (mixer.expansion != 1 or mixer.num_heads != old.num_heads):
        heads = mixer.expansion * mixer.num_heads
        kept, why = (), f"it has {heads} heads and attention {old.num_heads or 'none'}: copies would stay copies"
    elif type(mixer) in (ExternalAttention, MultiHeadExternalAttention):
        pairs = {"query": (old.query, mixer.query), "out": (old.out, mixer.proj)}
        linear = {name: (theirs, ours) for name, (theirs, ours) in pairs.items() if isinstance(ours, nn.Linear)}
        kept = tuple(name for name, (theirs, ours) in linear.items() if _copied((theirs, Affine.of(ours))))
        why = "its memories stand for the keys and values that attention made from the tokens, so they are new"
        why = why if type(mixer) is ExternalAttention else "its memories, which all heads share, are new"
    else:
        return (), f"{type(mixer).__name__} has no place for the projections of attention"
    return kept, "; ".join(filter(None, (why, old.remark)))


def _into_attention(old: AttentionWeights, mixer: SelfAttention | LinearAttention | LessAttention) -> Kept:
    """Copy query, key, value and output projections."""
    if isinstance(mixer, LessAttention):
        if mixer.qk is None:
            return (), "query and key are those of the layer before"
        query, key = Affine.parts(mixer.qk.weight, mixer.qk.bias, 2)
        value = Affine.of(mixer.v)
        why = "Theta and Psi start as the identity, so the layer starts as the attention it replaces"
        if mixer.residual_scale is not None:
            why = "the transformed scores of the layer before are added times 0 at the start"
    else:
        query, key, value = Affine.parts(mixer.qkv.weight, mixer.qkv.bias)
        why = "the same projections, relu of query and key in place of the softmax"
        if isinstance(mixer, SelfAttention):
            same = "softmax over the keys" if mixer.normalization == "softmax" else "double normalisation of the map"
            why = f"the same projections, {same}"
    same_heads = old.num_heads == mixer.num_heads
    # Two projections are only meaningful together.
    scores = same_heads and _copied((old.query, query), (old.key, key))
    values = _copied((old.value, value), (old.out, Affine.of(mixer.proj)))
    if scores and values:
        return ("query", "key", "value", "out"), why
    reasons = [
        "value and out continue reading and writing the same features" if values else "",
        "" if same_heads else f"query and key were made for {old.num_heads} heads",
        "its query, key and value have no biases" if old.qkv_bias and query.bias is None else "",
    ]
    kept = ("query", "key") if scores else ("value", "out") if values else ()
    return kept, "; ".join(filter(None, reasons))


def _into_simplified(old: AttentionWeights, mixer: SimplifiedSelfAttention) -> Kept:
    """Fold W_v W_o into one map, because the mixer has the tokens themselves as values."""
    if not isinstance(mixer.proj, nn.Linear):
        return (), "it has no weights; with output_projection=True it keeps value and out, as one map"
    if old.value is None or old.out is None:
        return (), ""
    bias = torch.zeros_like(mixer.proj.bias) if old.out.bias is None else old.out.bias
    if old.value.bias is not None:
        # Rows of the map sum to 1, so each token receives the full bias of the values.
        bias = bias + old.out.weight @ old.value.bias
    mixer.proj.weight.copy_(old.out.weight @ old.value.weight)
    mixer.proj.bias.copy_(bias)
    return ("value", "out"), "value and out as one map, W_o W_v, after the map of the tokens themselves"


def _copied(*pairs: tuple[Affine | None, Affine]) -> bool:
    """Copy projections to their targets, with bias 0 for a missing bias; False, without copies, if one does not fit."""
    for old, target in pairs:
        if old is None or old.weight.shape != target.weight.shape or (old.bias is not None and target.bias is None):
            return False
    for old, target in pairs:
        assert old is not None
        target.weight.copy_(old.weight)
        if target.bias is not None:
            target.bias.copy_(torch.zeros_like(target.bias) if old.bias is None else old.bias)
    return True
