"""Registry of tasks, models and data sets by name. Each is registered once, by the package that defines it.

An entry says where a thing is defined ("module:name") and imports it at first use, so that names can be listed and
checked without PyTorch. Packages outside tokenmix register with the same functions; those that are installed are found
by the entry point group `tokenmix.plugins`, whose modules register on import:

    [project.entry-points."tokenmix.plugins"]
    mine = "my_package.tokenmix_plugin"
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from tokenmix.errors import UserError, needs, one_line, unknown_name
from tokenmix.trust import check_typed

Target = str | Callable[..., Any]
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


@dataclass(frozen=True, kw_only=True)
class TaskEntry(Entry):
    """A task.

    Attributes:
        name: for example `semantic-segmentation`.
        about: one line for `tokenmix list tasks`.
        task: its `TaskModule` class.
        options: dataclass of what only this task can be given, a `tokenmix.train.config.TaskOptions` in a module that
            PyTorch is not imported for.
        optim: dataclass of optimiser and learning rate, where the task does without some of the usual ones.
        defaults: values of options that this task starts from, `model` and `data` above all; a task without them has to
            be given these two.
        other_models: function of a name that returns, without PyTorch, whether it may be a model that the task takes
            though the registry does not have it.
    """

    task: Target
    options: Target = "tokenmix.train.config:TaskOptions"
    optim: Target = "tokenmix.train.config:OptimConfig"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    other_models: Target | None = None


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
    arguments: Mapping[str, Any] = field(default_factory=dict)
    pretrained_cfg: Mapping[str, Any] | None = None
    published: Published | None = None


Kind = Literal["images", "classes", "boxes", "masks", "clouds", "parts", "corpus", "labelled-text", "questions"]
"""What a data set holds: labelled images, images with a class for each pixel, with boxes or with masks of objects,
point clouds with a class or with parts, running text, labelled texts, questions about texts."""


@dataclass(frozen=True, kw_only=True)
class DataEntry(Entry):
    """A data set, or a layout of files on the user's disk.

    Attributes:
        name: what `--data` begins with.
        kinds: what it holds; a task reads those that it can learn from.
        about: how much there is, in what layout, and megabytes to fetch; for files of the user's it begins with
            `name:PATH`.
        load: the reader, called with a `tokenmix.data.DataRequest`. It returns what `load_images`, `load_scenes` or
            their like are written for: `LoadedImages`, `SceneData`, `PointData`, `Corpus`, `LabelledData` or
            `QuestionData`.
        licence: of the content.
        origin: where it comes from, in the order of trying.
        variant: what follows the name and a colon. A path must; patterns of shards must; a number or a name, which the
            reader checks, may.
        stored: names in the cache; empty if nothing is fetched.
        img_size: side of labelled images in pixels, unless another is asked for; None if only the reader knows it.
    """

    kinds: tuple[Kind, ...]
    load: Target
    licence: str = "yours"
    origin: str = "your disk"
    variant: Literal["none", "path", "shards", "number", "name"] = "none"
    stored: tuple[str, ...] = ()
    img_size: int | None = None


E = TypeVar("E", bound=Entry)


class Registry(Generic[E]):
    """Entries by name, in the order of registration.

    Args:
        kind: what an entry is, for messages.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, E] = {}

    def register(self, *entries: E) -> None:
        """Add entries; `UserError` for a name that another entry has."""
        for entry in entries:
            if self._entries.setdefault(entry.name, entry) != entry:
                raise UserError(f"the {self.kind} {entry.name!r} is registered already; choose another name")

    def __getitem__(self, name: str) -> E:
        """The entry of that name; `UserError` with the nearest names if there is none."""
        _load_all()
        if name not in self._entries:
            raise unknown_name(self.kind, name, self._entries)
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        _load_all()
        return name in self._entries

    def __iter__(self) -> Iterator[E]:
        _load_all()
        return iter(self._entries.values())

    def names(self, pattern: str = "*") -> list[str]:
        """The names that match a glob."""
        _load_all()
        return [name for name in self._entries if fnmatch(name, pattern)]


