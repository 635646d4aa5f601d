"""Settings that one task has and others have not: a frozen dataclass, filled from --task-kwargs."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from tokenmix.errors import UserError, unknown_name

__all__ = ["NoSettings", "make_settings"]

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class NoSettings:
    """Of a task that has none."""


def make_settings(kind: type[T], given: Mapping[str, Any], task: str) -> T:
    """The settings of a task from the values that a user gave.

    Args:
        kind: a frozen dataclass whose fields are int, float, str, bool, a tuple of one of them, or a Literal, each also
            `| None`, all with a default.
        given: values by name; an int serves for a float, one value for a tuple of one.
        task: its name, for messages.

    Raises:
        UserError: a name that is no field, or a value of another type.
    """
    types, names = get_type_hints(kind), [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    values = {}
    for name, value in given.items():
        if not names:
            raise UserError(f"{task} has no settings of its own, got {name}={value!r}; leave --task-kwargs out")
        if name not in names:
            raise unknown_name(f"setting of {task}", name, names)
        values[name] = _fitted(types[name], value, f"{task}: {name}={value!r}")
    return kind(**values)


def _fitted(wanted: Any, value: Any, what: str) -> Any:
    options = get_args(wanted) if get_origin(wanted) not in (Literal, tuple) else ()
    if type(None) in options:
        return None if value is None else _fitted(next(o for o in options if o is not type(None)), value, what)
    if get_origin(wanted) is Literal:
        if value not in get_args(wanted):
            raise UserError(f"{what} is not possible; give one of {', '.join(map(str, get_args(wanted)))}")
        return value
    if get_origin(wanted) is tuple:
        items = value if isinstance(value, tuple | list) else (value,)
        return tuple(_fitted(get_args(wanted)[0], item, what) for item in items)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        raise UserError(f"{what} must be {wanted.__name__}")
    return value
