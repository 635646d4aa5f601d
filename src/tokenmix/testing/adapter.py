"""Layers that do not map one tensor to one tensor, used as if they did."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

OTHER_INPUTS = frozenset({"key", "value", "keys", "values", "k", "v"})
PADDING = ("key_padding_mask", "src_key_padding_mask")
"""Names under which torch's layers take a mask in which True means that a token is ignored."""


class OfItself(nn.Module):
    """Attention of queries, keys and values, each of them x; of several results the first one."""

    def __init__(self, inner: nn.Module, num_inputs: int) -> None:
        super().__init__()
        self.inner, self.num_inputs = inner, num_inputs

    def forward(self, x: Tensor) -> Tensor:
        """x in every place."""
        return self.run(x)

    def run(self, x: Tensor, **more: Any) -> Tensor:
        """The first result of the layer inside."""
        out = self.inner(*[x] * self.num_inputs, **more)
        return out[0] if isinstance(out, tuple | list) else out

    def call_text(self) -> str:
        """How the layer inside is called, for people."""
        return f"{type(self.inner).__name__}({', '.join(['x'] * self.num_inputs)}), of several results the first"


class MaskedOfItself(OfItself):
    """The same for a layer that takes a mask of torch's, in which True means that a token is ignored."""

    def __init__(self, inner: nn.Module, num_inputs: int, padding: str) -> None:
        super().__init__(inner, num_inputs)
        self.padding = padding

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x in every place; `mask` is (B, N) bool, True = the token takes part."""
        return self.run(x, **({} if mask is None else {self.padding: ~mask}))

    def call_text(self) -> str:
        return super().call_text().replace(")", f", {self.padding}=~mask)", 1)


def adapted(layer: Any) -> Any:
    """The layer, or one of forward(x) around it if it takes queries, keys and values, or a padding mask of torch's."""
    if not isinstance(layer, nn.Module):
        return layer
    parameters = list(inspect.signature(layer.forward).parameters.values())
    others = [p.name for p in parameters[1:] if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    padding = next((p.name for p in parameters if p.name in PADDING), None)
    if not OTHER_INPUTS.issuperset(others) or not (others or padding):
        return layer
    if padding is None:
        return OfItself(layer, 1 + len(others))
    return MaskedOfItself(layer, 1 + len(others), padding)


def adapting(make: Callable[..., Any]) -> Callable[..., Any]:
    """`make`, with the layers that it builds `adapted`."""

    @functools.wraps(make, updated=())
    def build(**kwargs: Any) -> Any:
        return adapted(make(**kwargs))

    return build
