"""Where a model's attention stands, and which of it is meant."""

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from tokenmix.errors import UserError, unknown_name
from tokenmix.swap.host import Host
from tokenmix.swap.in_timm import TimmHost
from tokenmix.swap.in_tokenmix import TokenmixHost
from tokenmix.swap.in_torch import TorchHost
from tokenmix.swap.in_transformers import TransformersHost

__all__ = ["HOSTS", "Place", "Where", "choose", "find_places"]

Where = str | Sequence[str] | Callable[[str, nn.Module], bool]

HOSTS: tuple[Host, ...] = (TimmHost(), TorchHost(), TransformersHost(), TokenmixHost())


@dataclass(frozen=True)
class Place:
    """An attention module, under every name by which the model holds it."""

    names: tuple[str, ...]
    module: nn.Module
    host: Host

    @property
    def name(self) -> str:
        """Its first name."""
        return self.names[0]

    @property
    def kind(self) -> str:
        """Its class."""
        return type(self.module).__name__


def find_places(model: nn.Module) -> list[Place]:
    """All attention that can be swapped, of nested modules the outermost; `UserError` if there is none."""
    found: dict[int, Place] = {}
    inside: list[str] = []
    for name, module in model.named_modules(remove_duplicate=False):
        host = next((host for host in HOSTS if host.matches(module)), None)
        if host is None or any(name.startswith(f"{outer}.") for outer in inside):
            continue
        if not name:
            raise UserError(f"the model is itself a {type(module).__name__}; swap in the module that holds it")
        inside.append(name)
        names = found[id(module)].names if id(module) in found else ()
        found[id(module)] = Place((*names, name), module, host)
    if not found:
        raise _nothing(model)
    return list(found.values())


def choose(places: Sequence[Place], where: Where) -> list[Place]:
    """Those that `where` means; `UserError` if there are none, or a name in a list is none of theirs."""
    names = [name for place in places for name in place.names]
    if isinstance(where, str):
        chosen = [p for p in places if any(fnmatch.fnmatchcase(name, where) for name in p.names)]
    elif callable(where):
        chosen = [p for p in places if any(where(name, p.module) for name in p.names)]
    else:
        for name in where:
            if name not in names:
                raise unknown_name("attention of the model", name, names)
        chosen = [p for p in places if set(p.names) & set(where)]
    if not chosen:
        told = "the function" if callable(where) else repr(where)
        raise UserError(f"where={told} matches no attention; there are {_listed(names)}")
    return chosen


def _nothing(model: nn.Module) -> UserError:
    # With its home, for several libraries have a class that is called Attention.
    others = [
        f"{name} ({type(m).__module__}.{type(m).__name__})"
        for name, m in model.named_modules()
        if _looks_like_attention(m)
    ]
    seen = f"what it has is {_listed(others)}" if others else "it has nothing called attention"
    kinds = "; ".join(host.about for host in HOSTS)
    return UserError(f"{type(model).__name__} has no attention that can be swapped: {seen}; looked for: {kinds}")


def _looks_like_attention(module: nn.Module) -> bool:
    return any(word in type(module).__name__.lower() for word in ("attention", "attn"))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}, {names[1]}, ..., {names[-1]} ({len(names)} in all)"
