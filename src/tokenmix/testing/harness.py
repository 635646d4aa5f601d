"""Helpers of the property checks: build, initialise, call and compare layers."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Literal

import torch
from torch import Tensor, nn

Build = Callable[..., nn.Module]

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
TOKEN_COUNTS = ("num_tokens", "seq_len", "n_tokens", "num_patches", "sequence_length", "max_len", "max_seq_len", "n")
"""Constructor arguments for the number of tokens."""


class PropertyFailure(AssertionError):
    """A violated property, in one line; `cause` is the observed cause, None for the property's usual cause."""

    def __init__(self, message: str, cause: str | None = None) -> None:
        super().__init__(message)
        self.cause = cause


class NotFinite(PropertyFailure):
    """The output has NaN or infinity, so no other property can be measured."""


class Advice(PropertyFailure):
    """A correct layer lacks a convention or use of our layers: advice in the doctor, a failure in our own tests."""


class NotApplicable(Exception):
    """The layer lacks the feature of the property; the message names the feature."""


OTHER_INPUTS = frozenset({"key", "value", "keys", "values", "k", "v"})
PADDING = ("key_padding_mask", "src_key_padding_mask")
"""Argument names of torch's masks in which True means ignored."""


class OfItself(nn.Module):
    """Self-attention by a layer over queries, keys and values; returns the first result."""

    def __init__(self, inner: nn.Module, num_inputs: int, padding: str | None = None) -> None:
        super().__init__()
        self.inner, self.num_inputs, self.padding = inner, num_inputs, padding

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)

    def run(self, x: Tensor, **more: object) -> Tensor:
        out = self.inner(*[x] * self.num_inputs, **more)
        return out[0] if isinstance(out, tuple | list) else out

    def call_text(self) -> str:
        """The call of the inner layer, as text."""
        words = ["x"] * self.num_inputs + [f"{self.padding}=~mask"] * (self.padding is not None)
        return f"{type(self.inner).__name__}({', '.join(words)}), of several results the first"


class MaskedOfItself(OfItself):
    """`OfItself` for a layer with a torch mask `padding`, in which True means ignored."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """`mask` is (B, N) bool, True = the token takes part."""
        return self.run(x, **({} if mask is None else {str(self.padding): ~mask}))


def adapted(layer: nn.Module) -> nn.Module:
    """The layer, wrapped as forward(x, mask) if it takes queries, keys and values, or a torch padding mask."""
    if not isinstance(layer, nn.Module):
        return layer  # a user's function may return anything; the caller reports it
    parameters = list(inspect.signature(layer.forward).parameters.values())
    others = [p.name for p in parameters[1:] if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    padding = next((p.name for p in parameters if p.name in PADDING), None)
    if not OTHER_INPUTS.issuperset(others) or not (others or padding):
        return layer
    return (OfItself if padding is None else MaskedOfItself)(layer, 1 + len(others), padding)


@dataclass(frozen=True)
class Builder:
    """Builds new layers, `adapted`: `builder()` the examined one, `builder(num_heads=2)` a variant."""

    make: Build
    kwargs: Mapping[str, object] = field(default_factory=dict)

    def __call__(self, **changes: object) -> nn.Module:
        return adapted(self.make(**{**self.kwargs, **changes}))


@dataclass(frozen=True)
class Traits:
    """Properties of a layer, None = unknown; only `declared` ones, with `capabilities`, must satisfy all of `Mixer`."""

    declared: bool
    mask: bool
    causal: bool
    length: Literal["any", "up-to", "fixed"] | None
    map: Literal["slots", "tokens", "gate"] | None
    equivariant: bool | None
    independent: bool


def traits(layer: nn.Module, build: Build) -> Traits:
    """Read `capabilities` if there are any, otherwise inspect the layer."""
    given = getattr(build, "kwargs", {})
    causal = any((getattr(layer, "causal", False), getattr(layer, "is_causal", False), given.get("causal", False)))
    known = getattr(layer, "capabilities", None)
    if known is not None:
        stated = {f.name: getattr(known, f.name) for f in fields(Traits) if f.name not in ("declared", "causal")}
        return Traits(declared=True, causal=causal, **stated)
    counts_tokens = any(name in TOKEN_COUNTS for name in given)
    return Traits(
        declared=False,
        mask="mask" in inspect.signature(layer.forward).parameters,
        causal=causal,
        length=None if counts_tokens else "any",
        map=None,
        equivariant=None,
        independent=not any(isinstance(m, BATCH_NORMS) for m in layer.modules()),
    )


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Fix the random state in the block and restore it afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fresh(build: Build, seed: int = 0, /, **changes: object) -> nn.Module:
    """A new layer with initial weights drawn under a fixed seed."""
    with seeded(seed):
        return build(**changes)


def awake(build: Build, **changes: object) -> nn.Module:
    """A new layer with random weights of order 1, so that zero initialisation (a gate at 0) hides nothing."""
    layer = fresh(build, **changes)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in layer.parameters():
            if not weight.is_floating_point():
                continue
            random = torch.randn(weight.shape, generator=generator).to(weight)
            if weight.dim() >= 2:
                weight.copy_(random / max(weight[0].numel(), 1) ** 0.5)
            else:
                weight.add_(0.5 + 0.2 * random)
    return layer.eval()


def exact(build: Build, x: Tensor, **changes: object) -> tuple[nn.Module, Tensor, float]:
    """An awake layer in float64, its input and the tolerance; float32 if the layer cannot compute in float64."""
    layer, wide = awake(build, **changes).double(), x.double()
    try:
        with torch.no_grad():
            layer(wide)
    except Exception:  # `dtypes` reports layers that cannot compute in float64
        return awake(build, **changes), x, 1e-4
    # Tolerates normalisation in float32; a wrong axis or a leak exceeds this by far.
    return layer, wide, 1e-5


def call(layer: Callable[..., object], x: Tensor, mask: Tensor | None = None, *, seed: int = 0) -> Tensor:
    """The layer's output with a fixed random state."""
    with seeded(seed):
        out = layer(x) if mask is None else layer(x, mask=mask)
    if not isinstance(out, Tensor):
        raise PropertyFailure(f"forward returns {type(out).__name__}, not one tensor")
    return out


