"""The interface of token mixers.

Notation in all modules: B batch, N tokens, D model width (`dim`), H heads, d = D/H head width, S memory slots.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypedDict, TypeVar

import torch
from torch import Tensor, nn

from tokenmix.errors import MissingMethod, UserError
from tokenmix.ops.checks import check_mask_type, check_tensor
from tokenmix.ops.less import Scores

MapKind = Literal["slots", "tokens", "gate"]
Device = torch.device | str | None
Result = TypeVar("Result")
Network = TypeVar("Network", bound=nn.Module)


class Factory(TypedDict, total=False):
    device: Device
    dtype: torch.dtype | None


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a mechanism supports.

    Attributes:
        layout: `"tokens"` for (B, N, D), `"2d"` for (B, C, H, W).
        mask: accepts a (B, N) boolean mask, True = the token takes part.
        causal: the constructor accepts `causal`; token i then never sees a later token.
        length: `"any"` number of tokens; `"up-to"` the number given at construction; `"fixed"`, exactly that number.
        linear: cost grows linearly with N.
        map: shape of `attention_map`: `"slots"` (B, H, N, S), `"tokens"` (B, H, N, N), `"gate"` (N, N). None: no map,
            so `inspect` and reports skip the mixer.
        equivariant: permuting the tokens permutes the output.
        independent: samples of a training batch do not affect each other (False with BatchNorm).
    """

    layout: Literal["tokens", "2d"] = "tokens"
    mask: bool = True
    causal: bool = False
    length: Literal["any", "up-to", "fixed"] = "any"
    linear: bool = False
    map: MapKind | None
    equivariant: bool = True
    independent: bool = True


def _missing(mixer: nn.Module, method: str, otherwise: str = "") -> MissingMethod:
    return MissingMethod(f"{type(mixer).__name__} has no method {method}; write it{otherwise}")


class Mixer(nn.Module):
    """Base class of token mixers: (B, N, D) to (B, N, D), or (B, C, H, W) to the same.

    The output at masked positions is 0, never NaN, even if all tokens of a sample are masked. Padding may hold any
    value, NaN included.

    Constructors raise `UserError` for arguments out of bounds. Methods that take x and mask must call `checked` first.

    Attributes:
        inside: the layer is part of another mixer. The outer mixer checks inputs and zeroes masked positions.
    """

    capabilities: ClassVar[Capabilities]
    dim: int
    inside: bool = False

    def checked(
        self, x: Tensor, mask: Tensor | None = None, *, weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Check x and mask; return x with masked tokens set to 0, and mask.

        Args:
            x: (B, N, D), or (B, C, H, W) if `capabilities.layout` is `"2d"`.
            mask: (B, N) bool, or (B, H*W).
            weight: gives the dtype to expect. The default, the first parameter of the layer, costs a walk over the
                modules.

        Raises:
            UserError: x or mask is not a tensor, or has the wrong shape or dtype; or x has no token.
        """
        if self.inside:
            return x, mask
        maps = self.capabilities.layout == "2d"
        check_input(self, x, weight, maps=maps)
        mask = check_mask(mask, x, x.shape[2] * x.shape[3] if maps else x.shape[1])
        return zero_masked(x, mask), mask

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mix the tokens of x. `mask` is (B, N) bool, True = the token takes part."""
        raise _missing(self, "forward(x, mask=None)")

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The map of `forward(x, mask)`, see `capabilities.map`. Attention rows sum to 1, masked tokens' are 0."""
        self.map_kind()
        raise _missing(self, "attention_map(x, mask=None)", ", or state map=None in its capabilities")

    def map_kind(self) -> MapKind:
        """`capabilities.map`; `UserError` if it is None."""
        if self.capabilities.map is None:
            raise UserError(
                f"{type(self).__name__} has no map, as its capabilities state; take a mixer with one, such as self"
            )
        return self.capabilities.map

    def extra_repr(self) -> str:
        kept = {name: vars(self).get(name) for name in inspect.signature(type(self)).parameters}
        return ", ".join(f"{name}={value!r}" for name, value in kept.items() if isinstance(value, (int, float, str)))

    def macs(self, num_tokens: int) -> int:
        """Multiply-adds of one sample. Norms, biases and softmax are not counted."""
        raise _missing(self, "macs(num_tokens)")

    def mix(self, x: Tensor, carry: Scores | None = None, mask: Tensor | None = None) -> tuple[Tensor, Scores | None]:
        """`forward` in a stack: takes scores of the previous layer, returns scores for the next (default: `carry`)."""
        return self(x, mask), carry

    def mix_map(self, x: Tensor, carry: Scores | None = None, mask: Tensor | None = None) -> Tensor:
        """`attention_map` in a stack: the map of `mix(x, carry, mask)`."""
        return self.attention_map(x, mask)

    def set_grid(self, old: Sequence[int], new: Sequence[int]) -> None:
        """Resize from the token grid `old` to the grid `new` (tokens row by row), for another image size.

        Weights over the tokens are interpolated into new parameters, so create the optimiser afterwards. Mechanisms
        with `length="any"` do nothing.
        """


def replace_parameter(module: nn.Module, name: str, value: Tensor) -> None:
    """Replace a parameter by `value`, of any shape; `requires_grad` is kept."""
    setattr(module, name, nn.Parameter(value, requires_grad=getattr(module, name).requires_grad))


def outer_mixers(model: nn.Module) -> dict[str, Mixer]:
    """The mixers of a model by name, without those inside others."""
    found: dict[str, Mixer] = {}
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, Mixer) and module not in inside:
            found[name] = module
            inside.update(module.modules())
    return found


