"""Imports run one way, and what must start at once imports nothing heavy."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"
PACKAGE = SRC / "tokenmix"
FILES = sorted(PACKAGE.rglob("*.py"))
HEAVY = {"torch", "torchvision", "timm", "lightning", "transformers", "matplotlib", "sklearn", "torchmetrics"}

LEAVES = {"errors", "files", "environment", "registry", "trust"}
BELOW = {
    "errors": set(),
    "environment": {"errors"},
    "files": {"errors"},
    "trust": {"errors"},
    "registry": {"errors", "files", "trust"},
    "ops": {"errors", "kernels"},
    "kernels": {"errors"},
    "losses": {"errors", "ops"},
    "layers": {"errors", "ops", "registry", "trust"},
    "checkpoints": {"errors", "files"},
    "presets": {"registry"},
    "models": {*LEAVES, "ops", "layers", "checkpoints"},
    "text": {*LEAVES, "ops", "layers", "models"},
    "parallel": {"errors", "ops", "layers", "models"},
    "register": {"models", "text", "swap"},
    "testing": {*LEAVES, "ops", "layers"},
    "swap": {*LEAVES, "ops", "layers"},
    "distillation": {*LEAVES, "ops", "layers", "swap"},
    "profiling": {*LEAVES, "ops", "layers", "models", "swap"},
    "inference": {*LEAVES, "ops", "layers", "models", "text", "profiling"},
}
LIBRARY = {*BELOW}
BELOW["lab.registry"] = {"errors", "registry"}
BELOW["lab.data"] = {*LIBRARY, "lab.registry"}
BELOW["lab.train"] = BELOW["lab.data"] | {"lab.data"}
BELOW["lab.tasks"] = BELOW["lab.train"] | {"lab.train"}
# The tools work on run folders of any task.
BELOW["lab.inspect"] = BELOW["lab.tasks"] | {"lab.tasks"}
BELOW["lab.swapping"] = BELOW["lab.tasks"] | {"lab.tasks"}
BELOW["lab.grid"] = BELOW["lab.train"] | {"lab.train"}
# A comparison's report shows the maps of every run and what each costs.
BELOW["lab.compare"] = BELOW["lab.inspect"] | {"lab.inspect", "lab.grid"}
"""Part of the package: the parts that it may import. The command is above all, and the lab above the library."""

TOP = {"lab.cli", "lab.__init__", "__init__", "__main__"}


@functools.cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _part(file: Path) -> str:
    return _room(file.relative_to(PACKAGE).with_suffix("").parts)


def _room(parts: Sequence[str]) -> str:
    """The folder or file of the package, or of the lab in it."""
    return ".".join(parts[: 2 if parts[0] == "lab" else 1])


def _imports(tree: ast.AST, *, top_level: bool = False) -> Iterator[tuple[str, int]]:
    """Names of the modules that are imported; with `top_level` only where importing the file imports them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)
        elif top_level and (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _type_checking(node)):
            continue
        else:
            yield from _imports(node, top_level=top_level)


def _type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _module(file: Path) -> str:
    parts = file.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported_modules(tree: ast.AST, known: set[str]) -> set[str]:
    """Modules of the package that a file names in any import; what only a type checker reads is left out."""
    found = set()
    for node in ast.iter_child_nodes(tree):
        if _type_checking(node):
            continue
        if isinstance(node, ast.ImportFrom) and node.module in known:
            # `from package import name` names the package's module of that name, or else the package.
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & known | ({node.module} if names - known else set())
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & known
        else:
            found |= _imported_modules(node, known)
    return found


def _circles(edges: dict[str, set[str]]) -> list[set[str]]:
    """The strongly connected components of more than one module."""

    def reached(start: str) -> set[str]:
        seen, todo = set(), [start]
        while todo:
            for other in edges[todo.pop()] - seen:
                seen.add(other)
                todo.append(other)
        return seen

    beyond = {name: reached(name) for name in edges}
    found: list[set[str]] = []
    for name in sorted(edges):
        circle = {other for other in beyond[name] if name in beyond[other]} - {name}
        if circle and not any(name in known for known in found):
            found.append(circle | {name})
    return found


def test_circles_are_found() -> None:
    assert _circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "d"}}) == [{"b", "c"}]


def test_no_modules_import_each_other_in_a_circle() -> None:
    known = {_module(file) for file in FILES}
    edges = {_module(file): _imported_modules(_tree(file), known) for file in FILES}
    assert not _circles(edges)


def _own_parts(name: str) -> str | None:
    pieces = name.split(".")
    return _room(pieces[1:]) if pieces[0] == "tokenmix" and len(pieces) > 1 else None


def test_every_part_of_the_package_is_known() -> None:
    parts = {_part(file) for file in FILES}
    assert parts <= set(BELOW) | TOP, f"say in BELOW what {parts - set(BELOW) - TOP} may import"


