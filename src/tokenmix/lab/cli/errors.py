"""A mistake on the command line as one line: what is wrong, the value, the nearest right name.

Mistakes in names and paths are found before PyTorch is imported, which takes seconds.

tyro reports a failure as an event that carries the data, but in a private module, which may change in any release:
tested with tyro 1.0.17. Where it is missing, tyro prints its own message; the exit code is 2 either way.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenmix
from tokenmix.errors import UserError, unknown_name
from tokenmix.files import user_path
from tokenmix.lab.data.lookup import is_url, parse_spec
from tokenmix.registry import MODELS

try:
    from tyro import _errors as events
except ImportError:
    events = None


@contextmanager
def one_line_errors(
    known: Sequence[str], unknown: Callable[[str, Sequence[str]], UserError], args: Sequence[str] = ()
) -> Iterator[None]:
    """Raise `UserError` for what tyro refuses in the block.

    `known` are the options, as typed, or the verbs; `unknown` makes the error for a word that is none of them; `args`
    are the words that are parsed.
    """
    if events is None or not hasattr(events, "on_parse_error"):
        yield
        return

    def refuse(event: Any) -> None:
        # An event of an unknown kind is left to tyro.
        argument = getattr(event, "argument", None)
        name = "" if argument is None else _name(argument)
        if isinstance(event, events.UnrecognizedArgs):
            word = next((token for token in event.tokens if token.startswith("-")), None)
            if word is None:
                first = event.tokens[0]
                raise stray(first, args) if args else our_verb(first) or unknown(first, known)
            word = word.partition("=")[0].replace("_", "-")
            raise our_option(word, known) or unknown(word, known)
        if isinstance(event, events.InstantiationFailure):
            if argument is None:
                raise UserError(event.message)
            # Of an option with several types each has its reason, in a line of its own; the last is that of the value.
            reason = re.split(r"'>: |\)\]: ", event.message.splitlines()[-1])[-1]
            # Python's own of a number of 5,000 digits has one too.
            if ";" in reason and not reason.startswith("Exceeds"):
                raise UserError(f"{name}: {reason}")
            # The rest is Python's or tyro's own sentence, which ends with the value as Python writes it.
            found = re.search(r""".*\[(.*?)\] does not match choices|: ('.*'|".*")$|^(.*) is not none$""", reason)
            value = next(filter(None, found.groups())) if found else "what it was given"
            raise UserError(f"{name} cannot be {value}; give {_wanted(argument)}")
        if isinstance(event, events.InvalidChoice):
            raise UserError(f"{name} cannot be {event.value!r}; give one of {', '.join(event.choices)}")
        if isinstance(event, events.BadValue):
            raise UserError(f"{name} has no value; give {_wanted(argument)}")
        if isinstance(event, events.MissingArgs):
            foreign = (our_option(word.partition("=")[0], known) for word in args if word.startswith("-"))
            if (error := next(filter(None, foreign), None)) is not None:
                raise error
            missing = ", ".join(
                _wanted(one.arg) if one.arg.is_positional() else _name(one.arg) for one in event.missing_arguments
            )
            raise UserError(f"{event.prog} needs {missing}; see {event.prog} --help")
        if isinstance(event, events.MissingSubcommand):
            word = event.found_token
            if word is None:
                raise UserError(f"no verb; give one of {', '.join(known)}")
            raise our_verb(word) or unknown(word, known)

    with events.on_parse_error(refuse):
        yield


def stray(word: str, args: Sequence[str]) -> UserError:
    """The error for a word that belongs to no option: the value of a flag, or one too many."""
    before = list(args[: args.index(word)]) if word in args else []
    place = next((i for i in reversed(range(len(before))) if before[i].startswith("-")), None)
    if place is None:
        return UserError(f"{word!r} belongs to no option; leave it out")
    option, first = before[place], before[place + 1 :]
    if not first:
        return UserError(f"{option} takes no value, got {word!r}; leave {word!r} out")
    return UserError(
        f"{option} takes one value, got {' '.join([*first, word])!r}; separate several by commas, as in "
        f"{option} {','.join([*first, word])}, or quote one with spaces"
    )


WORDS = {"FLOAT": "a number", "INT": "a whole number", "PATH": "a path", "STR": "text"}


def _wanted(argument: Any) -> str:
    """What an option takes, from tyro's name for its type."""
    metavar = argument.lowered.metavar or "a value"
    if metavar.startswith("none|{"):
        return f"none or one of {metavar[6:-1].replace(',', ', ')}"
    if metavar.startswith("{"):
        return f"one of {metavar[1:-1].replace(',', ', ')}"
    none, _, plain = metavar.partition("|") if metavar.startswith("none|") else ("", "", metavar)
    return " or ".join(filter(None, (none, WORDS.get(plain, plain))))


def _name(argument: Any) -> str:
    shown = argument.is_positional() and argument.lowered.choices is None
    return str(argument.lowered.metavar if shown else argument.display_name())


