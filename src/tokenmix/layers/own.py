"""Mixers of a user's own, from outside tokenmix: a mistake in one is one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from tokenmix.errors import OwnMixerError, UserError, one_line
from tokenmix.layers.base import Mixer


def own_mixers(model: nn.Module) -> list[Mixer]:
    """The mixers in a model whose class is from outside tokenmix."""
    return [m for m in model.modules() if isinstance(m, Mixer) and not type(m).__module__.startswith("tokenmix.")]


@contextmanager
def checked_own_mixers(model: nn.Module) -> Iterator[None]:
    """Check each call of such a mixer in the block; without one nothing is different.

    Raises:
        OwnMixerError: a method of one is missing or fails, its macs are not a whole number, or it returns another
            shape than it was given.
    """
    own = own_mixers(model)
    hooks = [mixer.register_forward_hook(_check_call) for mixer in own]
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # whatever a stranger's forward pass may raise
        if not own:
            raise
        names = ", ".join(sorted({type(mixer).__name__ for mixer in own}))
        raise OwnMixerError(f"the model does not run with {names}: {one_line(error)}") from error
    finally:
        for hook in hooks:
            hook.remove()


def _check_call(mixer: Mixer, args: tuple[Any, ...], out: Any) -> None:
    x, name = args[0], type(mixer).__name__
    if not isinstance(out, Tensor) or out.shape != x.shape:
        got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise OwnMixerError(f"{name} turns {tuple(x.shape)} into {got}; return a tensor of the shape that it is given")
    if mixer.capabilities.map is not None and type(mixer).attention_map is Mixer.attention_map:
        mixer.attention_map(x)
    count_of(mixer, x[0].numel() // mixer.dim)


def count_of(mixer: Mixer, num_tokens: int) -> int:
    """`mixer.macs(num_tokens)`; `OwnMixerError` if it returns no whole number."""
    count = mixer.macs(num_tokens)
    if not isinstance(count, int):
        raise OwnMixerError(
            f"macs of {type(mixer).__name__} returned {count!r}; return a whole number of multiply-adds"
        )
    return count
