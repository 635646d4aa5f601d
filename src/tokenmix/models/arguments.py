"""What a builder is given: a preset's own numbers, and over them what the user asks for."""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from tokenmix.errors import UserError

__all__ = ["preset_arguments"]


def preset_arguments(
    name: str,
    build: Callable[..., Any],
    numbers: Mapping[str, Any],
    given: Mapping[str, Any],
    own: Collection[str] = (),
) -> dict[str, Any]:
    """The arguments of a preset's builder.

    Args:
        name: of the preset.
        build: what is called with them.
        numbers: the preset's.
        given: the user's, which win. The preset's `backbone_kwargs` go with its backbone.
        own: arguments of `build` that are the preset's alone.

    Raises:
        UserError: an argument that `build` does not have.
    """
    known = [key for key in inspect.signature(build).parameters if key not in own]
    unknown = next((key for key in given if key not in known), None)
    if unknown is not None:
        raise UserError(f"model {name!r} has no argument {unknown!r}; it takes {', '.join(sorted(known))}")
    kept = {key: value for key, value in numbers.items() if key != "backbone_kwargs" or "backbone" not in given}
    return {**kept, **given}
