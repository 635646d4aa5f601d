"""Models from run folders or initial weights, with the mixers that their config swaps in or inserts."""

import ast
import dataclasses
import functools
import hashlib
import inspect
import sys
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from tokenmix.errors import UserError, unknown_name
from tokenmix.files import Values
from tokenmix.lab.data.fetch import log
from tokenmix.lab.train.checkpoint import WEIGHTS, check_weights, put_weights, read_weights
from tokenmix.lab.train.config import SwapConfig, TrainConfig
from tokenmix.lab.train.folder import RunFolder
from tokenmix.lab.train.task import TaskModule
from tokenmix.layers.table import checked_own_mixers, own_mixers
from tokenmix.registry import MODELS, NO_WEIGHTS, TORCHVISION, Arguments, imported_plugins, is_users, load_object
from tokenmix.swap import InsertReport, SwapReport, insert, swap_attention
from tokenmix.swap.inserting import INSERTED
from tokenmix.trust import from_caller, sealed, texts_in, unsealed

LARGE = 1024
"""Largest image side in pixels for which a model is built before its weights are checked."""


def load_run(run: Path) -> tuple[nn.Module, TrainConfig, Values]:
    """Load a run folder: the model with its weights, the config and the description of the data."""
    folder = RunFolder.of(run)
    # safetensors, and a user's own code, take contiguous weights only.
    model = load_task(folder).model.to(memory_format=torch.contiguous_format)
    return model, folder.config, folder.description


@from_caller
def load_task(run: Path | RunFolder, options: Arguments | None = None) -> TaskModule:
    """The task of a run folder, with the trained model; `options` as in `evaluate`."""
    folder = RunFolder.of(run)
    config, description = folder.config, folder.description
    for name in options or {}:
        if name not in (known := [field.name for field in dataclasses.fields(config.options.evaluation)]):
            raise unknown_name(f"option of evaluating a run of {config.task}", name, known)
    if options:
        # Other features of an evaluation have other metrics.
        config = config.replace(monitor=None, **options)
    weights, kind = folder.path / WEIGHTS, config.task_class
    if not weights.exists():
        raise UserError(f"{folder.path} has not finished its first epoch; {folder.to_continue}")
    build, stored = functools.partial(make_model, config, description), None
    changed = config.swap.swap is not None or config.swap.insert is not None
    size = description.get("img_size")
    # A user's own task may describe another kind of size.
    large = isinstance(size, list) and max(size) > LARGE
    if (large or "architecture" in description) and not changed:
        # Weights per token of large images, or an architecture from a file, may exceed the memory.
        with torch.device("meta"):
            shapes = build()
        stored = read_weights(folder)
        check_weights(shapes, stored, weights, stored_types(config))
    task = kind(build(), config, description)
    swap_mixers(task)
    for module in folder.changed_sources(own_sources(task)):
        log(f"the module {module} changed since {folder.path} was trained, so its answers may differ")
    # Read after the model is built, so that errors of the model come first.
    put_weights(task.model, read_weights(folder) if stored is None else stored, weights, stored_types(config))
    return task.eval()


def make_model(config: TrainConfig, description: Values, *, new: bool = False) -> nn.Module:
    """The model of a run. A `new` one may fetch its published weights; else torchvision may read what it has fetched.

    Code of the user's, of the model or of the task, builds it as it likes.
    """
    name, given, kind = config.model.model, config.model.model_kwargs, config.task_class
    closed = nullcontext() if new or is_users(name) else sealed(Path(torch.hub.get_dir()))
    if new and config.model.pretrained:
        taken = inspect.signature(load_object(MODELS[name].build)).parameters if name in MODELS else {}
        part = "pretrained_backbone" if "pretrained_backbone" in taken else "pretrained"
        if name in MODELS and MODELS[name].pretrained_cfg is None and part not in taken:
            raise UserError(f"{name} {NO_WEIGHTS}")
        config = config.replace(model_kwargs={**given, part: True})
    elif not new:
        whole = "weights" if name.startswith(TORCHVISION) else None
        kwargs = {key: value for key, value in given.items() if key != whole and not key.startswith("pretrained")}
        config = config.replace(pretrained=False, model_kwargs=kwargs)
    with closed, unsealed(kind.build_model):
        return kind.model_from_config(config, description)