def to_tokens(x: Tensor) -> Tensor:
    """(B, N, D) for either layout, row by row."""
    return x if x.dim() == 3 else x.flatten(2).transpose(1, 2)


def size_like(x: Tensor, tokens: Tensor) -> Tensor:
    """Tokens (B, N, D) in the layout of x."""
    return tokens if x.dim() == 3 else tokens.transpose(1, 2).reshape(tokens.shape[0], *x.shape[1:])


def gap(a: Tensor, b: Tensor) -> float:
    """Largest difference relative to max(1, largest entry of b); inf if an entry is NaN."""
    a, b = a.detach().double(), b.detach().double()
    if a.numel() == 0:
        return 0.0
    worst = (a - b).abs().max() / b.abs().max().clamp_min(1.0)
    return float(worst) if torch.isfinite(worst) else float("inf")


def assert_close(a: Tensor, b: Tensor, tolerance: float, what: str) -> None:
    """Raise `PropertyFailure` with the difference unless a equals b within the tolerance."""
    if a.shape != b.shape:
        raise PropertyFailure(f"{what}: shape {tuple(a.shape)} instead of {tuple(b.shape)}")
    difference = gap(a, b)
    if difference > tolerance:
        raise PropertyFailure(f"{what}: difference {difference:.1e}, allowed {tolerance:.0e}")


def assert_finite_gradients(layer: nn.Module, x: Tensor, message: str) -> None:
    """Raise `PropertyFailure` for a non-finite gradient of the layer or the input; `{}` in the message is its name."""
    for name, tensor in (("the input", x), *layer.named_parameters()):
        if tensor.grad is not None and not torch.isfinite(tensor.grad).all():
            raise PropertyFailure(message.format(name))


def contents(value: object) -> Iterator[Tensor | nn.Module]:
    """Tensors and modules in a value, including nested lists, tuples and dicts."""
    if isinstance(value, Tensor | nn.Module):
        yield value
    elif isinstance(value, dict):
        yield from contents(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from contents(item)
