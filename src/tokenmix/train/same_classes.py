"""Whether other data has the classes that a run was trained on."""

from collections.abc import Sequence

from tokenmix.errors import UserError

__all__ = ["check_names"]


def check_names(spec: str, found: Sequence[str], trained: Sequence[str], what: str = "classes") -> None:
    """Raise `UserError` unless both are the same names in one order.

    Args:
        spec: the data, as the user named it.
        found: names that the data has.
        trained: names in the run.
        what: they are names of.
    """
    if list(found) != list(trained):
        raise UserError(f"{spec!r} has the {what} {_first(found)}; the run was trained on {_first(trained)}")


def _first(names: Sequence[str]) -> str:
    return (", ".join(names[:3]) or "none") + (f", ... ({len(names)})" if len(names) > 3 else "")
