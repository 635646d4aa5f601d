"""Mistakes in names and paths that can be reported before PyTorch is imported, which takes seconds."""

import ast
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import tokenmix
from tokenmix.errors import UserError, unknown_name
from tokenmix.files import user_path
from tokenmix.lab.data.lookup import parse_spec
from tokenmix.lab.data.remote import is_url
from tokenmix.lab.train.sources import read_config
from tokenmix.registry import MODELS, list_models, may_be_others

FILE = re.compile(r"\S+\.(png|jpe?g|webp|bmp|gif|tiff?|ply|off|obj|npz|npy|txt|tsv|jsonl?)", re.IGNORECASE)


def check_data(spec: str) -> None:
    """Raise `UserError` for a data set that does not exist, or a path that does not."""
    if not spec:
        return
    entry, variant = parse_spec(spec)
    # Columns of a table come after its path; a pattern is expanded by the reader.
    path = variant.partition("#")[0]
    local = entry.variant == "path" and not is_url(path) and not re.search(r"[*?\[{,]", path)
    if local and not user_path(path).exists():
        raise UserError(f"{path} does not exist; give --data {entry.about}")


def check_mixers(names: Iterable[str]) -> None:
    """Raise `UserError` for a name that is not in the table of mixers; `module:Class` is left to its import."""
    known = _mixers()
    for name in names:
        if ":" not in name and name not in known:
            raise unknown_name("mixer", name, known)


def _mixers() -> list[str]:
    """The names in layers/__init__.py, read from its source unless it has been imported: its classes need PyTorch."""
    MODELS.names()  # imports the plug-ins, which may register mixers
    table = sys.modules.get("tokenmix.layers.table")
    if table is not None:
        return table.list_mixers()
    source = ast.parse((Path(tokenmix.__file__).parent / "layers/__init__.py").read_text(encoding="utf-8"))
    (literal,) = (
        node.args[0]
        for node in ast.walk(source)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "MIXERS.update"
    )
    assert isinstance(literal, ast.Dict)
    return [key.value for key in literal.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]


def check_models(names: Iterable[str], *, or_mixers: bool = False) -> None:
    """Raise `UserError` for a name that is neither our model nor timm's; one with a colon is not checked."""
    mixers = _mixers() if or_mixers else []
    for name in names:
        if name in mixers or name in MODELS or may_be_others(name):
            continue
        import timm

        kinds = ["mixer", "model"] if or_mixers else ["model"]
        error = unknown_name(" or ".join(kinds), name, {*mixers, *list_models(), *timm.list_models()})
        # Nobody reads a list of more than a thousand names.
        if "did you mean" in str(error):
            raise error
        lists = ", ".join(f"tokenmix list {kind}s" for kind in kinds)
        raise UserError(f"unknown {' or '.join(kinds)} {name!r}; see: {lists}")


def check_files(words: Iterable[str]) -> None:
    """Raise `UserError` for a word that names a file, by its suffix, which does not exist; a sentence names none."""
    for word in words:
        path = word.rpartition("=")[2]
        if FILE.fullmatch(path) and not user_path(path).exists() and not Path(word).exists():
            raise UserError(f"no file {path}; give one that exists")


def check_target(target: str) -> None:
    """Raise `UserError` unless the target is a run folder that can be read, or a model of ours."""
    if user_path(target).is_dir():
        read_config(user_path(target))
    elif target not in MODELS:
        raise UserError(
            f"{target!r} is neither a run folder nor a model; give a run folder or one of {', '.join(list_models())}"
        )
