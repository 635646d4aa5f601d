"""The attention modules of a model, and those that `where` selects."""

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from tokenmix.errors import UserError, unknown_name
from tokenmix.swap.adapter import AttentionAdapter
from tokenmix.swap.registry import adapters

Where = str | Sequence[str] | Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class AttentionSite:
    """An attention module, under every name by which the model holds it, and its parent under the first."""

    names: tuple[str, ...]
    module: nn.Module
    holder: nn.Module
    adapter: AttentionAdapter

    @property
    def name(self) -> str:
        """Its first name."""
        return self.names[0]

    @property
    def kind(self) -> str:
        """Its class."""
        return type(self.module).__name__


def find_sites(model: nn.Module) -> list[AttentionSite]:
    """All attention that can be swapped, of nested modules the outermost; `UserError` if there is none."""
    found: dict[int, AttentionSite] = {}
    inside: list[str] = []
    known = adapters()
    for name, module in model.named_modules(remove_duplicate=False):
        adapter = next((adapter for adapter in known if adapter.matches(module)), None)
        if adapter is None or any(name.startswith(f"{outer}.") for outer in inside):
            continue
        if not name:
            raise UserError(f"the model is itself a {type(module).__name__}; swap in the module that holds it")
        inside.append(name)
        names = found[id(module)].names if id(module) in found else ()
        holder = model.get_submodule((*names, name)[0].rpartition(".")[0])
        found[id(module)] = AttentionSite((*names, name), module, holder, adapter)
    if not found:
        raise _nothing(model)
    return list(found.values())


def select_sites(sites: Sequence[AttentionSite], where: Where) -> list[AttentionSite]:
    """Those that `where` means; `UserError` if there are none, or a name in a list is none of theirs."""
    names = [name for site in sites for name in site.names]
    if isinstance(where, str):
        chosen = [p for p in sites if any(fnmatch.fnmatchcase(name, where) for name in p.names)]
    elif callable(where):
        chosen = [p for p in sites if any(where(name, p.module) for name in p.names)]
    else:
        for name in where:
            if name not in names:
                raise unknown_name("attention of the model", name, names)
        chosen = [p for p in sites if set(p.names) & set(where)]
    if not chosen:
        reason = "the function" if callable(where) else repr(where)
        raise UserError(f"where={reason} matches no attention; there are {_listed(names)}")
    return chosen


def _nothing(model: nn.Module) -> UserError:
    # With its home, for several libraries have a class that is called Attention.
    others = [
        f"{name} ({type(m).__module__}.{type(m).__name__})"
        for name, m in model.named_modules()
        if any(word in type(m).__name__.lower() for word in ("attention", "attn"))
    ]
    seen = f"what it has is {_listed(others)}" if others else "it has nothing called attention"
    kinds = "; ".join(dict.fromkeys(adapter.about for adapter in adapters() if adapter.about))
    return UserError(f"{type(model).__name__} has no attention that can be swapped: {seen}; looked for: {kinds}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}, {names[1]}, ..., {names[-1]} ({len(names)} in all)"
