"""Insert a token mixer after modules of any model, as a residual block that starts as the identity."""

import fnmatch
import functools
import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Literal, Unpack, get_args

import torch
from torch import Tensor, nn
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves

from tokenmix.environment import warn_untested
from tokenmix.errors import UserError, unknown_name
from tokenmix.layers.base import Factory, Mixer, count_parameters
from tokenmix.layers.table import build_mixer, count_of, resolve_mixer
from tokenmix.ops.checks import check_choice
from tokenmix.registry import Arguments
from tokenmix.swap.adapter import check_model, check_values, is_causal, shared_mask
from tokenmix.swap.probe import Example, check_runs, evaluating, example_of, model_macs, watch_calls, watch_pass
from tokenmix.swap.report import ChangeReport, SkippedAttention, aligned, cost_cells

INSERTED = "inserted"
"""Name of the block in the module that it follows."""
HOOKED = "has_insert_hook"
ENCODER = "src_key_padding_mask"
"""Argument of PyTorch's encoders, whose `mask` is of pairs."""
PAIRS = ("src_mask", "tgt_mask")
"""Arguments (N, N) of PyTorch's transformers."""
LEFT_OUT = ("key_padding_mask", ENCODER, "tgt_key_padding_mask", "padding_mask", *PAIRS)
"""Arguments in which True = the token takes no part."""
MASKS = (*LEFT_OUT, "attention_mask", "attn_mask", "pixel_attention_mask", "mask")
"""Arguments that mask tokens; a block after a module takes that of the module's call."""

CACHES = {"cache", "cache_params"}
"""Arguments of transformers' models that generate without attention."""

Layout = Literal["tokens", "channels-first", "channels-last"]


class InsertedBlock(nn.Module):
    """A token mixer on the output of a module.

        y = x + gamma * mixer(norm(x)),   gamma in R^C, 0 at the start

    `norm` is LayerNorm over the channels. A mixer that starts as the identity, such as SAGAN's, has no norm and no
    gamma. At the start y equals x bitwise: zeros keep their sign, and the mixer reads 0 for non-finite x. y has the
    dtype of x, also under autocast.

    Args:
        mixer: of tokens (B, N, C), or of maps (B, C, H, W).
        layout: position of the channel axis of x.
        sizes: the only (H, W) of x, for a mixer with weights per position.

    Tokens may have a mask, of the forms of `swap.adapter.shared_mask`; masked tokens stay as they are.

    Shape: x (B, N, C) for `tokens`; (B, C, L), (B, C, H, W) or (B, C, D, H, W) for `channels-first`; (B, ..., C) for
    `channels-last`; the output has the shape of x. A 2-d mixer, which must not be local,
    receives D slices as one map of D * H rows.
    """

    def __init__(
        self, mixer: Mixer, layout: Layout, sizes: Sequence[int] | None = None, **factory: Unpack[Factory]
    ) -> None:
        super().__init__()
        self.mixer, self.layout = mixer, layout
        self.sizes = None if sizes is None else tuple(sizes)
        bare = starts_as_identity(mixer)
        self.norm = None if bare else nn.LayerNorm(mixer.dim, **factory)
        self.gamma = None if bare else nn.Parameter(torch.zeros(mixer.dim, **factory))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if x.dim() < 3:
            raise UserError(
                f"an inserted block of {self.mixer.dim} channels takes tokens (B, N, C) or a map "
                f"(B, C, ...), got {tuple(x.shape)}; insert after modules that give the same layout in training"
            )
        first = self.layout == "channels-first"
        sizes = x.shape[2:] if first else x.shape[1:-1]
        if self.sizes is not None and tuple(sizes) != self.sizes:
            raise UserError(
                f"{type(self.mixer).__name__} has weights per position of a map of {self.sizes}, got {tuple(sizes)}; "
                "give images of the size of the insertion, or insert external or self"
            )
        tokens = x.flatten(2).transpose(1, 2) if first else x.flatten(1, -2)
        # Maps of images have no padding.
        mask = shared_mask(mask, tokens) if x.dim() == 3 else None
        finite = tokens.nan_to_num(0.0, 0.0, 0.0)
        normed = finite if self.norm is None else self.norm(finite)
        if self.mixer.capabilities.layout == "2d":
            rows = sizes[0] * sizes[1] if len(sizes) == 3 else sizes[0] if len(sizes) == 2 else 1
            out = self.mixer(normed.transpose(1, 2).unflatten(2, (rows, sizes[-1]))).flatten(2).transpose(1, 2)
        else:
            out = self.mixer(normed) if mask is None else self.mixer(normed, mask)
        added = out - finite if self.gamma is None else self.gamma * out
        if mask is not None:
            added = added.masked_fill(~mask.unsqueeze(2), 0.0)
        # 0 - added is +0 for zeros of either sign, and x - 0 is x; x + 0 would turn -0 into 0.
        mixed = (tokens - (0.0 - added)).to(x.dtype)
        return (mixed.transpose(1, 2) if first else mixed).reshape(x.shape)

    def extra_repr(self) -> str:
        return f"layout={self.layout!r}"


