"""Adapters of attention modules for a swap: their weights, arguments, masks and replacements."""

import fnmatch
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isclose
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tokenmix.errors import UserError
from tokenmix.files import Values
from tokenmix.layers.base import Mixer
from tokenmix.registry import Arguments


def check_model(model: object) -> None:
    """Raise `UserError` unless `model` is a network, without a wrapper that copies it to devices."""
    if not isinstance(model, nn.Module):
        raise UserError(
            f"model must be an nn.Module, got {model!r}; build it first, for example with timm.create_model"
        )
    if type(model).__module__.startswith("ultralytics.") and hasattr(model, "predictor"):
        raise UserError(f"a {type(model).__name__} of Ultralytics is more than its network; give its .model")
    if any(isinstance(part, DistributedDataParallel) for part in model.modules()):
        raise UserError(
            "DistributedDataParallel would not average the gradients of new parameters; change the model first, then "
            "wrap it"
        )
    if any(isinstance(part, nn.DataParallel) for part in model.modules()):
        raise UserError("the model is in nn.DataParallel; change its .module, then wrap it")


def check_values(holds: Tensor, message: str) -> None:
    """Raise `UserError` unless `holds` is True everywhere; graphs assert this at run time, the meta device skips it."""
    if torch.compiler.is_compiling():
        torch._assert_async(holds.all(), message)
    elif not holds.is_meta and not holds.all():
        raise UserError(message)


def from_added(mask: Tensor) -> Tensor:
    """An additive mask as boolean, True = the token takes part; `UserError` for values other than 0 and -inf.

    -10,000, of older code, counts as -inf; in bfloat16 it is -9,984.
    """
    if not mask.is_floating_point():
        raise UserError(f"the attention mask {tuple(mask.shape)} has whole numbers; give a boolean mask")
    taking_part = mask == 0
    check_values(
        taking_part | (mask < -9e3),
        "the mask is added to attention scores and has values other than 0 and -inf; a mixer can mask tokens, not "
        "weight them: give a boolean mask",
    )
    return taking_part


def shared_mask(mask: Tensor | None, x: Tensor) -> Tensor | None:
    """Convert a mask of tokens (B, N) or of pairs (B, 1, 1 or N, N) to a mask of the tokens of x (B, N).

    As in SDPA, True = the token takes part, and numbers are additive; integers (B, N) are 1 or 0. All queries must see
    the same tokens, since only attention over pairs can honour others: they are a `UserError`. A query may see none
    only if no query sees it, as in timm's NaFlex.
    """
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise UserError(
            f"the mask is a {type(mask).__name__}, and a mixer takes a tensor; in transformers set "
            "attn_implementation='sdpa'"
        )
    num_tokens = x.shape[1]
    message = (
        f"the attention mask {tuple(mask.shape)} masks pairs of tokens; a mixer can only mask tokens: "
        f"give (B, 1, 1, {num_tokens}), or (B, 1, {num_tokens}, {num_tokens}) with equal rows"
    )
    if mask.dim() == 2 and not mask.is_floating_point():
        mask = mask.bool()
    pairs = mask[(slice(None), *[None] * (4 - mask.dim()))] if mask.dim() in (2, 3) else mask
    if pairs.dim() != 4 or pairs.shape[1] != 1 or pairs.shape[2] not in (1, num_tokens) or pairs.shape[3] != num_tokens:
        raise UserError(message)
    pairs = (pairs if pairs.dtype == torch.bool else from_added(pairs))[:, 0]
    seen = pairs.any(1)
    if seen.shape[0] not in (1, x.shape[0]):
        raise UserError(message)
    if pairs.shape[1] > 1:
        padding = ~(seen.unsqueeze(2) | pairs.any(2, keepdim=True))
        check_values((pairs == seen.unsqueeze(1)) | padding, message)
    return seen.expand(x.shape[0], -1)


NO_ATTENTIONS = (
    "output_attentions=True, and swapped layers have no attentions in transformers' form; call attention_map(x) of the "
    "layer's mixer"
)
CROSS = "query, key and value are not one tensor: a mixer mixes one set of tokens"


