"""Table of mixers by name, and functions that build mixers."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from tokenmix.errors import OwnMixerError, UserError, as_user_error, one_line, unknown_name
from tokenmix.layers.base import Capabilities, GridMixer, Mixer
from tokenmix.registry import TORCHVISION, Arguments, import_object, is_foreign
from tokenmix.trust import from_caller, unsealed


@dataclass(frozen=True)
class MixerSpec:
    """One entry of the table of mixers.

    Attributes:
        layer: the class.
        fixed: constructor arguments of this entry.
        later: additional arguments for layers after the leading layers of a stack (less-attention takes previous
            scores).
        leader: class of the leading layers of a stack, if different from `layer`.
        about: one line for `tokenmix list mixers`.
        causal: False if the fixed arguments forbid `causal=True` of the class.
    """

    layer: type[Mixer]
    about: str
    fixed: Arguments = field(default_factory=dict)
    leader: type[Mixer] | None = None
    later: Arguments = field(default_factory=dict)
    causal: bool = True

    @property
    def capabilities(self) -> Capabilities:
        """Those of the class with the fixed arguments."""
        stated = self.layer.capabilities
        return replace(stated, causal=stated.causal and self.causal)


MIXERS: dict[str, MixerSpec] = {}


def list_mixers() -> list[str]:
    """The names in the table, in table order."""
    return list(MIXERS)


def register_mixer(name: str, layer: type[Mixer], about: str = "", **fixed: object) -> None:
    """Register a mixer under a name for all functions and commands.

    Args:
        name: name of the mixer.
        layer: class of the mixer.
        about: one line for `tokenmix list mixers` (default: first line of the class's docstring).
        **fixed: constructor arguments that differ from the class's defaults.

    Raises:
        UserError: the name is taken by another mixer, or the class is not a mixer.
    """
    if ":" in name:
        raise UserError(
            f"a mixer's name must not contain a colon, which separates a module from a class; got {name!r}, try "
            f"{name.replace(':', '-')!r}"
        )
    row = spec_of(name, layer, about, fixed)
    before = MIXERS.setdefault(name, row)
    # A notebook cell that runs again defines its class again.
    again = before.layer is not layer and _path(before.layer) == _path(layer)
    if before != row and not again:
        raise UserError(f"the mixer {name!r} is registered already; choose another name")
    MIXERS[name] = row


def _path(layer: type) -> tuple[str, str]:
    return layer.__module__, layer.__qualname__


def spec_of(name: str, layer: object, about: str = "", fixed: Arguments | None = None) -> MixerSpec:
    """The table entry for a class; `UserError` if the class is not a mixer."""
    stated = getattr(layer, "capabilities", None)
    if not (isinstance(layer, type) and issubclass(layer, Mixer) and isinstance(stated, Capabilities | property)):
        raise UserError(
            f"{name!r} is not a mixer: derive its class from tokenmix.layers.Mixer and state its capabilities, for "
            "example Capabilities(map=None) if it has no attention map"
        )
    try:
        inspect.signature(layer.forward).bind("self", "x", "mask")
    except TypeError as error:
        raise UserError(
            f"forward of {name!r} cannot be called with x and mask; write forward(self, x, mask=None)"
        ) from error
    return MixerSpec(layer, about or (inspect.getdoc(layer) or "").partition("\n")[0], fixed or {})


def is_mixer(name: str) -> bool:
    """Whether `get_spec` accepts the name: a name in the table, or "module:Class"."""
    return name in MIXERS or (is_foreign(name) and not name.startswith(TORCHVISION))


@from_caller
def get_spec(name: str) -> MixerSpec:
    """The table entry of a name, or a new entry for "module:Class"; `UserError` if there is no such mixer."""
    if not isinstance(name, str):
        raise UserError(f"a mixer is built by its name, one of tokenmix.list_mixers() or 'module:Class', got {name!r}")
    if name in MIXERS:
        return MIXERS[name]
    if ":" not in name:
        remedy = "if your code registers it, import that first (in a command: --import MODULE)"
        raise UserError(f"{unknown_name('mixer', name, MIXERS)}; {remedy}")
    return spec_of(name, import_object(name))


def resolve_mixer(mixer: str | type[Mixer]) -> tuple[str, type[Mixer], Arguments]:
    """Label, class and fixed arguments of a mixer, given by name or as a class."""
    if isinstance(mixer, str):
        spec = get_spec(mixer)
        return mixer, spec.layer, spec.fixed
    if isinstance(mixer, type) and issubclass(mixer, Mixer):
        return mixer.__name__, mixer, {}
    raise UserError(f"mixer must be a name of tokenmix.list_mixers() or a subclass of Mixer, got {mixer!r}")


def create_mixer(name: str, dim: int, *, num_tokens: int | None = None, **kwargs: object) -> Mixer:
    """Build one mixer of the table.

    Args:
        name: a name from `list_mixers()`, or "module:Class".
        dim: width D of the tokens.
        num_tokens: N, required by mechanisms with a learned matrix over tokens and ignored by the others.
        **kwargs: constructor arguments of the layer.

    Raises:
        UserError: the name or an argument is unknown, or num_tokens is missing.
    """
    spec = get_spec(name)
    return build_mixer(spec.layer, f"mixer {name!r}", dim, num_tokens, {**spec.fixed, **kwargs})


def build_mixer(layer: type[Mixer], label: str, dim: int, num_tokens: int | None, kwargs: Arguments) -> Mixer:
    """Call a layer's constructor; `UserError` for unknown, missing or invalid arguments."""
    parameters = inspect.signature(layer).parameters
    unknown = [] if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else sorted(set(kwargs) - set(parameters))
    # A user's class need not take these two.
    factory = {name: kwargs[name] for name in unknown if name in ("device", "dtype")}
    kwargs = {name: value for name, value in kwargs.items() if name not in factory}
    if unknown := [name for name in unknown if name not in factory]:
        accepted = ", ".join(p for p in parameters if p not in ("dim", "num_tokens")) or "none but dim"
        raise UserError(f"{label} has no argument {unknown[0]!r}; it takes {accepted}")
    if num_tokens is not None and (not isinstance(num_tokens, int) or num_tokens < 1):
        raise UserError(f"{label}: num_tokens must be a whole number from 1 on, got {num_tokens!r}")
    takes_number = "num_tokens" in parameters
    if takes_number and num_tokens is None:
        raise UserError(f"{label} learns a matrix over tokens: give num_tokens, for example num_tokens=196")
    given = {"dim": dim, **({"num_tokens": num_tokens} if takes_number else {}), **kwargs}
    shown = ", ".join(f"{key}={value!r}" for key, value in given.items())
    failed = as_user_error(f"{label} cannot be built with these arguments: ", f"; change one of {shown}, or the class")
    with failed, unsealed(layer):
        built = layer(dim, num_tokens, **kwargs) if takes_number else layer(dim, **kwargs)
    if getattr(built, "dim", None) is None:
        raise OwnMixerError(f"{label} has no self.dim; set self.dim = dim in its constructor")
    return built.to(**factory) if any(value is not None for value in factory.values()) else built


def build_on_grid(
    layer: type[Mixer],
    label: str,
    dim: int,
    grid: Sequence[int],
    offered: Arguments,
    kwargs: Arguments,
) -> Mixer:
    """Build a layer with `kwargs` and accepted `offered` arguments; a 2-d layer is wrapped in `GridMixer`."""
    known = inspect.signature(layer).parameters
    given = {name: value for name, value in offered.items() if name in known}
    built = build_mixer(layer, label, dim, grid[0] * grid[1], {**given, **kwargs})
    return GridMixer(built, (grid[0], grid[1])) if built.capabilities.layout == "2d" else built


def build_stack(
    name: str,
    spec: MixerSpec,
    dim: int,
    grid: Sequence[int],
    depth: int,
    *,
    num_leading: int = 1,
    mixer_kwargs: Arguments | None = None,
    **offered: object,
) -> list[Mixer]:
    """Build one mixer per block, for blocks of width `dim` on the same token grid (height, width).

    `name` and `spec` are the mixer's table entry; the `num_leading` first blocks use its leader if there is one.
    Unknown `mixer_kwargs` raise `UserError`; `offered` only go to layers that accept them, such as num_heads.
    """
    asked, label = mixer_kwargs or {}, f"mixer {name!r}"
    if spec.leader is None:
        return [build_on_grid(spec.layer, label, dim, grid, offered, {**spec.fixed, **asked}) for _ in range(depth)]
    if depth < 2:
        raise UserError(f"{name!r} needs two blocks in a row or more; the first one makes its scores")
    if not 1 <= num_leading < depth:
        raise UserError(f"num_leading must lie in 1..{depth - 1} for {name!r} at depth {depth}, got {num_leading}")
    shared = {key: value for key, value in asked.items() if key in inspect.signature(spec.leader).parameters}
    later = {**spec.fixed, **spec.later, **asked}
    leading = [build_on_grid(spec.leader, label, dim, grid, offered, shared) for _ in range(num_leading)]
    others = range(depth - num_leading)
    return leading + [build_on_grid(spec.layer, label, dim, grid, offered, later) for _ in others]


def own_mixers(model: nn.Module) -> list[Mixer]:
    """The mixers in a model with classes from outside tokenmix."""
    return [m for m in model.modules() if isinstance(m, Mixer) and not type(m).__module__.startswith("tokenmix.")]


@contextmanager
def checked_own_mixers(model: nn.Module) -> Iterator[None]:
    """Check calls of a user's mixers in the block; `OwnMixerError` for a wrong shape or `macs`, or a failing method."""
    own = own_mixers(model)
    hooks = [mixer.register_forward_hook(_check_call) for mixer in own]
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a user's forward pass may raise anything
        if not own:
            raise
        names = ", ".join(sorted({type(mixer).__name__ for mixer in own}))
        raise OwnMixerError(f"the model does not run with {names}: {one_line(error)}") from error
    finally:
        for hook in hooks:
            hook.remove()


def _check_call(mixer: Mixer, args: tuple[Tensor, ...], out: object) -> None:
    x, name = args[0], type(mixer).__name__
    if not isinstance(out, Tensor) or out.shape != x.shape:
        got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise OwnMixerError(f"{name} turns {tuple(x.shape)} into {got}; return a tensor of the shape that it is given")
    if mixer.capabilities.map is not None and type(mixer).attention_map is Mixer.attention_map:
        mixer.attention_map(x)
    count_of(mixer, x[0].numel() // mixer.dim)


def count_of(mixer: Mixer, num_tokens: int) -> int:
    """`mixer.macs(num_tokens)`; `OwnMixerError` unless the result is a whole number."""
    count = mixer.macs(num_tokens)
    if not isinstance(count, int):
        raise OwnMixerError(
            f"macs of {type(mixer).__name__} returned {count!r}; return a whole number of multiply-adds"
        )
    return count