TASKS: Registry[TaskEntry] = Registry("task")
MODELS: Registry[ModelEntry] = Registry("model")
DATA_SETS: Registry[DataEntry] = Registry("data set")

# Packages that register what tokenmix itself has; importing them is cheap.
_OWN = ("tokenmix.data", "tokenmix.tasks")
# A checkout has the data sets of its recipes as well; an installed wheel does not.
_CHECKOUT = Path(__file__).parents[2]
_loaded = False


def _load_all() -> None:
    """Import what registers: our own packages, a checkout's recipes/datasets, the installed plug-ins."""
    global _loaded
    if _loaded:
        return
    _loaded = True
    for package in _OWN:
        importlib.import_module(package)
    if (_CHECKOUT / "recipes" / "datasets" / "__init__.py").is_file():
        if str(_CHECKOUT) not in sys.path:
            sys.path.append(str(_CHECKOUT))
        importlib.import_module("recipes.datasets")
    for point in entry_points(group="tokenmix.plugins"):
        load_plugin(point.value)


_imported: list[str] = []


def imported_plugins() -> tuple[str, ...]:
    """What `load_plugin` has imported, files by their full path, for another process to import as well."""
    return tuple(_imported)


def load_plugin(module: str) -> None:
    """Import a module, or a file NAME.py as module NAME, which registers tasks, models, data sets or mixers.

    Raises:
        UserError: it cannot be imported, or the file has the name of another module.
    """
    try:
        if module.endswith(".py"):
            _import_file(Path(module))
        else:
            _search_here(module)
            importlib.import_module(module)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"the plug-in {module} cannot be imported ({one_line(error)})") from error
    place = str(Path(module).resolve()) if module.endswith(".py") else module
    if place not in _imported:
        _imported.append(place)


def _import_file(file: Path) -> None:
    file = file.resolve()
    if not file.is_file():
        raise UserError(f"no file {file} to import; give a file NAME.py, or a module on PYTHONPATH")
    known = sys.modules.get(file.stem) or importlib.util.find_spec(file.stem)
    place = getattr(known, "__file__", None) or getattr(known, "origin", None)
    if known is not None and (place is None or Path(place).resolve() != file):
        raise UserError(f"{file} would hide the module {file.stem!r}; give the file another name")
    if file.stem in sys.modules:
        return
    # Its own folder is searched for its neighbours, and last: a file random.py there does not replace the library's.
    sys.path.append(str(file.parent))
    importlib.import_module(file.stem)


def _search_here(module: str) -> None:
    """Search the current folder for a module that is nowhere else, and after every other folder."""
    top = module.partition(".")[0]
    here = os.getcwd()
    if top not in sys.modules and here not in sys.path and importlib.util.find_spec(top) is None:
        sys.path.append(here)


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
    try:
        _search_here(module_name)
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        hint = f"no module {error.name!r} here or in the environment; run from the folder that holds it or install it"
        raise UserError(f"cannot import {module_name!r}: {hint}") from error
    except (Exception, SystemExit) as error:
        raise UserError(
            f"importing {module_name!r} fails with {one_line(error)}; python -c 'import ...' shows where"
        ) from error
    if not hasattr(module, name):
        public = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise unknown_name(f"class in module {module_name!r}:", name, public)
    found = getattr(module, name)
    if not callable(found):
        raise UserError(f"{target} is a {type(found).__name__}; name a class, or a function that builds one")
    return found


def list_models(pattern: str = "*", *, task: str | None = None) -> list[str]:
    """The names of our models that match a glob, for example `list_models("eamlp*")`; with `task`, those it trains."""
    return [name for name in MODELS.names(pattern) if task is None or task in MODELS[name].tasks]


def list_tasks() -> list[str]:
    """The names of the tasks."""
    return TASKS.names()


def get_task(name: str) -> Any:
    """The class of a task; `UserError` with the nearest names if there is none."""
    return load_object(TASKS[name].task)