class SwapError(Exception):
    """A site that cannot be swapped, with the reason."""


class Affine(NamedTuple):
    """A linear map: weight (out, in), bias (out,) or None."""

    weight: Tensor
    bias: Tensor | None

    @staticmethod
    def of(layer: nn.Module) -> "Affine":
        if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
            kind = f"{type(layer).__module__}.{type(layer).__qualname__}"
            raise SwapError(
                f"a projection is {kind}, not nn.Linear; take out what wraps it, in PEFT by merge_and_unload"
            )
        return Affine(layer.weight, layer.bias)

    @staticmethod
    def parts(weight: Tensor, bias: Tensor | None, count: int = 3) -> "list[Affine]":
        """Split a fused projection, for example into query, key and value."""
        biases = [None] * count if bias is None else bias.chunk(count)
        return [Affine(*part) for part in zip(weight.chunk(count), biases, strict=True)]


@dataclass(frozen=True, kw_only=True)
class AttentionWeights:
    """The replaced attention. A projection that cannot be reused is None, and `remark` says why.

    Attributes:
        dim: width D of the tokens.
        num_heads: heads H; None if there are none.
        like: a parameter, for device and dtype.
        query, key, value, out: the projections, (D, D) each, heads concatenated.
        qkv_bias: whether query, key and value have biases; None if unknown.
        causal: the attention never sees a future token.
        positions: names of parts that add positions to the scores.
        dropout: rate on the output.
        attention_dropout: rate on the attention map.
        remark: why projections are missing.
    """

    dim: int
    num_heads: int | None = None
    like: Tensor | None = None
    query: Affine | None = None
    key: Affine | None = None
    value: Affine | None = None
    out: Affine | None = None
    qkv_bias: bool | None = None
    causal: bool = False
    positions: tuple[str, ...] = ()
    dropout: float = 0.0
    attention_dropout: float = 0.0
    remark: str = ""


@dataclass(frozen=True)
class ObservedCall:
    """One observed call.

    Attributes:
        num_tokens: number of tokens N.
        causal: whether the call requested causal attention.
        refusal: why a mixer cannot handle the call.
        positions: names of arguments with positions.
        samples: sequences B in the call; may exceed the number of images, as in MobileViT.
    """

    num_tokens: int
    causal: bool = False
    refusal: str = ""
    positions: tuple[str, ...] = ()
    samples: int = 1


class AttentionAdapter(ABC):
    """A kind of attention module that can be swapped; `AttentionLayout` describes one by names only."""

    @property
    @abstractmethod
    def about(self) -> str:
        """The kind in words, for errors."""

    @abstractmethod
    def matches(self, module: nn.Module) -> bool:
        """Whether the module is of this kind."""

    @abstractmethod
    def read(self, module: nn.Module) -> AttentionWeights:
        """The module's weights and options; `SwapError` if no mixer can replace it."""

    @abstractmethod
    def observe(self, module: nn.Module, arguments: Arguments) -> ObservedCall:
        """Describe a call of the module with these arguments."""

    @abstractmethod
    def macs(self, module: nn.Module, num_tokens: int) -> int:
        """Multiply-adds of the module for one sample of N tokens, including products of the attention map."""

    def attends_to_itself(self, module: nn.Module, holder: nn.Module) -> bool | None:
        """Whether query, key and value are one tensor, by the classes of module and parent (without a call)."""
        return True

    @abstractmethod
    def adapt(self, module: nn.Module, mixer: Mixer, *, drop_positions: bool = False) -> nn.Module:
        """The mixer with the module's signature; `drop_positions` makes it ignore positions in calls."""