def count_parameters(module: nn.Module) -> int:
    """Number of parameters of a module."""
    return sum(p.numel() for p in module.parameters())


@torch.no_grad()
def count_macs(run: Callable[..., Result], *inputs: object) -> tuple[Result, int]:
    """The output of a call, and the multiply-adds of its convolutions, linear layers and attention products."""
    # Imported here: the import takes 0.14 s.
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    # The counter cannot see inside fused attention kernels.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        result = run(*inputs)
    return result, counter.get_total_flops() // 2


def on_meta(network: Network) -> Network:
    """A copy on the meta device, in float32 and evaluation mode."""
    return copy.deepcopy(network).to("meta", torch.float32).eval()


def near_square(num_tokens: int) -> tuple[int, int]:
    """The most nearly square (h, w) with h <= w and h * w = num_tokens."""
    height = next(h for h in range(int(num_tokens**0.5), 0, -1) if num_tokens % h == 0)
    return height, num_tokens // height


def check_input(layer: Mixer, x: Tensor, weight: Tensor | None = None, *, maps: bool = False) -> None:
    """Raise `UserError` unless x is a float (B, N, dim), or (B, dim, H, W) with `maps`, in the dtype of `weight`."""
    name, dim = type(layer).__name__, layer.dim
    check_tensor(f"the input of {name}", x)
    axes, width = (4, 1) if maps else (3, -1)
    if x.dim() != axes or x.shape[width] != dim:
        wanted = f"maps (B, {dim}, H, W)" if maps else f"tokens (B, N, {dim})"
        if x.dim() == axes:
            to = f"the map to {dim} channels" if maps else f"the tokens to {dim}"
            remedy = f"build the layer with dim={x.shape[width]}, or project {to}"
        elif maps and x.dim() == 3:
            remedy = "tokens become a map by x.transpose(1, 2).unflatten(2, (height, width))"
        elif maps:
            remedy = "the axes are batch, channels, height and width"
        elif x.dim() == 4:
            remedy = "a (B, C, H, W) map becomes tokens by x.flatten(2).transpose(1, 2)"
        else:
            remedy = "x.unsqueeze(0) makes a batch of a single sample (N, D)"
        raise UserError(f"{name} takes {wanted}, got {tuple(x.shape)}; {remedy}")
    if (x.shape[2] * x.shape[3] if maps else x.shape[1]) == 0:
        raise UserError(f"{name} mixes at least 1 token, got {tuple(x.shape)}; leave out a sample without tokens")
    if not x.is_floating_point():
        raise UserError(f"{name} takes floating-point input, got {x.dtype}; convert it, for example x.float()")
    if weight is None:  # a walk over the modules; torch 2.8 cannot compile `next` with a default
        for first in layer.parameters():
            weight = first
            break
    if weight is not None and weight.dtype != x.dtype:
        kind = x.device.type
        # torch.is_autocast_enabled raises for devices without autocast, such as meta.
        if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
            raise UserError(
                f"{name} has {weight.dtype} weights and got {x.dtype} input; "
                "convert one of them with .to(dtype), or run under torch.autocast"
            )


