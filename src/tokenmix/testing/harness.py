"""Shared by the property checks: how a layer is built, given random weights, called and compared."""

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
"""Names under which constructors ask for the number of tokens."""


class PropertyFailure(AssertionError):
    """A layer breaks a property; the message says in one line what was seen.

    `cause` is the cause where what was seen shows it; None for the property's usual one.
    """

    def __init__(self, message: str, cause: str | None = None) -> None:
        super().__init__(message)
        self.cause = cause


class Advice(PropertyFailure):
    """A layer that is right by itself breaks a rule of this house, or cannot be used in one of the ways that ours can.

    The doctor reports it as advice; the tests of our own layers count it as any other failure.
    """


class NotApplicable(Exception):
    """The layer does not offer what the property is about; the message says what is missing."""


OTHER_INPUTS = frozenset({"key", "value", "keys", "values", "k", "v"})
PADDING = ("key_padding_mask", "src_key_padding_mask")
"""Names under which torch's layers take a mask in which True means that a token is ignored."""


class OfItself(nn.Module):
    """Attention of queries, keys and values, each of them x; of several results the first one."""

    def __init__(self, inner: nn.Module, num_inputs: int, padding: str | None = None) -> None:
        super().__init__()
        self.inner, self.num_inputs, self.padding = inner, num_inputs, padding

    def forward(self, x: Tensor) -> Tensor:
        """x in every place."""
        return self.run(x)

    def run(self, x: Tensor, **more: object) -> Tensor:
        """The first result of the layer inside."""
        out = self.inner(*[x] * self.num_inputs, **more)
        return out[0] if isinstance(out, tuple | list) else out

    def call_text(self) -> str:
        """How the layer inside is called, for people."""
        words = ["x"] * self.num_inputs + [f"{self.padding}=~mask"] * (self.padding is not None)
        return f"{type(self.inner).__name__}({', '.join(words)}), of several results the first"


class MaskedOfItself(OfItself):
    """The same for a layer that takes a mask of torch's, `padding`, in which True means that a token is ignored."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x in every place; `mask` is (B, N) bool, True = the token takes part."""
        return self.run(x, **({} if mask is None else {str(self.padding): ~mask}))


def adapted(layer: nn.Module) -> nn.Module:
    """The layer, or one of forward(x) around it if it takes queries, keys and values, or a padding mask of torch's."""
    if not isinstance(layer, nn.Module):
        return layer  # Something else that a stranger's function returns, which the caller names.
    parameters = list(inspect.signature(layer.forward).parameters.values())
    others = [p.name for p in parameters[1:] if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    padding = next((p.name for p in parameters if p.name in PADDING), None)
    if not OTHER_INPUTS.issuperset(others) or not (others or padding):
        return layer
    return (OfItself if padding is None else MaskedOfItself)(layer, 1 + len(others), padding)


@dataclass(frozen=True)
class Builder:
    """Builds fresh layers, `adapted`: `builder()` the one under examination, `builder(num_heads=2)` a changed one.

    Attributes:
        make: called with keyword arguments only.
        kwargs: what `make` is called with.
    """

    make: Build
    kwargs: Mapping[str, object] = field(default_factory=dict)

    def __call__(self, **changes: object) -> nn.Module:
        return adapted(self.make(**{**self.kwargs, **changes}))


@dataclass(frozen=True)
class Traits:
    """Properties that a layer declares, or that can be observed from outside. None = unknown.

    `declared` is true for a layer with `capabilities`: only then is the whole contract of `Mixer` asked for.
    """

    declared: bool
    mask: bool
    causal: bool
    length: Literal["any", "up-to", "fixed"] | None
    map: Literal["slots", "tokens", "gate"] | None
    equivariant: bool | None
    independent: bool


def traits(layer: nn.Module, build: Build) -> Traits:
    """Read `capabilities` where there are any, else look at the layer."""
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
    """Fix the random state inside, leave it as it was outside."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def noise(*shape: int, seed: int = 1) -> Tensor:
    """Standard normal numbers that depend on the seed alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fresh(build: Build, seed: int = 0, /, **changes: object) -> nn.Module:
    """A new layer, its initial weights drawn under a fixed seed."""
    with seeded(seed):
        return build(**changes)


def awake(build: Build, **changes: object) -> nn.Module:
    """A new layer with random weights of natural size, so that no initialisation (a gate at 0) hides a path."""
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
    """An awake layer in float64, its input, and how far two equal results may differ; float32 if it must be."""
    layer, wide = awake(build, **changes).double(), x.double()
    try:
        with torch.no_grad():
            layer(wide)
    except Exception:  # a layer that cannot do float64 fails in `dtypes`, not everywhere
        return awake(build, **changes), x, 1e-4
    # Room for a layer that normalises in float32 on purpose; a wrong axis or a leak is far outside.
    return layer, wide, 1e-5


def call(layer: Callable[..., object], x: Tensor, mask: Tensor | None = None, *, seed: int = 0) -> Tensor:
    """The layer's output, its own randomness fixed."""
    with seeded(seed):
        out = layer(x) if mask is None else layer(x, mask=mask)
    if not isinstance(out, Tensor):
        raise PropertyFailure(f"forward returns {type(out).__name__}, not one tensor")
    return out


def to_tokens(x: Tensor) -> Tensor:
    """(B, N, D) whatever the layout, row by row."""
    return x if x.dim() == 3 else x.flatten(2).transpose(1, 2)


def size_like(x: Tensor, tokens: Tensor) -> Tensor:
    """Tokens (B, N, D) in the layout of x, which has as many."""
    return tokens if x.dim() == 3 else tokens.transpose(1, 2).reshape(tokens.shape[0], *x.shape[1:])


def gap(a: Tensor, b: Tensor) -> float:
    """Largest difference, in units of the larger of 1 and the largest entry of b; inf where one is not a number."""
    a, b = a.detach().double(), b.detach().double()
    if a.numel() == 0:
        return 0.0
    worst = (a - b).abs().max() / b.abs().max().clamp_min(1.0)
    return float(worst) if torch.isfinite(worst) else float("inf")


def assert_close(a: Tensor, b: Tensor, tolerance: float, what: str) -> None:
    """Raise `PropertyFailure` with the difference unless a equals b up to the tolerance."""
    if a.shape != b.shape:
        raise PropertyFailure(f"{what}: shape {tuple(a.shape)} instead of {tuple(b.shape)}")
    difference = gap(a, b)
    if difference > tolerance:
        raise PropertyFailure(f"{what}: difference {difference:.1e}, allowed {tolerance:.0e}")


def assert_finite_gradients(layer: nn.Module, x: Tensor, message: str) -> None:
    """Raise `PropertyFailure` if a gradient of the layer or the input is not finite; `{}` is where its name goes."""
    for name, tensor in (("the input", x), *layer.named_parameters()):
        if tensor.grad is not None and not torch.isfinite(tensor.grad).all():
            raise PropertyFailure(message.format(name))


def contents(value: object) -> Iterator[Tensor | nn.Module]:
    """Tensors and modules in a value, through lists, tuples and dicts."""
    if isinstance(value, Tensor | nn.Module):
        yield value
    elif isinstance(value, dict):
        yield from contents(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from contents(item)