@torch.no_grad()
def starts_as_identity(mixer: Mixer) -> bool:
    """Whether a new mixer with parameters returns its input."""
    weight = next(mixer.parameters(), None)
    if weight is None or mixer.capabilities.length != "any":
        return False
    if weight.is_meta:
        return hasattr(mixer, "gamma")
    x = torch.linspace(-1, 1, 4 * mixer.dim, device=weight.device).to(weight.dtype)
    x = x.view((1, mixer.dim, 2, 2) if mixer.capabilities.layout == "2d" else (1, 4, mixer.dim))
    with evaluating(mixer):
        return torch.equal(mixer(x), x)


def default_heads(layer: type[Mixer], dim: int) -> dict[str, int]:
    """`num_heads` for a mixer that accepts it: the largest divisor of the width up to 8."""
    if "num_heads" not in inspect.signature(layer).parameters:
        return {}
    return {"num_heads": next(n for n in range(8, 0, -1) if dim % n == 0)}


def run_inserted(
    names: Sequence[str], module: nn.Module, args: tuple[object, ...], kwargs: Arguments, output: Tensor
) -> Tensor:
    """Forward hook of a module that has, or had, an inserted block; `names` are the arguments of its forward."""
    block = getattr(module, INSERTED, None)
    if block is None:
        return output
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    for value in given.values():
        if hasattr(type(value), "get_seq_length"):  # a cache of transformers
            _check_cache(value, output.shape[1])
    masks = {name: mask for name in MASKS if (mask := given.get(name)) is not None}
    tensors = {name: mask for name, mask in masks.items() if isinstance(mask, Tensor)}
    if len(masks) > 1 or len(tensors) < len(masks):
        kinds = ", ".join(f"{name} ({type(mask).__name__})" for name, mask in masks.items())
        raise UserError(f"a block takes one mask, a tensor, and the module before it is called with {kinds}")
    for name, mask in tensors.items():
        if name == "attn_mask" and mask.dim() == 2 and type(module).__module__.startswith("timm."):
            return block(output, mask[None, None])  # of pairs, for all samples
        pairs = name in PAIRS or (name == "mask" and ENCODER in names)
        # In transformers True = not padding.
        theirs = name == "padding_mask" and type(module).__module__.startswith("transformers.")
        if (pairs or name in LEFT_OUT) and not theirs and not mask.is_floating_point():
            mask = ~mask.bool()
        return block(output, mask[None, None] if pairs and mask.dim() == 2 else mask)
    return block(output)


