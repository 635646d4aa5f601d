"""Registry of models by name, and plug-ins. Each model is registered once, by the package that defines it.

An entry says where a thing is defined ("module:name") and imports it at first use, so that names can be listed and
checked without PyTorch. Packages outside tokenmix register with the same functions; those that are installed are found
by the entry point group `tokenmix.plugins`, whose modules register on import:

    [project.entry-points."tokenmix.plugins"]
    mine = "my_package.tokenmix_plugin"
"""

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from tokenmix.errors import UserError, as_user_error, needs, unknown_name
from tokenmix.trust import check_typed

Arguments = Mapping[str, Any]
"""Keyword arguments of a constructor or a function that is called by name."""

Target = str | Callable[..., object]
"""A function or class, or "module:name" of one."""


def load_object(target: Target) -> Any:
    """The object that a target names; itself if it is one already."""
    if not isinstance(target, str):
        return target
    module, _, name = target.partition(":")
    with needs(module):
        return getattr(importlib.import_module(module), name)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What can be registered."""

    name: str
    about: str


@dataclass(frozen=True)
class Published:
    """A paper's figures for a model: of image classifiers at 224 px on ImageNet-1k, of others as in `source`.

    Attributes:
        parameters: millions.
        macs: billions of multiply-adds.
        top1: per cent.
        source: where the figures were read, and how far they can be trusted. No accuracy was reproduced here.
        part: the figures are of this part of the model alone, a row of `tokenmix info`.
    """

    parameters: float | None
    macs: float | None
    top1: float | None
    source: str
    part: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModelEntry(Entry):
    """A model.

    Attributes:
        name: for example `gmlp_small`.
        tasks: names of the tasks that train it.
        about: one line for `tokenmix list models`.
        build: called with `arguments`, overridden by the caller's, by `tokenmix.create_model`; returns the module.
        arguments: what makes this preset of `build`.
        pretrained_cfg: of an image classifier with timm's interface: what timm keeps of it (size and normalisation of
            images, source of weights and their `tag`), with which `import tokenmix.models` registers the name there.
        published: the paper's figures, which `tokenmix info` shows next to ours.
    """

    tasks: tuple[str, ...]
    build: Target
    arguments: Arguments = field(default_factory=dict)
    pretrained_cfg: Arguments | None = None
    published: Published | None = None


E = TypeVar("E", bound=Entry)


class Registry(Generic[E]):
    """Entries by name, in the order of registration.

    Args:
        kind: what an entry is, for messages.
        load: imports what registers; called once, when an entry is first asked for.
    """

    def __init__(self, kind: str, load: Callable[[], None]) -> None:
        self.kind, self._load = kind, functools.cache(load)
        self._entries: dict[str, E] = {}

    def register(self, *entries: E) -> None:
        """Add entries; `UserError` for a name that another entry has."""
        for entry in entries:
            if self._entries.setdefault(entry.name, entry) != entry:
                raise UserError(f"the {self.kind} {entry.name!r} is registered already; choose another name")

    def __getitem__(self, name: str) -> E:
        """The entry of that name; `UserError` with the nearest names if there is none."""
        self._load()
        if name not in self._entries:
            raise unknown_name(self.kind, name, self._entries)
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        self._load()
        return name in self._entries

    def __iter__(self) -> Iterator[E]:
        self._load()
        return iter(self._entries.values())

    def names(self, pattern: str = "*") -> list[str]:
        """The names that match a glob."""
        self._load()
        return [name for name in self._entries if fnmatch(name, pattern)]


@functools.cache
def load_plugins() -> None:
    """Import the modules of installed packages that the entry point group `tokenmix.plugins` names."""
    for point in entry_points(group="tokenmix.plugins"):
        load_plugin(point.value)


def _load_models() -> None:
    importlib.import_module("tokenmix.presets")
    load_plugins()


MODELS: Registry[ModelEntry] = Registry("model", _load_models)

_imported: list[str] = []


def imported_plugins() -> tuple[str, ...]:
    """What `load_plugin` has imported, files by their full path, for another process to import as well."""
    return tuple(_imported)


def load_plugin(module: str) -> None:
    """Import a module, or a file NAME.py as module NAME, which registers tasks, models, data sets or mixers.

    Raises:
        UserError: it cannot be imported, or the file has the name of another module.
    """
    failed = f"the plug-in {module} cannot be imported ("
    with as_user_error(failed, "); correct it, or leave it out", Exception, SystemExit):
        if module.endswith(".py"):
            file = Path(module).resolve()
            if not file.is_file():
                raise UserError(f"no file {file} to import; give a file NAME.py, or a module on PYTHONPATH")
            known = sys.modules.get(file.stem) or importlib.util.find_spec(file.stem)
            place = getattr(known, "__file__", None) or getattr(known, "origin", None)
            if known is not None and (place is None or Path(place).resolve() != file):
                raise UserError(f"{file} would hide the module {file.stem!r}; give the file another name")
            if file.stem not in sys.modules:
                # Its own folder is searched for its neighbours, and last: a random.py there hides no library.
                sys.path.append(str(file.parent))
                importlib.import_module(file.stem)
        else:
            _import(module)
    place = str(Path(module).resolve()) if module.endswith(".py") else module
    if place not in _imported:
        _imported.append(place)


def _import(module: str) -> ModuleType:
    """Import a module; the current folder is searched for one that is nowhere else, after every other folder."""
    top, here = module.partition(".")[0], os.getcwd()
    if top not in sys.modules and here not in sys.path and importlib.util.find_spec(top) is None:
        sys.path.append(here)
    return importlib.import_module(module)


def import_object(target: str) -> Callable[..., Any]:
    """The user's class or function that `module:name` means; the current folder is searched last.

    Raises:
        UserError: a file names it and its module has not been imported; it cannot be imported, or cannot be called.
    """
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise UserError(f"{target!r} is not of the form module:Class, for example my_layers:MyAttention")
    if module_name not in sys.modules:
        remedy = f"tokenmix --import {module_name} VERB ..., in Python import {module_name}"
        check_typed(target, "code", "imported", remedy)
    where = "; python -c 'import ...' shows where"
    with as_user_error(f"importing {module_name!r} fails with ", where, Exception, SystemExit):
        try:
            module = _import(module_name)
        except ModuleNotFoundError as error:
            hint = (
                f"no module {error.name!r} here or in the environment; run from the folder that holds it or install it"
            )
            raise UserError(f"cannot import {module_name!r}: {hint}") from error
    if not hasattr(module, name):
        public = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise unknown_name(f"class in module {module_name!r}:", name, public)
    found = getattr(module, name)
    if not callable(found):
        raise UserError(f"{target} is a {type(found).__name__}; name a class, or a function that builds one")
    return found


TIMM = "timm:"
TORCHVISION = "torchvision:"
TRANSFORMERS = "transformers:"


def is_foreign(model: str) -> bool:
    """Whether the name is "torchvision:NAME" or "module:factory", a model of neither this library nor timm."""
    return ":" in model and not model.startswith(("hf-hub:", "local-dir:", TIMM, TRANSFORMERS))


def without_timm(model: str) -> str:
    """The name without "timm:", which may stand before one of timm's; what is of a file stays `FromFile`."""
    return type(model)(model.removeprefix(TIMM))