PRETRAINED = "--init-from RUN_OR_FILE.safetensors"
_OURS: dict[str, tuple[str, ...]] = {
    "--accumulate N": ("accum", "accum-steps", "gradient-accumulation-steps", "grad-accum-steps"),
    "--augment NAME": ("aa", "auto-augment", "aug"),
    "--batch-size N": ("b", "bs", "batch", "per-device-train-batch-size", "train-batch-size"),
    "--clip-grad NORM": ("max-grad-norm", "gradient-clip-val", "grad-clip"),
    "--data DATA": ("data-dir", "data-path", "dataset", "dataset-name", "train-file"),
    "--device cuda --devices N": ("gpus", "gpu", "num-gpus", "n-gpus", "nproc-per-node", "accelerator"),
    "--ema DECAY": ("model-ema", "ema-decay"),
    "--epochs N": ("e", "num-epochs", "n-epochs", "max-epochs", "num-train-epochs"),
    "--grad-checkpointing": ("gradient-checkpointing",),
    "--img-size N": ("image-size", "input-size", "imgsz", "size", "resolution"),
    "--log-every N": ("log-interval", "logging-steps", "log-every-n-steps"),
    "--lr RATE": ("learning-rate", "base-lr", "max-lr"),
    "--model NAME": ("m", "a", "arch", "architecture", "backbone", "model-name", "model-name-or-path"),
    "--num-nodes N": ("nnodes", "nodes"),
    "--opt NAME": ("optimizer", "optimiser", "optim"),
    "--out FOLDER": ("o", "output", "output-dir", "save-dir", "work-dir", "logdir"),
    "--precision bf16-mixed": ("amp", "bf16", "fp16", "mixed-precision"),
    "--reprob P": ("random-erasing", "random-erase"),
    "--resume RUN": ("checkpoint", "ckpt", "ckpt-path", "resume-from-checkpoint"),
    "--schedule NAME": ("sched", "scheduler", "lr-scheduler", "lr-scheduler-type"),
    "--seq-len N": ("max-length", "max-seq-length", "block-size"),
    "--smoothing S": ("label-smoothing",),
    "--validation N": ("val-split", "validation-split"),
    "--warmup-steps N": ("warmup", "num-warmup-steps"),
    "--weight-decay W": ("wd",),
    "--workers N": ("j", "num-workers", "dataloader-num-workers"),
    "--model-kwargs depth=N": ("depth", "num-layers", "layers"),
    "--model-kwargs drop_path_rate=P": ("drop-path", "drop-path-rate", "stochastic-depth"),
    "--model-kwargs drop_rate=P": ("dropout", "drop", "drop-rate"),
    "--model-kwargs embed_dim=N": ("dim", "embed-dim", "hidden-size", "width"),
    "--model-kwargs num_heads=N": ("heads", "num-heads"),
    "--model-kwargs patch_size=N": ("patch-size", "patch"),
    PRETRAINED: ("finetune", "weights", "load", "initial-checkpoint"),
    "--mixers A,B,C": ("mixer", "attention"),
    "--seeds 0,1,2": ("seed",),
    "--swap MIXER, or --model mixer_nano --model-kwargs mixer=MIXER": ("mixer", "mixers", "attention"),
    "--to MIXER": ("mixer", "attention", "swap"),
    "--format FORMAT": ("f", "onnx"),
    "--num N": ("n", "num-images", "num-samples"),
    "--num-tokens N": ("tokens", "seq-len"),
    "--tokens 196,1024": ("num-tokens", "seq-len"),
}
"""What to type with us, and other libraries' names for it; of several rows, the first whose option the verb has."""

_VERBS = {
    theirs: ours
    for ours, words in {
        "cost": ("bench", "benchmark", "profile", "flops"),
        "export": ("convert",),
        "eval": ("evaluate", "test", "validate"),
        "train": ("finetune", "fit", "tune"),
        "--help": ("help", "-h"),
        "predict": ("infer",),
        "generate": ("sample",),
        "info": ("summary",),
        "inspect": ("visualize",),
        "--version": ("version",),
    }.items()
    for theirs in words
}


def our_option(word: str, known: Sequence[str]) -> UserError | None:
    """The error for an option of another library, if the verb has an option for it."""
    plain = word.lstrip("-")
    for ours, theirs in _OURS.items():
        if plain in theirs and ours.split()[0] in known:
            return UserError(f"there is no option {word}; give {ours}")
    return None


def our_verb(word: str) -> UserError | None:
    """The error for a verb of another library, if there is one of ours for it."""
    ours = _VERBS.get(word)
    return None if ours is None else UserError(f"unknown verb {word!r}; give tokenmix {ours}")


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
    known = known_mixers()
    for name in names:
        if ":" not in name and name not in known:
            raise unknown_name("mixer", name, known)


def known_mixers() -> list[str]:
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


def check_files(words: Iterable[str]) -> None:
    """Raise `UserError` for a word that names a file, by its suffix, which does not exist; a sentence names none."""
    for word in words:
        path = word.rpartition("=")[2]
        if FILE.fullmatch(path) and not user_path(path).exists() and not Path(word).exists():
            raise UserError(f"no file {path}; give one that exists")