def stored_types(config: TrainConfig) -> tuple[torch.dtype, ...]:
    """Types of the weights in a run folder, other than the model's own."""
    return (torch.bfloat16,) if config.loop.precision == "bf16" else ()


# Initial weights may have any precision.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass
class ChangedModel:
    """Names of the swapped layers, names of swapped and inserted layers, and notes for the user.

    `same` says that the swap changed nothing: self-attention in place of self-attention, with all its weights.
    """

    swapped: list[str] = field(default_factory=list)
    mixers: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    same: bool = False


def start_and_swap(task: TaskModule, source: Path | None) -> ChangedModel:
    """Load the weights of `source` into the task's new model, and swap and insert as its config says.

    Unchanged weights are loaded before the swap, to keep projections; weights of a run with the same swap after it.
    """
    if source is None:
        return swap_mixers(task)
    folder = RunFolder.of_weights(source)
    theirs = SwapConfig() if folder is None else folder.saved_config.swap
    if theirs.swap is None and theirs.insert is None:
        put_weights(task.model, task.initial_weights(source), source, FLOATS)
        return swap_mixers(task)
    ours, words = task.config.swap, []
    for part, place in (("swap", "where"), ("insert", "after")):
        if (mixer := getattr(theirs, part)) is not None:
            kwargs = "".join(f" {name}={value}" for name, value in getattr(theirs, f"{part}_kwargs").items())
            words.append(f"--{part} {mixer} --{part}-{place} {getattr(theirs, f'{part}_{place}')!r}")
            words += [f"--{part}-kwargs{kwargs}"] if kwargs else []
    words += [f"--swap-drop {theirs.swap_drop}"] if theirs.swap_drop else []
    if dataclasses.replace(theirs, train_only=ours.train_only) != ours:
        raise UserError(
            f"{source} was trained with {' '.join(words)}; give the same, or start from a run without a swap"
        )
    changed = swap_mixers(task)
    put_weights(task.model, task.initial_weights(source), source, FLOATS)
    return changed


def swap_mixers(task: TaskModule) -> ChangedModel:
    """Swap attention layers of the task's model and insert blocks, as its config says."""
    swap, changed = task.config.swap, ChangedModel()
    if swap.swap is None and swap.insert is None:
        return changed
    example = task.swap_example()
    if swap.swap is not None:
        report = swap_attention(
            task.model,
            swap.swap,
            swap.swap_where,
            mixer_kwargs=swap.swap_kwargs,
            example_inputs=example,
            drop=swap.swap_drop,
        )
        changed.swapped = [row.name for row in report.rows]
        changed.mixers += changed.swapped
        changed.same = report.mixer == "self" and all(row.whole for row in report.rows)
        first, kept = report.rows[0], ", ".join(report.rows[0].kept) or "none"
        changed.notes.append(
            f"{report.mixer} in place of {first.before} in {_places(report)}; projections kept: {kept}"
        )
        if dropped := dict.fromkeys(name for row in report.rows for name in row.dropped):
            changed.notes.append(f"positions dropped: {', '.join(dropped)}")
        changed.notes += (f"left as it was: {s.name} ({s.kind}): {s.reason}" for s in report.skipped)
    if swap.insert is not None:
        with warnings.catch_warnings(record=True) as told:
            inserted = insert(
                task.model,
                swap.insert_after or "",
                swap.insert,
                mixer_kwargs=swap.insert_kwargs,
                example_inputs=example,
            )
        changed.mixers += [f"{row.name}.{INSERTED}" for row in inserted.rows]
        more = inserted.parameters_after - inserted.parameters_before
        changed.notes.append(
            f"{inserted.mixer} inserted after {_places(inserted)}; identity at the start, {more:,} more parameters"
        )
        changed.notes += (f"left out: {s.name} ({s.kind}): {s.reason}" for s in inserted.skipped)
        changed.notes += (str(warning.message) for warning in told)
    return changed