def test_imports_run_one_way() -> None:
    wrong = []
    for file in FILES:
        part = _part(file)
        if part in TOP:
            continue
        # `from tokenmix import __version__` and the error class are the package's own.
        allowed = BELOW[part] | {part, None, "__version__", "UserError"}
        imports = _imports(_tree(file))
        wrong += [f"{file}:{line}: {part} imports {n}" for n, line in imports if _own_parts(n) not in allowed]
    assert not wrong, "imports of what stands above or next to"


def test_a_domain_imports_no_other_domain() -> None:
    """Who works on one opens one folder; what several need stands in models, data or tasks itself."""
    domains = {path.parent.name for path in PACKAGE.glob("lab/tasks/*/__init__.py")}
    wrong = []
    for file in PACKAGE.glob("lab/tasks/*/**/*.py"):
        own = file.relative_to(PACKAGE / "lab/tasks").parts[0]
        imports = [(name.split("."), line) for name, line in _imports(_tree(file))]
        wrong += [
            f"{file}:{line}: {own} imports {'.'.join(name)}"
            for name, line in imports
            if name[:3] == ["tokenmix", "lab", "tasks"] and name[3] in domains - {own}
        ]
    assert not wrong


def test_imports_inside_the_package_are_absolute() -> None:
    nodes = [(file, node) for file in FILES for node in ast.walk(_tree(file))]
    assert not [f"{file}:{n.lineno}" for file, n in nodes if isinstance(n, ast.ImportFrom) and n.level]


LIGHT = [
    "__init__",
    "lab/cli/__init__",
    "lab/cli/command",
    "lab/cli/listing",
    "lab/cli/names",
    "lab/cli/parsing",
    "lab/cli/runs",
    "lab/data/__init__",
    "lab/data/lookup",
    "errors",
    "registry",
    "presets",
    "lab/train/config",
    "lab/train/folder",
    "lab/train/schema",
    "lab/train/sources",
    "lab/tasks/__init__",
    *(f"lab/tasks/{file.parent.name}/__init__" for file in PACKAGE.glob("lab/tasks/*/__init__.py")),
]


@pytest.mark.parametrize("name", LIGHT)
def test_nothing_heavy_at_the_top_of(name: str) -> None:
    tree = ast.parse((PACKAGE / f"{name}.py").read_text())
    heavy = {module for module, _ in _imports(tree, top_level=True) if module.split(".")[0] in HEAVY}
    assert not heavy


def test_ops_need_only_torch() -> None:
    outside = set()
    for file in (PACKAGE / "ops").rglob("*.py"):
        names = {module.split(".")[0] for module, _ in _imports(_tree(file))}
        outside |= names - set(sys.stdlib_module_names) - {"tokenmix", "torch"}
    assert not outside


PRIVATE = {
    "torch._assert_async",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._pytree.tree_leaves",
}
"""What the package takes of torch without a promise; the operators for CPUs are in inference/operators.py."""


def _private_of_torch(tree: ast.AST) -> set[str]:
    used = {name for name, _ in _imports(tree)}
    used |= {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {name for name in used if re.match(r"torch(\.\w+)*?\._(?!_)", name)}


def test_private_names_of_torch() -> None:
    found = {name for file in FILES if _part(file) != "inference" for name in _private_of_torch(_tree(file))}
    assert found == PRIVATE


def test_private_operators_of_the_cpu_are_in_one_file() -> None:
    files = [file for file in FILES if _part(file) == "inference" and _private_of_torch(_tree(file))]
    assert [file.name for file in files] == ["operators.py"]


def _python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(SRC), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_and_command_line_load_nothing_heavy() -> None:
    loaded = _python(
        "import sys, tokenmix, tokenmix.lab.cli\n"
        "try: tokenmix.lab.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        f"print('HEAVY', sorted({HEAVY!r} & set(sys.modules)))"
    )
    assert loaded.splitlines()[-1] == "HEAVY []"


@pytest.mark.parametrize("what", ["models", "tasks", "data"])
def test_listing_loads_nothing_heavy(what: str) -> None:
    loaded = _python(
        f"import sys, tokenmix.lab.cli; assert tokenmix.lab.cli.main(['list', {what!r}]) == 0\n"
        f"print('HEAVY', sorted({HEAVY!r} & set(sys.modules)))"
    )
    assert loaded.splitlines()[-1] == "HEAVY []"


@pytest.mark.parametrize(
    "words",
    [
        ["train", "detection", "--model", "vit_nano"],
        ["probe", "extrnal"],
        ["train", "detecton"],
    ],
)
def test_a_wrong_name_is_told_without_anything_heavy(words: list[str]) -> None:
    loaded = _python(
        f"import sys, tokenmix.lab.cli; assert tokenmix.lab.cli.main({words!r}) == 2\n"
        f"print('HEAVY', sorted({HEAVY!r} & set(sys.modules)))"
    )
    assert loaded.splitlines()[-1] == "HEAVY []"