def _check_cache(cache: Any, num_tokens: int) -> None:
    """Raise `UserError` if a cache holds tokens before the `num_tokens` of this call, which a block would not see."""
    message = "an inserted block has no cache of earlier tokens; generate with use_cache=False"
    try:
        length = cache.get_seq_length()
    except ValueError:
        length = 2  # A state without a length, as Mamba's: a call with one token continues.
    if isinstance(length, Tensor):
        check_values(length <= num_tokens, message)
    elif length > num_tokens:
        raise UserError(message)


def _token_masks(module: nn.Module, given: Arguments) -> set[str]:
    """Names of arguments that mask tokens, not pairs of tokens or windows, in a call of a module."""
    names = set(MASKS) - {*PAIRS, "attn_mask"}
    if ENCODER in inspect.signature(module.forward).parameters:
        names -= {"mask"}
    return {name for name in names if isinstance(mask := given.get(name), Tensor) and mask.dim() in (2, 4)}


def _around(model: nn.Module, name: str) -> list[Any]:
    """A module, and the modules that it is in, from inside out."""
    path = name.split(".")
    return [model.get_submodule(".".join(path[:i])) for i in range(len(path), -1, -1)]


def _check_attention(
    model: nn.Module, name: str, host: nn.Module, mixer: Mixer, masked: Mapping[nn.Module, Collection[str]]
) -> None:
    """Raise `UserError` if a block of tokens after this module would see future tokens, padding, or other samples.

    The attention in the smallest module around it tells whether it is causal, and whether samples come first. Padding
    is known to the model, to the innermost model of transformers, and to modules that the example calls with the masks
    in `masked`, which also has attention that is called with is_causal.
    """
    around = _around(model, name)

    def nearest(attribute: str) -> list[Any]:
        told = ([m for m in part.modules() if isinstance(getattr(m, attribute, None), bool)] for part in around)
        return next(filter(None, told), [])

    if other := next((m for m in nearest("batch_first") if not m.batch_first), None):
        raise UserError(
            f"{name} has tokens (N, B, C), as {type(other).__name__} has batch_first=False, and a block would mix the "
            "samples; build the model with batch_first=True"
        )
    told = nearest("is_causal")
    causal = next((m for m in told if m.is_causal or "is_causal" in masked.get(m, ())), None)
    if not told:  # Mamba is causal without attention; what is not causal has no use of a cache.
        inside = around[: 1 + next((i for i, m in enumerate(around) if hasattr(m, "main_input_name")), len(around))]
        causal = next((m for m in inside if CACHES & inspect.signature(m.forward).parameters.keys()), None)
    if causal is not None and not is_causal(mixer):
        raise UserError(
            f"{name} belongs to causal attention ({type(causal).__name__}), and a block after it would see future "
            "tokens; give mixer_kwargs={'causal': True} for self or a gate, and generate with use_cache=False"
        )
    if any(mask in inspect.signature(host.forward).parameters for mask in MASKS):
        return
    for module in around:
        wanted, whole = set(masked.get(module, ())), hasattr(module, "main_input_name")
        if module is model or whole:
            # Models of images may take masks of pairs, such as timm's attn_mask, which few use.
            wanted |= set(inspect.signature(module.forward).parameters) - {*PAIRS, "attn_mask"}
        if padding := next((mask for mask in MASKS if mask in wanted), None):
            raise UserError(
                f"{type(module).__name__} takes {padding}, which {name} ({type(host).__name__}) is called without, so "
                "a block after it would mix padding; name the module that is called with the mask, such as a layer of "
                "the encoder"
            )
        if whole:
            return


@dataclass(frozen=True, kw_only=True)
class InsertRow:
    """One inserted block; multiply-adds are for the example, over all calls.

    Attributes:
        name: name of the module before the block.
        after: class of that module.
        layout: of its output, such as "(B, C, H, W)".
        dim: width C.
        num_tokens: N at each call.
    """

    name: str
    after: str
    layout: str
    dim: int
    num_tokens: tuple[int, ...]
    parameters: int
    macs: int