@dataclass(frozen=True, kw_only=True)
class AttentionLayout(AttentionAdapter):
    """softmax(Q K^T / sqrt(d)) V W_o on tokens (B, N, D), described by names of parts and arguments.

    Names of parts are dotted paths from the module. Missing parts count as absent.

    Attributes:
        classes: the classes that define `forward`, or globs over "module.Class"; subclasses that inherit it match.
        query, key, value, out: the `nn.Linear` projections, heads concatenated.
        qkv: the fused projection; a module that has it needs no query, key and value. Its rows have this order: all
            heads of the query first, then all of the key. Another order is not kept correctly.
        biases: parameters with the biases of `qkv`.
        num_heads: the number of heads.
        dropout, attention_dropout: rates or `nn.Dropout`, on the output and on the attention map.
        norm: a norm of the layer's own shortcut, norm(x + attention(x)).
        around_map: other layers on query and key; query and key are then not kept.
        around_out: other layers before `out`; `out` is then not kept.
        plain: values that parts must have for the layer to be this equation.
        causal: a flag of the module, True if it is causal.
        positions: arguments or parts that add positions to the scores.
        tokens: name of the argument x (default: the first).
        mask: the mask argument: (B, N), or (B, 1, 1 or N, N) with equal rows; True or 1 = takes part, or additive.
        pairs: a mask of two axes is one of pairs (N, N) for all samples.
        unused: arguments that the attention does not read.
        others: arguments for other tokens and caches, which must be None.
        extra_outputs: number of results after the first in a tuple, replaced by None. None: the result is a tensor.
        refusal: why no mixer can replace such a module.
    """

    classes: Sequence[str | type[nn.Module]]
    about: str = ""
    query: str = ""
    key: str = ""
    value: str = ""
    qkv: str = ""
    biases: Sequence[str] = ()
    out: str = ""
    num_heads: str = "num_heads"
    dropout: str = ""
    attention_dropout: str = ""
    norm: str = ""
    around_map: Sequence[str] = ()
    around_out: Sequence[str] = ()
    plain: Mapping[str, object] = field(default_factory=dict)
    causal: str = ""
    positions: Sequence[str] = ()
    tokens: str = ""
    mask: str = ""
    pairs: bool = False
    unused: Sequence[str] = ()
    others: Sequence[str] = ()
    extra_outputs: int | None = None
    refusal: str = ""

    def __post_init__(self) -> None:
        names = [self.classes] if isinstance(self.classes, str | type) else self.classes
        names = [f"{one.__module__}.{one.__qualname__}" if isinstance(one, type) else one for one in names]
        object.__setattr__(self, "classes", tuple(names))

    def matches(self, module: nn.Module) -> bool:
        """Compare the name of the class that defines `forward`, without importing its library."""
        owner = next(c for c in type(module).__mro__ if "forward" in vars(c))
        name = f"{owner.__module__}.{owner.__qualname__}"
        return any(fnmatch.fnmatchcase(name, str(pattern)) for pattern in self.classes)

    def read(self, module: nn.Module) -> AttentionWeights:
        if self.refusal:
            raise SwapError(self.refusal)
        for name, wanted in self.plain.items():
            if (found := _part(module, name, wanted)) != wanted:
                shown = type(found).__name__ if isinstance(found, nn.Module) else repr(found)
                raise SwapError(f"its {name} is {shown}, and a mixer has no place for it")
        config = getattr(module, "config", None)
        if getattr(config, "output_attentions", False):
            raise SwapError("its config has output_attentions=True, which no mixer supports; set it to False")
        stored, out = _part(module, self.qkv), _part(module, self.out)
        three = [_part(module, name) for name in (self.query, self.key, self.value)]
        if isinstance(stored, nn.Linear):
            biases = [b for name in self.biases if (b := _part(module, name)) is not None]
            weight, bias = Affine.of(stored)
            projections = Affine.parts(weight, torch.cat(biases) if biases else bias)
        else:
            projections = [Affine.of(part) for part in three if isinstance(part, nn.Linear)]
        if len(projections) < 3 or not isinstance(out, nn.Linear):
            names = ", ".join(filter(None, (self.qkv, self.query, self.key, self.value, self.out)))
            linears = ", ".join(name for name, part in module.named_modules() if isinstance(part, nn.Linear))
            raise SwapError(f"its projections are not {names}, as its adapter has them; it has {linears or 'none'}")
        if (heads := _part(module, self.num_heads)) is None:
            raise SwapError(f"it has no {self.num_heads}; let num_heads in its adapter name the number of heads")
        query, key, value = projections
        dim, inner = out.out_features, out.in_features
        if query.weight.shape[1] != dim:
            raise SwapError(f"it makes tokens of width {dim} from width {query.weight.shape[1]}")
        of_map, of_out = (_present(module, names) for names in (self.around_map, self.around_out))
        fits = inner == dim
        # A user's class may call anything its scale; in these libraries it is that of the scores.
        ours = str(self.classes[0]).startswith(("timm.", "transformers.", "monai.", "diffusers."))
        holder = self.num_heads.rpartition(".")[0]
        scales = [_part(module, f"{holder}.{name}".lstrip(".")) for name in ("scale", "scaling") if ours]
        scale = next((s for s in scales if isinstance(s, float) and not isclose(s, (int(heads) / inner) ** 0.5)), None)
        remarks = [
            "" if fits else f"its heads are together {inner} wide, not {dim}",
            "query and key had norms of their own" if of_map else "",
            "" if scale is None else f"its scores have the scale {scale:g} and not 1 / sqrt(d)",
            "the output projection stood after a norm or a gate" if of_out else "",
        ]
        return AttentionWeights(
            dim=dim,
            num_heads=int(heads),
            like=out.weight,
            query=query if fits and not of_map and scale is None else None,
            key=key if fits and not of_map and scale is None else None,
            value=value if fits else None,
            out=Affine.of(out) if fits and not of_out else None,
            qkv_bias=query.bias is not None,
            causal=bool(_part(module, self.causal)),
            positions=_present(module, self.positions),
            dropout=rate_of(_part(module, self.dropout)),
            attention_dropout=rate_of(_part(module, self.attention_dropout)),
            remark="; ".join(filter(None, remarks)),
        )

    def observe(self, module: nn.Module, arguments: Arguments) -> ObservedCall:
        if self.refusal:
            return ObservedCall(0, refusal=self.refusal)
        kinds = inspect.signature(module.forward).parameters
        given: Values = {}
        for name, value in arguments.items():  # includes those in **kwargs
            given |= value if kinds[name].kind is inspect.Parameter.VAR_KEYWORD else {name: value}
        x, mask = given[self.tokens or next(iter(given))], self.given_mask(given)
        if x.dim() != 3:
            return ObservedCall(0, refusal=f"it is called with {tuple(x.shape)}, and a mixer takes tokens (B, N, D)")
        if isinstance(mask, Tensor) and mask.is_meta and mask.dim() > 2 and mask.shape[-2] > 1:
            raise SwapError("its attention mask has no values on the meta device")
        causal, positions = bool(given.get("is_causal")), self.brought_positions(given)
        if causal and "is_causal" not in kinds:
            return ObservedCall(x.shape[1], refusal="it is causal by a mask of pairs, which a mixer has no place for")
        try:
            self.check_call(given, x)
            shared_mask(mask, x)
        except UserError as refusal:
            return ObservedCall(x.shape[1], causal, str(refusal), positions)
        return ObservedCall(x.shape[1], causal, "", positions, x.shape[0])

    def given_mask(self, given: Arguments) -> Any:
        mask = given.get(self.mask)
        return mask[None, None] if self.pairs and isinstance(mask, Tensor) and mask.dim() == 2 else mask

    def brought_positions(self, given: Arguments) -> tuple[str, ...]:
        return tuple(name for name in self.positions if given.get(name) is not None)

    def check_call(self, given: Arguments, x: Tensor) -> None:
        """Raise `UserError` for arguments, other than masks, that no mixer can honour."""
        other = next((name for name in self.others if given.get(name) is not None), None)
        if other is not None:
            remedy = "call the model with use_cache=False, or " if other in ("cache", "past_key_values") else ""
            raise UserError(
                f"{other} is given, and a mixer mixes one set of tokens; {remedy}leave this attention out by where="
            )
        # num_items_in_batch of transformers' Trainer reaches every layer, and is for the loss. torch.jit.trace makes
        # tensors of flags.
        beside = {self.mask, *self.positions, *self.unused, "num_items_in_batch", "is_causal"}
        for name, value in given.items():
            if name in beside:
                continue
            if value is not x and any(isinstance(one, Tensor) for one in (value if type(value) is tuple else (value,))):
                raise UserError(
                    f"{name} is given, and the adapter does not name it; register mask={name!r} if it masks tokens, "
                    f"positions=({name!r},) if it has positions, unused=({name!r},) if the attention does not read it"
                )
        if given.get("output_attentions"):
            raise UserError(NO_ATTENTIONS)

    def macs(self, module: nn.Module, num_tokens: int) -> int:
        names = (self.qkv, self.query, self.key, self.value, self.out, *self.around_out)
        layers = [part for name in names if isinstance(part := _part(module, name), nn.Linear)]
        inner = _part(module, self.out).in_features
        return num_tokens * sum(layer.weight.numel() for layer in layers) + 2 * num_tokens**2 * inner

    def attends_to_itself(self, module: nn.Module, holder: nn.Module) -> bool | None:
        return None if self.others or self.positions else True

    def adapt(self, module: nn.Module, mixer: Mixer, *, drop_positions: bool = False) -> nn.Module:
        parameters = tuple(inspect.signature(module.forward).parameters)
        if is_causal(mixer) and "is_causal" not in parameters and not _part(module, self.causal):
            raise SwapError("it is not causal; leave out causal=True")
        return SwappedAttention(mixer, self, parameters, _part(module, self.norm), drop_positions=drop_positions)