def check_mask(mask: Tensor | None, x: Tensor, num_tokens: int) -> Tensor | None:
    """Return mask; raise `UserError` unless mask is None or a boolean (B, N) tensor that fits x."""
    if mask is None:
        return None
    check_mask_type(mask)
    if mask.dim() != 2 or mask.shape[0] != x.shape[0] or mask.shape[1] != num_tokens:
        pairs = "; pairs of tokens cannot be masked, and a causal layer is built with causal=True"
        raise UserError(
            f"mask must be (B, N) = {(x.shape[0], num_tokens)} for input {tuple(x.shape)}, got {tuple(mask.shape)}; "
            f"give one bool for each token{pairs if mask.dim() > 2 else ''}"
        )
    return mask


def zero_masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """Set masked tokens of x (B, N, D) or (B, C, H, W) to 0."""
    if mask is None:
        return x
    taking_part = mask.unsqueeze(-1) if x.dim() == 3 else mask.unflatten(1, x.shape[2:]).unsqueeze(1)
    return x.masked_fill(~taking_part, 0.0)


def masked_output(out: Tensor, mask: Tensor | None) -> Tensor:
    """Zero the masked positions of a mixer's output, and return a tensor that is not a view.

    FSDP2 hooks a module's output to gather the weights for the backward pass. Writing into a view drops the hook.
    """
    if mask is not None:
        return zero_masked(out, mask)
    # The graph must not depend on `requires_grad` at the time of tracing.
    return out.clone() if out.requires_grad and not torch.jit.is_tracing() else out


class GridMixer(Mixer):
    """A 2-d mixer on tokens (B, N, D) of a grid, row by row."""

    def __init__(self, inner: Mixer, grid: tuple[int, int]) -> None:
        super().__init__()
        self.inner, self.grid, self.dim = inner, grid, inner.dim

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        return self.inner.capabilities

    def _map(self, x: Tensor) -> Tensor:
        check_input(self, x)
        height, width = self.grid
        if x.shape[1] != height * width:
            raise UserError(
                f"the grid {self.grid} has {height * width} tokens, got {x.shape[1]}; give as many, or call set_grid"
            )
        return x.transpose(1, 2).unflatten(2, self.grid)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.mix(x, None, mask)[0]

    def mix(self, x: Tensor, carry: Scores | None = None, mask: Tensor | None = None) -> tuple[Tensor, Scores | None]:
        out, carry = self.inner.mix(self._map(x), carry, mask)
        return masked_output(out.flatten(2).transpose(1, 2), None), carry

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.mix_map(x, None, mask)

    def mix_map(self, x: Tensor, carry: Scores | None = None, mask: Tensor | None = None) -> Tensor:
        return self.inner.mix_map(self._map(x), carry, mask)

    def macs(self, num_tokens: int) -> int:
        return self.inner.macs(num_tokens)

    def set_grid(self, old: Sequence[int], new: Sequence[int]) -> None:
        self.inner.set_grid(old, new)
        self.grid = (new[0], new[1])