@dataclass(frozen=True, kw_only=True)
class InsertReport(ChangeReport):
    """A model with inserted blocks: one row per block with its cost; `inputs` are shapes of the forward pass."""

    rows: tuple[InsertRow, ...]
    inputs: tuple[tuple[int, ...], ...]

    def remove(self) -> None:
        remove_inserted(self.model)

    def __str__(self) -> str:
        table = [("after", "N", "params", "", "MACs", "", "layout")]
        for row in self.rows:
            tokens = ", ".join(f"{n:,}" for n in dict.fromkeys(row.num_tokens))
            table.append((row.name, tokens, f"+{row.parameters:,}", "", f"+{row.macs:,}", "", row.layout))
        table.append(("whole model", "", *cost_cells(self), ""))
        skipped = [f"left out: {s.name} ({s.kind}): {s.reason}" for s in self.skipped]
        inputs = ", ".join(map(str, self.inputs))
        return "\n".join(
            [f"{self.mixer} inserted, identity at the start; input {inputs}", "", *aligned(table), *skipped]
        )


def insert(
    model: nn.Module,
    after: str | Sequence[str],
    mixer: str | type[Mixer],
    *,
    layout: Layout | None = None,
    img_size: int | tuple[int, int] | None = None,
    example_inputs: Example | None = None,
    mixer_kwargs: Arguments | None = None,
) -> InsertReport:
    """Insert a residual block with a token mixer after modules of a model, in place.

        y = x + gamma * mixer(norm(x)),   gamma = 0 at the start

    The model's outputs do not change at the start. The block is the submodule `inserted` of the module that it follows,
    so the model's weights keep their names. One forward pass on the meta device finds widths and layouts. To load a
    saved model, build it, insert with the same arguments, then load the state dict. Create optimisers afterwards.

    Args:
        model: any model.
        after: name of a module, a glob such as "layer[34]", or several of either. Only the outermost of nested matches
            count.
        mixer: a name of `tokenmix.list_mixers()`, "module:Class", or a mixer class.
        layout: of the outputs (default: inferred from their shape and the modules that produce them).
        img_size: for the forward pass (default: the model's own, or 224).
        example_inputs: arguments of the forward pass, for models that do not take images.
        mixer_kwargs: arguments of the mixer.

    Returns:
        The report; `report.remove()` removes the blocks.

    Raises:
        UserError: no module matches; a named or the only module is not called, or its output is not one tensor of
            tokens or of a map; or the mixer cannot be built.
    """
    check_model(model)
    warn_untested()
    if layout is not None:
        check_choice("layout", layout, get_args(Layout))
    label, layer, fixed = resolve_mixer(mixer)
    patterns = [after] if isinstance(after, str) else list(after) if isinstance(after, Sequence) else []
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        kind = "an empty list" if isinstance(after, list | tuple) and not after else type(after).__name__
        raise UserError(f"after is names of modules or a glob over them, got {kind}; give one, such as 'layer3'")
    hosts = _find_hosts(model, patterns)
    example = example_inputs
    if example is None:
        example = example_of(model, img_size) or example_of(model, 224)
    if example is None:
        raise UserError(
            "the model does not tell its input, and img_size is of 2-D images; give example_inputs, a tuple of "
            "arguments of its forward, such as (torch.zeros(1, 1, 32, 32, 32),)"
        )
    outside = dict.fromkeys(module for name in hosts for module in _around(model, name)[1:])
    attention = (module for module in model.modules() if isinstance(getattr(module, "is_causal", None), bool))
    watched = list(outside | dict.fromkeys(attention))

    def observe(
        place: int, method: str, args: Sequence[object], kwargs: Arguments, result: object
    ) -> tuple[int, torch.Size | str]:
        if place < len(hosts):
            return _observe(place, method, args, kwargs, result)
        module = watched[place - len(hosts)]
        given = {**dict(zip(inspect.signature(module.forward).parameters, args, strict=False)), **kwargs}
        named = masked.setdefault(module, set())
        if module in outside:
            named |= _token_masks(module, given)
        if given.get("is_causal") is True:
            named.add("is_causal")
        return place, ""

    masked: dict[nn.Module, set[str]] = {}
    calls, macs_before, device = watch_pass(model, example, [*hosts.values(), *watched], observe, before_hooks=True)
    wider = {} if layout else _wider_shapes(model, list(hosts.values()), example)
    blocks: list[tuple[nn.Module, InsertedBlock]] = []
    rows, skipped = [], []
    for i, (name, host) in enumerate(hosts.items()):
        found = [call for place, call in calls if place == i]
        seen, refusal = [shape for shape in found if isinstance(shape, torch.Size)], _refusal(found)
        chosen = layout or (_layout_of(host, seen[0], wider.get(i)) if seen else "tokens")
        if len(dims := {_width(shape, chosen) for shape in seen}) > 1:
            refusal = refusal or f"its calls give outputs of widths {sorted(dims)}; name a module around one call"
        if refusal:
            skipped.append(SkippedAttention(name, type(host).__name__, refusal))
            continue
        grids, dim = [_sizes(shape, chosen) for shape in seen], _width(seen[0], chosen)
        counts = tuple(grid.numel() for grid in grids)
        if max(counts) == 1:
            warnings.warn(f"the output {tuple(seen[0])} of {name} is one token: a block cannot mix it", stacklevel=2)
        known = inspect.signature(layer).parameters
        if layer.capabilities.layout == "2d" and chosen == "tokens":
            raise UserError(
                f"{label} works on maps (B, C, H, W), and the output is tokens {tuple(seen[0])}; choose a mixer of "
                "tokens"
            )
        can = layer.capabilities
        if can.layout == "2d" and len(seen[0]) == 5 and can.map is None and not can.equivariant:
            raise UserError(
                f"{label} works on maps (B, C, H, W) by their places, and would take the end of one slice of "
                f"{tuple(seen[0])} and the start of the next for neighbours; choose a mixer of tokens, such as external"
            )
        bound = layer.capabilities.length == "fixed" or (layer.capabilities.length == "up-to" and len(grids[0]) > 1)
        if "num_tokens" in known and bound and len(set(grids)) > 1:
            raise UserError(
                f"{label} takes one size, and the module is called with {sorted(set(map(tuple, grids)))}; choose "
                "another mixer"
            )
        like = next((p for module in (host, model) for p in module.parameters()), None)
        factory: Factory = {} if like is None else {"device": like.device, "dtype": like.dtype}
        given = {**default_heads(layer, dim), **{key: value for key, value in factory.items() if key in known}}
        given |= {**fixed, **(mixer_kwargs or {})}
        built = build_mixer(layer, f"mixer {label!r}", dim, max(counts), given).to(**factory)
        if chosen == "tokens":
            _check_attention(model, name, host, built, masked)
        block = InsertedBlock(built, chosen, grids[0] if bound else None, **factory).train(host.training)
        blocks.append((host, block))
        sizes = {3: "L", 4: "H, W", 5: "D, H, W"}[len(seen[0])]
        letters = f"(B, C, {sizes})" if chosen == "channels-first" else f"(B, {sizes}, C)"
        rows.append(
            InsertRow(
                name=name,
                after=type(host).__name__,
                layout="(B, N, C)" if chosen == "tokens" else letters,
                dim=dim,
                num_tokens=counts,
                parameters=count_parameters(block),
                macs=sum(shape[0] * count_of(block.mixer, n) for shape, n in zip(seen, counts, strict=True)),
            )
        )
    if skipped and (not rows or any(s.name in patterns for s in skipped)):
        first = next((s for s in skipped if s.name in patterns), skipped[0])
        raise UserError(f"nothing can be inserted after {first.name} ({first.kind}): {first.reason}")
    if type(model).__module__.startswith("ultralytics."):
        warnings.warn(
            "Ultralytics' trainer builds the model again from its YAML, without this block; to train it there, add a "
            "row to the YAML (tokenmix.swap.ultralytics)",
            stacklevel=2,
        )
    before = count_parameters(model)
    for host, block in blocks:
        host.add_module(INSERTED, block)
        # A child added to an nn.Sequential already runs last. The hook stays after a block is removed.
        if type(host).forward is not nn.Sequential.forward and not getattr(host, HOOKED, False):
            names = tuple(inspect.signature(host.forward).parameters)
            # Before other hooks, which may take the output, as those of transformers' backbones do.
            host.register_forward_hook(functools.partial(run_inserted, names), with_kwargs=True, prepend=True)
            setattr(host, HOOKED, True)

    forget_compiled()
    packing = unpack_padded(holders(model, [host for host, _ in blocks]))

    def undo() -> None:
        for host, _ in blocks:
            delattr(host, INSERTED)
        for encoder in packing:
            encoder.use_nested_tensor = True

    remedy = "name another module, or give the layout of its output"
    called = Counter[nn.Module]()
    with ExitStack() as stack:
        # A pass that fails on the meta device is repeated on the model's own.
        stack.callback(model.register_forward_pre_hook(lambda *_: called.clear()).remove)
        for _, block in blocks:
            stack.callback(block.register_forward_pre_hook(lambda block, _: called.update([block])).remove)
        macs_after = check_runs(model, example, undo, device, "insertion", remedy)
    for row, (_, block) in zip(rows, blocks, strict=True):
        if called[block] != len(row.num_tokens):
            undo()
            raise UserError(
                f"the block after {row.name} ({row.after}) ran {called[block]} times, the module "
                f"{len(row.num_tokens)}: it may call its children, of which the block is one; the insertion was "
                f"undone: {remedy}"
            )
    return InsertReport(
        model=model,
        mixer=label,
        rows=tuple(rows),
        inputs=tuple(tuple(x.shape) for x in tree_leaves(example) if isinstance(x, Tensor)),
        skipped=tuple(skipped),
        parameters_before=before,
        parameters_after=count_parameters(model),
        macs_before=macs_before,
        macs_after=macs_after,
    )


