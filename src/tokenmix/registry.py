"""Registry of models by name, and plug-ins.

An entry names the definition as "module:name" and imports it at first use, so listing and checking names needs no
PyTorch. Other packages register with the same functions. The modules in the entry point group `tokenmix.plugins` of
installed packages are imported, and register on import:

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
"""Keyword arguments of a constructor or function."""

Target = str | Callable[..., object]
"""A function or class, or its "module:name"."""


def load_object(target: Target) -> Any:
    """Import the object of "module:name"; other targets are returned unchanged."""
    if not isinstance(target, str):
        return target
    module, _, name = target.partition(":")
    with needs(module):
        return getattr(importlib.import_module(module), name)


@dataclass(frozen=True, kw_only=True)
class Entry:
    name: str
    about: str


@dataclass(frozen=True)
class Published:
    """Published figures of a model: image classifiers at 224 px on ImageNet-1k, others as described in `source`."""

    parameters: float | None  # millions
    macs: float | None  # billions of multiply-adds
    top1: float | None  # per cent
    source: str  # origin and reliability of the figures. No accuracy was reproduced here
    part: str | None = None  # row of `tokenmix info`, if the figures are for this part of the model only


@dataclass(frozen=True, kw_only=True)
class ModelEntry(Entry):
    """A registered model.

    Attributes:
        name: for example `gmlp_small`.
        tasks: names of the tasks that train it.
        about: one line for `tokenmix list models`.
        build: function or class that `tokenmix.create_model` calls with `arguments`, updated by the caller's.
        arguments: arguments of this preset.
        pretrained_cfg: timm's config (image size and normalisation, source of weights, `tag`) for image classifiers
            with timm's interface. `import tokenmix.models` registers the name in timm with this config.
        published: figures of the paper, shown by `tokenmix info`.
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
        kind: kind of entry, for messages.
        load: imports the modules that register entries; called once, at the first lookup.
    """

    def __init__(self, kind: str, load: Callable[[], None]) -> None:
        self.kind, self._load = kind, functools.cache(load)
        self._entries: dict[str, E] = {}

    def register(self, *entries: E) -> None:
        """Add entries; `UserError` if a name is taken by another entry."""
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
    """Import all modules of the entry point group `tokenmix.plugins`."""
    for point in entry_points(group="tokenmix.plugins"):
        load_plugin(point.value)


def _load_models() -> None:
    importlib.import_module("tokenmix.presets")
    load_plugins()


MODELS: Registry[ModelEntry] = Registry("model", _load_models)
NO_WEIGHTS = (
    "has no pretrained weights; leave --pretrained out, or give --init-from FILE, in create_model "
    "pretrained_cfg_overlay={'file': FILE}"
)

_imported: list[str] = []


def imported_plugins() -> tuple[str, ...]:
    """Modules that `load_plugin` imported, files by their full path, for import in another process."""
    return tuple(_imported)


def load_plugin(module: str) -> None:
    """Import a module, or a file NAME.py as module NAME, which registers things; `UserError` if that fails."""
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
                # The file's folder is searched last, for its neighbours: a random.py there hides no library.
                sys.path.append(str(file.parent))
                importlib.import_module(file.stem)
        else:
            _import(module)
    place = str(Path(module).resolve()) if module.endswith(".py") else module
    if place not in _imported:
        _imported.append(place)


def _import(module: str) -> ModuleType:
    """Import a module; the current folder is searched last."""
    top, here = module.partition(".")[0], os.getcwd()
    if top not in sys.modules and here not in sys.path and importlib.util.find_spec(top) is None:
        sys.path.append(here)
    return importlib.import_module(module)


def import_object(target: str) -> Callable[..., Any]:
    """Import a user's class or function by `module:name`; the current folder is searched last.

    `UserError` if that fails, the object is not callable, or a file gives the name and the module is not imported.
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
            if module_name.endswith(".py"):
                hint = f"a module is named without .py: {module_name.removesuffix('.py')}:{name}"
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
    """Remove the prefix "timm:"; text from a file stays `FromFile`."""
    return type(model)(model.removeprefix(TIMM))


def is_transformers(model: str) -> bool:
    """Whether the name is "transformers:FOLDER", or "transformers:OWNER/NAME" of the hub."""
    return model.startswith(TRANSFORMERS)


def is_users(model: str) -> bool:
    """Whether code of the user builds the model: "module:factory", or a name that a plug-in registered, in timm too."""
    if model in MODELS:
        build = MODELS[model].build
        return not (build if isinstance(build, str) else build.__module__).startswith("tokenmix.")
    if ":" in (named := without_timm(model)):
        return is_foreign(model) and not model.startswith(TORCHVISION)
    import timm

    return timm.is_model(named) and not timm.model_entrypoint(named).__module__.startswith(("timm.", "tokenmix."))


def is_elsewhere(model: str) -> bool:
    """Whether the model is from torchvision, transformers or the user."""
    return is_foreign(model) or is_transformers(model)


def may_be_others(model: str) -> bool:
    """Whether the model may be from torchvision, timm or a user's function.

    Unknown names are looked up in timm, whose import takes seconds. Without timm the answer is yes, so that the later
    import reports what is missing.
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
    return is_transformers(model) or may_be_others(model)


def check_models(names: Iterable[str], mixers: Collection[str] | None = None) -> None:
    """Raise `UserError` unless each name is a model of ours or timm's, in `mixers`, or has a colon."""
    for name in names:
        if name in (mixers or ()) or name in MODELS or may_be_others(name):
            continue
        import timm

        kinds = ["model"] if mixers is None else ["mixer", "model"]
        # A list of more than a thousand names would not help.
        lists = "see: " + ", ".join(f"tokenmix list {kind}s" for kind in kinds)
        raise unknown_name(" or ".join(kinds), name, {*(mixers or ()), *list_models(), *timm.list_models()}, lists)


def list_models(pattern: str = "*", *, task: str | None = None) -> list[str]:
    """Names of our models that match a glob, for example `list_models("eamlp*")`, and that `task` can train."""
    return [name for name in MODELS.names(pattern) if task is None or task in MODELS[name].tasks]
