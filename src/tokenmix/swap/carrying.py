"""Pass scores between attention layers of models from other libraries, whose blocks only pass tokens."""

import functools
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from tokenmix.errors import UserError
from tokenmix.layers.base import Capabilities, Mixer
from tokenmix.ops.attention import attention_probabilities
from tokenmix.ops.less import Scores
from tokenmix.registry import Arguments

LOST = (
    "the layer was called without the layer before it, whose scores it transforms: call the whole model; gradient "
    "checkpointing must wrap whole blocks, with use_reentrant=False"
)


class _Here(threading.local):
    scores: Scores | None = None  # of the previous layer, until the next layer takes them
    entered: tuple[TensorWeakRef, ...] = ()  # inputs of the next layer's block, and of its parts, since then


class Link:
    """Scores on their way from one layer to the next. They belong to a forward pass, so copies have none."""

    # Block inputs of unfinished passes, with the scores taken in them.
    taken: tuple[tuple[TensorWeakRef, Scores], ...] = ()

    def __init__(self) -> None:
        self.here = _Here()  # of this thread: several may call one model

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Link, ()

    def take(self, x: Tensor) -> Scores:
        """The scores of this pass for the layer's tokens x.

        Gradient checkpointing calls a block again with the same tensor, possibly after later passes. The layer then
        takes the scores of the block's first call. transformers calls `forward` directly, without hooks of the block.
        """
        scores, entered = self.here.scores, self.here.entered
        self.here.scores, self.here.entered = None, ()
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            inputs = [given for ref in entered if (given := ref()) is not None]
            self.taken = tuple((ref, old) for ref, old in self.taken if ref() is not None)
            for given in (x, *reversed(inputs)):
                for ref, old in self.taken:
                    if ref() is given:
                        # The newly received scores are from a repeated call as well.
                        return old
            if scores is not None and inputs:
                self.taken = (*self.taken, (TensorWeakRef(inputs[0]), scores))
        if scores is None:
            raise UserError(LOST)
        return scores


def note_call(link: Link, first: bool, part: nn.Module, args: tuple[object, ...], kwargs: Arguments) -> None:
    """Forward pre-hook of a layer's block (`first`) and of the parts of that block."""
    if first:
        link.here.entered = ()
    x = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
    if x is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        link.here.entered = (*link.here.entered, TensorWeakRef(x))


def watch_blocks(layers: Sequence[tuple[nn.Module, "Carrying"]]) -> Callable[[], None]:
    """Record the inputs of each block in the link of its layer; return a function that removes the hooks."""
    handles = []
    for block, layer in layers:
        # A block with several such layers is called once for all of them, possibly with a user's tensor.
        alone = sum(any(part is other for part in block.modules()) for _, other in layers) == 1
        if alone and layer.before is not None:
            for part in (block, *block.children()):
                hook = functools.partial(note_call, layer.before, part is block)
                handles.append(part.register_forward_pre_hook(hook, with_kwargs=True))

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


class Carrying(Mixer):
    """A mixer that takes scores from the previous layer, if there is one `before`, and passes its own to the next."""

    def __init__(self, inner: Mixer, before: Link | None) -> None:
        super().__init__()
        self.inner, self.dim, self.before, self.after, self.last = inner, inner.dim, before, Link(), True

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        return self.inner.capabilities

    @property
    def num_tokens(self) -> object:
        return self.inner.num_tokens

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        out, self.after.here.scores = self.inner.mix(x, None if self.before is None else self.before.take(x), mask)
        if self.last and torch.compiler.is_compiling():
            self.after.here.scores = None
        return out

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The map of the last call, for a forward hook; available until the next layer takes the scores."""
        if self.before is None:
            return self.inner.attention_map(x, mask)
        if self.after.here.scores is None:
            raise UserError(f"{LOST}; a forward hook may ask for its map")
        query, key, dense, _, _ = self.after.here.scores.joined()
        return attention_probabilities(query, key, mask=mask, bias=dense, scale=1.0)

    def macs(self, num_tokens: int) -> int:
        return self.inner.macs(num_tokens)

    def set_grid(self, old: Sequence[int], new: Sequence[int]) -> None:
        self.inner.set_grid(old, new)
