"""What pyproject.toml declares, and what of it is installed here."""

import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def requirements(*extras: str) -> list[str]:
    """Those of the core and of the extras, with the extras that these include."""
    found = list(PROJECT["dependencies"])
    for extra in extras:
        for line in EXTRAS[extra]:
            one = Requirement(line)
            found += requirements(*one.extras) if one.name == "tokenmix" else [line]
    return list(dict.fromkeys(found))


def installed(lines: Iterable[str]) -> dict[str, Distribution]:
    """The distributions that meet the requirements, with all that they require in turn.

    Raises:
        PackageNotFoundError: one of them is not installed.
    """
    found: dict[str, Distribution] = {}
    seen, todo = set(), [Requirement(line) for line in lines]
    while todo:
        one = todo.pop()
        if str(one) in seen or (one.marker is not None and not one.marker.evaluate({"extra": ""})):
            continue
        seen.add(str(one))
        name = canonicalize_name(one.name)
        found[name] = distribution(one.name)
        for line in found[name].requires or ():
            needed = Requirement(line)
            if needed.marker is None or any(needed.marker.evaluate({"extra": e}) for e in ("", *one.extras)):
                needed.marker = None
                todo.append(needed)
    return found


def top_levels(found: Iterable[Distribution]) -> set[str]:
    """Files and folders of the distributions in site-packages, without those that begin with a dot."""
    names = {file.parts[0] for one in found for file in one.files or () if not file.parts[0].startswith(".")}
    return names - {"__pycache__", "bin"}


def modules(found: Iterable[Distribution]) -> set[str]:
    """Top-level modules of the distributions."""
    return {name.partition(".")[0] for name in top_levels(found) if not name.endswith((".dist-info", ".pth"))}


def missing(lines: Iterable[str]) -> str | None:
    """The first requirement that is not installed here; None if all are."""
    try:
        installed(lines)
    except PackageNotFoundError as error:
        return error.name
    return None


STANDARD = set(sys.stdlib_module_names)
