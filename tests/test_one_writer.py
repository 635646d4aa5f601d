"""Every file is written through `tokenmix.files`: no other module opens one for writing, or lets a library do so."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "tokenmix"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE) != Path("files.py"))

# Methods and functions that write to the path that they get, and the position of that path.
WRITERS = {
    "write_text": None,
    "write_bytes": None,
    "touch": None,
    "symlink_to": None,
    "hardlink_to": None,
    "save": 0,
    "savefig": 0,
    "save_file": 1,
    "save_pretrained": 0,
    "save_for_hf": 1,
    "dump": 1,
    "tofile": 0,
    "savez": 0,
    "copy": 1,
    "copy2": 1,
    "copyfile": 1,
    "copytree": 1,
    "move": 1,
}
# Methods of these names that are ours, or give bytes: receiver and name as in the source.
OURS = {"data.save", "results.save", "safetensors.torch.save"}
MODULES = {"copy": "shutil", "copy2": "shutil", "copyfile": "shutil", "copytree": "shutil", "move": "shutil"}
# Partial files of these context managers, and buffers in memory, are what a library may write to.
PLACES = {"replacing", "new_folder"}


def direct_writes(tree: ast.Module) -> Iterator[str]:
    """Line and call of each write that does not go to a partial file of `files.py` or to a buffer."""
    safe = _safe_names(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        text = ast.unparse(node.func)
        if name in ("open", "fdopen") and text != "webbrowser.open" and _opens_to_write(node):
            yield f"{node.lineno}: {ast.unparse(node)}"
        if name not in WRITERS or text in OURS or (name in MODULES and text != f"{MODULES[name]}.{name}"):
            continue
        place = WRITERS[name]
        if place is None:
            # As a function, `write_bytes` is that of `files.py`.
            if isinstance(node.func, ast.Attribute):
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif not any(_is_safe(argument, safe) for argument in node.args[: place + 2]):
            yield f"{node.lineno}: {ast.unparse(node)}"


def _opens_to_write(call: ast.Call) -> bool:
    words = [arg.value for arg in [*call.args, *(k.value for k in call.keywords)] if isinstance(arg, ast.Constant)]
    modes = [word for word in words if isinstance(word, str) and len(word) <= 3 and set(word) <= set("rwaxbt+")]
    return any(set(mode) & set("wax+") for mode in modes) or any(
        flag in ast.unparse(call) for flag in ("O_WRONLY", "O_RDWR", "O_CREAT")
    )


def _safe_names(tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.withitem) and node.optional_vars is not None:
            if ast.unparse(node.context_expr).partition("(")[0] in PLACES:
                found.add(ast.unparse(node.optional_vars))
        elif isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("io.BytesIO("):
            found |= {ast.unparse(target) for target in node.targets}
        elif isinstance(node, ast.FunctionDef):
            given = [arg for arg in node.args.args if arg.annotation is not None]
            buffers = {arg.arg for arg in given if ast.unparse(arg.annotation) == "BinaryIO"}
            # A partial file or folder may be handed on, under this name or to this hook of a task.
            found |= buffers | {arg.arg for arg in given if arg.arg == "partial" or node.name == "save_for_hub"}
    return found


def _is_safe(argument: ast.expr, safe: set[str]) -> bool:
    if isinstance(argument, ast.Call) and getattr(argument.func, "id", "") == "str":
        argument = argument.args[0]
    while isinstance(argument, ast.BinOp):
        argument = argument.left
    return ast.unparse(argument) in safe


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_writes_a_file_itself(path: Path):
    found = list(direct_writes(ast.parse(path.read_text())))
    assert not found, f"{path}: write through tokenmix.files: {found}"


@pytest.mark.parametrize(
    "source",
    [
        "path.write_text(told)",
        "path.write_bytes(b'')",
        "open(path, 'w')",
        "path.open('ab')",
        "figure.savefig(path)",
        "image.save(path)",
        "torch.save(x, path)",
        "save_file(x, path)",
        "os.open(path, os.O_WRONLY)",
        "open(path, mode='r+')",
        "model.save_pretrained(path)",
        "shutil.copy(a, b)",
        "os.fdopen(handle, 'wb')",
    ],
)
def test_a_direct_write_is_found(source: str):
    assert list(direct_writes(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "with replacing(path) as partial:\n    image.save(partial)",
        "with new_folder(path) as partial:\n    model.save_pretrained(partial)\n    torch.save(x, partial / 'x')",
        "buffer = io.BytesIO()\ntorch.save(x, buffer)",
        "open(path, 'rb')",
        "write_bytes(path, data)",
        "x.copy()",
    ],
)
def test_partial_files_and_buffers_are_allowed(source: str):
    assert not list(direct_writes(ast.parse(source)))
