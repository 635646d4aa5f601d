"""The groups of the suite, in the order in which they run."""

import importlib
from collections.abc import Callable
from types import ModuleType

from suite.harness import Case
from suite.results import Row
from tokenmix.errors import unknown_name

__all__ = ["GROUPS", "cases_of", "derived_rows", "load"]

GROUPS = {
    "gmlp": "gMLP-S and its gating unit against timm's",
    "external": "external attention against its two bare matrix products",
    "memory": "a million tokens in chunks",
    "less": "less-attention: factored, dense, and a fresh attention layer",
    "growth": "how time grows with the number of tokens, and where it crosses self-attention's",
    "peers": "layers of other packages at equal shapes, forward and training step",
    "int8": "CPU: copies of gMLP-S and EAMLP-7 by tokenmix.optimize against the networks",
    "roofline": "CUDA: every backend against the memory's bandwidth and fused self-attention",
}


def load(group: str) -> ModuleType:
    """The module of a group; UserError for an unknown one."""
    if group not in GROUPS:
        raise unknown_name("group", group, GROUPS)
    return importlib.import_module(f"suite.groups.{group}")


def cases_of(group: str, device: str) -> list[Case]:
    """The cases of a group that run on a device."""
    return [case for case in load(group).CASES if device in case.devices]


def derived_rows(group: str, rows: list[Row], device: str) -> list[Row]:
    """What a group makes of the rows measured on a device, such as an exponent."""
    derive: Callable[[list[Row], str], list[Row]] | None = getattr(load(group), "derive", None)
    return [] if derive is None else derive(rows, device)