def is_transformers(model: str) -> bool:
    """Whether the name is "transformers:FOLDER", or "transformers:OWNER/NAME" of the hub."""
    return model.startswith(TRANSFORMERS)


def is_elsewhere(model: str) -> bool:
    """Whether the name is that of a model of torchvision's, the user's or transformers'."""
    return is_foreign(model) or is_transformers(model)


def may_be_others(model: str) -> bool:
    """Whether it may be a model of torchvision's, one that the user's function builds, or one of timm's.

    timm is asked about a name that is none of ours, and its import takes seconds. Without timm the answer is yes, so
    that the import says what is missing.
    """
    if model in MODELS:
        return False
    if is_transformers(model):
        return False
    named = without_timm(model)
    if ":" in named or importlib.util.find_spec("timm") is None:
        return True
    import timm

    return timm.is_model(named)


def may_classify_images(model: str) -> bool:
    """Whether it may be a classifier of images from elsewhere."""
    return is_transformers(model) or may_be_others(model)


def check_models(names: Iterable[str], mixers: Collection[str] | None = None) -> None:
    """Raise `UserError` for a name that is neither our model nor timm's; one with a colon is not checked.

    With `mixers` a name may also be one of these.
    """
    for name in names:
        if name in (mixers or ()) or name in MODELS or may_be_others(name):
            continue
        import timm

        kinds = ["model"] if mixers is None else ["mixer", "model"]
        error = unknown_name(" or ".join(kinds), name, {*(mixers or ()), *list_models(), *timm.list_models()})
        # Nobody reads a list of more than a thousand names.
        if "did you mean" in str(error):
            raise error
        lists = ", ".join(f"tokenmix list {kind}s" for kind in kinds)
        raise UserError(f"unknown {' or '.join(kinds)} {name!r}; see: {lists}")


def list_models(pattern: str = "*", *, task: str | None = None) -> list[str]:
    """The names of our models that match a glob, for example `list_models("eamlp*")`; with `task`, those it trains."""
    return [name for name in MODELS.names(pattern) if task is None or task in MODELS[name].tasks]
