"""Private names of other libraries: none is written, and those that are read are listed in DESIGN.md."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Documented, in spite of the underscore: os._exit and a named tuple's method.
PUBLIC = {"_asdict", "_exit"}


def private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in PUBLIC


def on_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def defined(tree: ast.AST) -> Iterator[str]:
    """Names that a file of ours gives to functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and on_self(node):
            yield node.attr


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.AST]:
    return {path: ast.parse(path.read_text()) for path in sorted((ROOT / "src").rglob("*.py"))}


@pytest.fixture(scope="module")
def ours(trees: dict[Path, ast.AST]) -> set[str]:
    return {name for tree in trees.values() for name in defined(tree)}


def foreign(tree: ast.AST, ours: set[str]) -> Iterator[str]:
    """Private names of others that a file reads: attributes, a base class's methods, imports, and strings."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    endings = {id(arg) for call in calls if call.func.attr in ("endswith", "removesuffix") for arg in call.args}
    endings |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr):
            inherited = isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()"
            if inherited or node.attr not in ours:
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("tokenmix"):
            yield from filter(private, [*(node.module or "").split("."), *(alias.name for alias in node.names)])
        elif isinstance(node, ast.Constant) and id(node) not in endings and node.value not in ours:
            yield from re.findall(r"^_[a-z]\w*$", str(node.value))


def test_no_private_attribute_of_another_library_is_written(trees: dict[Path, ast.AST], ours: set[str]):
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and private(node.attr):
                assert on_self(node) or node.attr in ours, f"{path}:{node.lineno} {ast.unparse(node)}"
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
                name = ast.unparse(node.args[1]).strip("'")
                assert not private(name) or name in ours, f"{path}:{node.lineno} {ast.unparse(node)}"
            if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                held = node.value
                written = isinstance(held, ast.Attribute) and private(held.attr) and held.attr not in ours
                assert not written, f"{path}:{node.lineno} {ast.unparse(node)}"


def test_private_names_that_are_read_are_those_of_the_design(trees: dict[Path, ast.AST], ours: set[str]):
    section = (ROOT / "DESIGN.md").read_text().split("## Private names of other libraries\n")[1].split("\n## ")[0]
    listed = set(re.findall(r"`(_\w+)`", section))
    found = {name for tree in trees.values() for name in foreign(tree, ours)}
    assert found == listed, f"list in DESIGN.md {sorted(found - listed)}; remove there {sorted(listed - found)}"