class SwappedAttention(nn.Module):
    """A mixer with the signature and the number of results of the attention that it replaces.

    Raises:
        UserError: a mask over token pairs; other tokens or positions (unless dropped); `output_attentions=True`; or a
            causal call of a mixer that is not causal.
    """

    def __init__(
        self,
        mixer: Mixer,
        layout: AttentionLayout,
        parameters: Sequence[str],
        norm: nn.Module | None,
        *,
        drop_positions: bool,
    ) -> None:
        super().__init__()
        self.mixer, self.norm = mixer, norm
        self.layout, self.parameter_names, self.drop_positions = layout, tuple(parameters), drop_positions
        # A model that resizes its positions looks for these attributes in its attention.
        for name in layout.positions:
            setattr(self, name, None)

    def set_window_size(self, window_size: object) -> None:
        """For timm's `set_input_size`, which resizes positions of the attention; a mixer has none."""

    def forward(self, *args: object, **kwargs: object) -> Tensor | tuple[Tensor | None, ...]:
        """Tokens (B, N, D) to the same; a mask (B, 1, 1, N), True = the token takes part."""
        given: Values = {**dict(zip(self.parameter_names, args, strict=False)), **kwargs}
        x = given[self.layout.tokens or self.parameter_names[0]]
        self.layout.check_call(given, x)
        brought = self.layout.brought_positions(given)
        if brought and not self.drop_positions:
            raise UserError(f"{', '.join(brought)} brings positions; swap with drop='positions' to leave them out")
        check_causal(self.mixer, bool(given.get("is_causal")))
        out = self.mixer(x, shared_mask(self.layout.given_mask(given), x))
        if self.norm is not None:
            out = self.norm(x + out)
        return out if self.layout.extra_outputs is None else (out, *[None] * self.layout.extra_outputs)


def is_causal(mixer: nn.Module) -> bool:
    return any(getattr(part, "causal", False) is True for part in mixer.modules())


def check_causal(mixer: Mixer, wanted: bool) -> None:
    """Raise `UserError` for a causal call of a mixer that sees all tokens."""
    if wanted and not is_causal(mixer):
        name = type(mixer).__name__
        remedy = "swap with mixer_kwargs={'causal': True}" if mixer.capabilities.causal else "it has no causal form"
        raise UserError(f"is_causal=True, and this {name} sees future tokens; {remedy}")


def _part(module: nn.Module, path: str, default: object = None) -> Any:
    found: object = module
    for name in path.split("."):
        found = getattr(found, name, None)
    return default if found is None else found


def _present(module: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    parts = {name: _part(module, name) for name in names}
    return tuple(name for name, part in parts.items() if part is not None and not isinstance(part, nn.Identity))


def rate_of(dropout: object) -> float:
    rate = getattr(dropout, "p", dropout)
    return float(rate) if isinstance(rate, float | int) else 0.0