@torch.no_grad()
def check_own_mixers(task: TaskModule) -> None:
    """Run a new model with mixers from outside tokenmix once, before anything is written."""
    if not own_mixers(task.model) or type(task).example is TaskModule.example:
        return
    with checked_own_mixers(task.model), torch.random.fork_rng(devices=[]):
        task.run_example()
    task.train()


def own_sources(task: TaskModule) -> dict[str, str]:
    """SHA-256 of the user's code for a task, by module: its class, model, mixers and plug-ins.

    Installed packages are left out. Of the main program only definitions count: it may add seeds to its own call.
    """
    # In a process of its own the main program has another name.
    parts = [type(part) for part in (task, *task.model.modules())]
    used = [(part.__module__.replace("__mp_main__", "__main__"), part.__name__) for part in parts]
    used += [(module, name) for text in texts_in(task.config) for module, _, name in [text.partition(":")]]
    used += [(Path(name).stem if name.endswith(".py") else name, "") for name in imported_plugins()]
    found, others = dict[str, str](), {*sys.stdlib_module_names, "tokenmix"}
    installed = {"site-packages", "dist-packages"}
    for module in sorted({module for module, _ in used} & sys.modules.keys()):
        file = Path(getattr(sys.modules[module], "__file__", None) or "")
        if module.partition(".")[0] not in others and not installed & {*file.parts} and file.is_file():
            names = {name for part, name in used if part == module}
            if code := _code_of(file.read_bytes(), names, whole=module != "__main__"):
                found[module] = hashlib.sha256(code.encode()).hexdigest()
    return found


def _code_of(source: bytes, names: set[str], *, whole: bool) -> str:
    """What the definitions of these names need of a file; without any, `whole` gives all of it. No comments."""
    try:
        statements = ast.parse(source).body
    except SyntaxError:  # The module was imported before this edit.
        return source.decode(errors="replace")
    defined = dict[str, list[ast.stmt]]()
    for node in statements:
        stored = [part.id for part in _names_in(node) if isinstance(part.ctx, ast.Store)]
        for name in [own] if (own := getattr(node, "name", "")) else stored:
            defined.setdefault(name, []).append(node)
    needed, new = set[str](), names & defined.keys()
    while new:
        needed |= new
        read = {name for own in new for node in defined[own] for name in _read_names(node)}
        new = (read & defined.keys()) - needed
    kept = [node for name in sorted(needed) for node in defined[name]] or (statements if whole else [])
    return "\n".join(ast.unparse(node) for node in kept)


def _read_names(node: ast.stmt) -> set[str]:
    """Names that a statement reads; of a function or class without its own, such as local variables."""
    names, own = _names_in(node), set[str]()
    if hasattr(node, "name"):
        own = {part.id for part in names if isinstance(part.ctx, ast.Store)}
        own |= {part.arg for part in ast.walk(node) if isinstance(part, ast.arg)}
    return {part.id for part in names} - own


def _names_in(node: ast.stmt) -> list[ast.Name]:
    return [part for part in ast.walk(node) if isinstance(part, ast.Name)]


def _places(report: SwapReport | InsertReport) -> str:
    names = list(dict.fromkeys((report.rows[0].name, report.rows[-1].name)))
    return f"{len(report.rows)} layer{'s' * (len(report.rows) > 1)} ({' to '.join(names)})"


def freeze_all_but(task: TaskModule, layers: list[str]) -> None:
    """Freeze all but these layers: weights, and statistics such as BatchNorm's. Dropout stays on."""
    task.model.requires_grad_(False)
    trained = [task.model.get_submodule(name).requires_grad_(True) for name in layers]
    inside, saved = {module for layer in trained for module in layer.modules()}, task.model.state_dict()
    for name, module in task.model.named_modules():
        own = [part for part, buffer in module.named_buffers(prefix=name, recurse=False) if buffer.is_floating_point()]
        if module not in inside and not saved.keys().isdisjoint(own):
            module.training = False
    if not any(p.requires_grad for p in task.model.parameters()):
        mixers = " and ".join(filter(None, (task.config.swap.swap, task.config.swap.insert)))
        raise UserError(
            f"{mixers} has no weights, so there is nothing to train with train_only=mixers; leave --train-only out"
        )