def forget_compiled() -> None:
    """Let torch.compile trace again: what it has compiled does not look for new hooks."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def holders(model: nn.Module, parts: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules of a model that are one of these parts or hold one."""
    wanted = set(map(id, parts))
    return [module for module in model.modules() if any(id(part) in wanted for part in module.modules())]


def unpack_padded(modules: Sequence[nn.Module]) -> list[nn.TransformerEncoder]:
    """Let PyTorch's encoders among these keep padded batches, which they pack in evaluation; return them."""
    found = [m for m in modules if isinstance(m, nn.TransformerEncoder) and m.use_nested_tensor]
    for encoder in found:
        encoder.use_nested_tensor = False
    return found


def remove_inserted(model: nn.Module) -> list[str]:
    """Remove all inserted blocks of a model; return the names of the modules that had one."""
    names = [
        name for name, module in model.named_modules() if isinstance(getattr(module, INSERTED, None), InsertedBlock)
    ]
    for name in names:
        delattr(model.get_submodule(name), INSERTED)
    forget_compiled()
    return names


def _find_hosts(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Modules by name that match a pattern; only the outermost of nested matches."""
    # Includes further names of shared modules, such as one activation for all layers.
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        matching = [name for name in modules if fnmatch.fnmatchcase(name, pattern)]
        if not matching:
            outer = ", ".join(name for name, _ in model.named_children())
            otherwise = f"the outermost are {outer}; see model.named_modules()"
            raise unknown_name("module of the model", pattern, modules, otherwise)
        for name in matching:
            inner = any(name.startswith(f"{outer}.") for outer in matching)
            if not inner and not any(modules[name] is module for module in found.values()):
                found[name] = modules[name]
    for name, module in found.items():
        if hasattr(module, INSERTED):
            raise UserError(f"{name} has an inserted block already; take it out with tokenmix.swap.remove_inserted")
    return found


def _observe(
    place: int, method: str, args: Sequence[object], kwargs: Arguments, result: object
) -> tuple[int, torch.Size | str]:
    """Which module, and the shape of its output or why no block can follow it."""
    if not isinstance(result, Tensor):
        return place, f"its output is of type {type(result).__name__}; name the module in it that makes the tensor"
    if not result.is_floating_point() or not 3 <= result.dim() <= 5:
        return place, (
            f"its output {tuple(result.shape)} is neither tokens (B, N, C) nor a map (B, C, ...); name a module before "
            "the global pooling"
        )
    return place, result.shape


def _wider_shapes(model: nn.Module, hosts: Sequence[nn.Module], example: Example) -> dict[int, torch.Size]:
    """Shape of each host's first output if inputs are twice as wide, as far as the model runs on the meta device."""
    # Without images, sequences (B, L) become twice as long.
    least = 3 if any(isinstance(x, Tensor) and x.dim() > 2 for x in tree_leaves(example)) else 2
    wider: Example = map_aggregate(  # pyrefly: ignore[bad-assignment]
        example, lambda x: torch.cat([x, x], -1) if isinstance(x, Tensor) and x.dim() >= least else x
    )
    calls: list[tuple[int, torch.Size | str]] = []
    # The model may take one size only.
    with suppress(Exception), ExitStack() as stack:
        for place, host in enumerate(hosts):
            stack.enter_context(watch_calls(host, calls, functools.partial(_observe, place), before_hooks=True))
        model_macs(model, wider)
    return {place: shape for place, shape in reversed(calls) if isinstance(shape, torch.Size)}


def _refusal(calls: Sequence[torch.Size | str]) -> str:
    if not calls:
        return "the forward pass does not call it; name a module that it calls"
    shapes = [call for call in calls if not isinstance(call, str)]
    if len(shapes) < len(calls):
        return next(call for call in calls if isinstance(call, str))
    different = len(set(map(len, shapes))) > 1
    return "its calls give outputs of different layouts; name a module around one call" if different else ""


def _layout_of(host: nn.Module, shape: torch.Size, wider: torch.Size | None) -> Layout:
    """Layout of a module's output: the channel axis keeps its size if images are wider.

    If no axis changes, or the model takes one size only, the channel axis has the width of the module's last layers.
    """
    last: Layout = "tokens" if len(shape) == 3 else "channels-last"
    if wider is not None and len(wider) == len(shape) and wider != shape:
        return last if wider[-1] == shape[-1] else "channels-first"
    kinds = (("out_channels", True), ("num_features", True), ("out_features", False), ("normalized_shape", False))
    for module in reversed(list(host.modules())):
        for name, convolves in kinds:
            size = getattr(module, name, None)
            size = size[-1] if isinstance(size, tuple) and size else size
            if size == shape[1] and (convolves or size != shape[-1]):
                return "channels-first"
            # The map of a convolution becomes tokens, but a map with the channels last has another layer after it.
            if size == shape[-1] and (last == "tokens" or not convolves):
                return last
    if last == "tokens" or shape[-1] == 1:
        return "tokens" if last == "tokens" else "channels-first"
    warnings.warn(
        f"the output {tuple(shape)} of {type(host).__name__} does not show which axis has the channels, so the block "
        "takes channels-first; otherwise give layout='channels-last'",
        stacklevel=3,
    )
    return "channels-first"


def _width(shape: Sequence[int], layout: Layout) -> int:
    return shape[1 if layout == "channels-first" else -1]


def _sizes(shape: torch.Size, layout: Layout) -> torch.Size:
    return torch.Size(shape[2:] if layout == "channels-first" else shape[1:-1])
