"""Adapters of attention modules for a swap: what they hold, how they are called, what replaces them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.layers.base import Mixer

CROSS = "query, key and value are not one tensor: a mixer mixes one set of tokens"


class SwapError(Exception):
    """A site that cannot be swapped, with the reason."""


class Affine(NamedTuple):
    """A linear map as it is stored: weight (out, in), bias (out,) or None."""

    weight: Tensor
    bias: Tensor | None

    @staticmethod
    def of(layer: nn.Module) -> "Affine":
        """That of an `nn.Linear`."""
        assert isinstance(layer, nn.Linear)
        return Affine(layer.weight, layer.bias)

    @staticmethod
    def parts(weight: Tensor, bias: Tensor | None, count: int = 3) -> "list[Affine]":
        """Maps that are stored as one: query, key and value."""
        biases = [None] * count if bias is None else bias.chunk(count)
        return [Affine(*part) for part in zip(weight.chunk(count), biases, strict=True)]


@dataclass(frozen=True, kw_only=True)
class AttentionWeights:
    """The attention that is replaced. A projection that is None cannot be reused, and `remark` says why.

    Attributes:
        dim: width D of the tokens.
        num_heads: heads H; None if there are none.
        like: a parameter, for device and type.
        query, key, value, out: the projections, (D, D) each, heads one after the other.
        qkv_bias: whether query, key and value have biases; None if they are not known.
        causal: it never sees a future token.
        dropout: on its output.
        attention_dropout: on its map.
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
    dropout: float = 0.0
    attention_dropout: float = 0.0
    remark: str = ""


@dataclass(frozen=True)
class ObservedCall:
    """One call that was seen: its number of tokens, whether it was causal, and why a mixer cannot handle it."""

    num_tokens: int
    causal: bool = False
    refusal: str = ""


class AttentionAdapter(ABC):
    """A kind of attention module that can be swapped."""

    about: ClassVar[str]

    @abstractmethod
    def matches(self, module: nn.Module) -> bool:
        """Whether the module is of this kind."""

    @abstractmethod
    def read(self, module: nn.Module) -> AttentionWeights:
        """What the module holds; `SwapError` if no mixer can replace it."""

    def example(self, module: nn.Module, tokens: Tensor) -> tuple[Any, ...]:
        """The arguments of a call of the module on tokens (B, N, D)."""
        return (tokens,)

    @abstractmethod
    def observe(self, module: nn.Module, arguments: Mapping[str, Any]) -> ObservedCall:
        """A call of the module with these arguments."""

    def attends_to_itself(self, module: nn.Module, holder: nn.Module) -> bool | None:
        """Whether query, key and value are one tensor, from the classes of the module and its parent; None: unknown.

        It is asked only where no forward pass was seen to call the module.
        """
        return True

    @abstractmethod
    def adapt(self, module: nn.Module, mixer: Mixer) -> nn.Module:
        """The mixer, with the module's signature."""


def is_causal(mixer: nn.Module) -> bool:
    """Whether the mixer was built causal."""
    return any(getattr(part, "causal", False) is True for part in mixer.modules())


def check_causal(mixer: Mixer, wanted: bool) -> None:
    """Raise `UserError` for a causal call of a mixer that sees all tokens."""
    if wanted and not is_causal(mixer):
        name = type(mixer).__name__
        remedy = "swap with mixer_kwargs={'causal': True}" if mixer.capabilities.causal else "it has no causal form"
        raise UserError(f"is_causal=True, and this {name} sees future tokens; {remedy}")


def check_values(holds: Tensor, message: str) -> None:
    """Raise `UserError` unless `holds` is True everywhere; a compiled or exported graph asserts it when it runs.

    On the meta device there are no values to check.
    """
    if torch.compiler.is_compiling():
        torch._assert_async(holds.all(), message)
    elif not holds.is_meta and not holds.all():
        raise UserError(message)


def from_added(mask: Tensor) -> Tensor:
    """A mask that is added to scores as a boolean one, True = the token takes part.

    Raises:
        UserError: a number other than 0 and about minus infinity, which weighs tokens instead of leaving them out.
    """
    taking_part = mask == 0
    check_values(
        taking_part | (mask < torch.finfo(mask.dtype).min / 4),
        "the mask is added to attention scores and has values other than 0 and -inf; a mixer can mask tokens, not "
        "weight them: give a boolean mask",
    )
    return taking_part


def shared_mask(mask: Tensor | None, x: Tensor) -> Tensor | None:
    """A mask of pairs (B, 1, 1 or N, N), of SDPA's polarity, as one of the tokens of x (B, N), True = it takes part.

    Every query sees the same tokens. A query that sees none must be a token that no query sees: timm's NaFlex masks
    padding so.

    Raises:
        UserError: a mask whose queries see different tokens, which only a map of pairs can honour.
    """
    if mask is None:
        return None
    num_tokens = x.shape[1]
    message = (
        f"the attention mask {tuple(mask.shape)} masks pairs of tokens; a mixer can only mask tokens: "
        f"give (B, 1, 1, {num_tokens}), or (B, 1, {num_tokens}, {num_tokens}) with equal rows"
    )
    if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2] not in (1, num_tokens) or mask.shape[3] != num_tokens:
        raise UserError(message)
    pairs = (mask if mask.dtype == torch.bool else from_added(mask))[:, 0]
    seen = pairs.any(1)
    if pairs.shape[1] > 1:
        padding = ~(seen.unsqueeze(2) | pairs.any(2, keepdim=True))
        check_values((pairs == seen.unsqueeze(1)) | padding, message)
    return seen.expand(x.shape[0], -1)
