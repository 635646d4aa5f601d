"""Parse options with tyro; report a mistake in one line: what is wrong, the value, the nearest valid name.

Names and paths are checked before the slow import of PyTorch. Failures come as events of a private module of tyro,
tested with tyro 1.0.17. Without these events tyro prints its own message, also with exit code 2.
"""

import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

import tokenmix
from tokenmix.errors import UserError, unknown_name
from tokenmix.files import Values, to_json, user_path
from tokenmix.lab.data.lookup import is_url, parse_spec
from tokenmix.lab.registry import DATA_SETS
from tokenmix.lab.train.config import CompareConfig, TrainConfig
from tokenmix.lab.train.schema import BaseConfig, option
from tokenmix.registry import MODELS, Arguments

try:
    from tyro import _errors as events
except ImportError:
    events = None


@contextmanager
def one_line_errors(
    known: Sequence[str], unknown: Callable[[str, Sequence[str]], UserError], args: Sequence[str]
) -> Iterator[None]:
    """Raise `UserError` if tyro refuses the arguments in the block.

    `known` are the options as typed. `unknown` makes the error for other options. `args` are all words.
    """
    if events is None or not hasattr(events, "on_parse_error"):
        yield
        return

    def refuse(event: Any) -> None:
        # tyro handles unknown kinds of events.
        argument = getattr(event, "argument", None)
        name = "" if argument is None else _name(argument)
        if isinstance(event, events.UnrecognizedArgs):
            word = next((token for token in event.tokens if token.startswith("-")), None)
            if word is None:
                raise stray(event.tokens[0], args)
            word = word.partition("=")[0].replace("_", "-")
            raise our_option(word, known) or unknown(word, known)
        if isinstance(event, events.InstantiationFailure):
            if argument is None:
                raise UserError(event.message)
            # For an option with several types, each type's reason is a line; the value's type is last.
            reason = re.split(r"'>: |\)\]: ", event.message.splitlines()[-1])[-1]
            # Python's message for a number of 5,000 digits has a semicolon too.
            if ";" in reason and not reason.startswith("Exceeds"):
                raise UserError(f"{name}: {reason}")
            # Other messages are Python's or tyro's, and end with the value's repr.
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

    with events.on_parse_error(refuse):
        yield


def stray(word: str, args: Sequence[str]) -> UserError:
    """The error for a word without an option: the value of a flag, or a surplus word."""
    before = list(args[: args.index(word)]) if word in args else []
    place = next((i for i in reversed(range(len(before))) if before[i].startswith("-")), None)
    if place is None:
        option = "--data" if word.partition(":")[0] in DATA_SETS else "--OPTION"
        return UserError(f"{word!r} belongs to no option; give {option} {word}, or leave it out")
    option, first = before[place], before[place + 1 :]
    if not first:
        return UserError(f"{option} takes no value, got {word!r}; leave {word!r} out")
    return UserError(
        f"{option} takes one value, got {' '.join([*first, word])!r}; separate several by commas, as in "
        f"{option} {','.join([*first, word])}, or quote one with spaces"
    )


WORDS = {"FLOAT": "a number", "INT": "a whole number", "PATH": "a path", "STR": "text"}


def _wanted(argument: Any) -> str:
    """The values of an option, from tyro's name of its type."""
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
    "--monitor METRIC": ("metric", "metric-for-best-model", "eval-metric"),
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
    "--config FILE.toml with a table [variants.NAME] of these options": ("insert-kwargs", "swap-kwargs", "variants"),
    "--seeds 0,1,2": ("seed",),
    "--swap MIXER, or --model mixer_nano --model-kwargs mixer=MIXER": ("mixer", "mixers", "attention"),
    "--to MIXER": ("mixer", "attention", "swap"),
    "--format FORMAT": ("f", "onnx"),
    "--num N": ("n", "num-images", "num-samples"),
    "--num-tokens N": ("tokens", "seq-len"),
    "--tokens 196,1024": ("num-tokens", "seq-len"),
}
"""Our option, and its names in other libraries; of several rows, the first whose option the verb has."""

_VERBS = {
    theirs: ours
    for ours, words in {
        "cost": ("bench", "benchmark", "profile", "flops"),
        "export": ("convert",),
        "eval": ("evaluate", "test", "validate"),
        "train": ("finetune", "fit", "tune"),
        "--help": ("help",),
        "predict": ("infer",),
        "generate": ("sample",),
        "info": ("summary",),
        "inspect": ("visualize",),
        "--version": ("version",),
    }.items()
    for theirs in words
}


def our_option(word: str, known: Sequence[str]) -> UserError | None:
    """The error for an option of another library, if the verb has an equivalent."""
    plain = word.lstrip("-")
    if plain == "import":
        return UserError("--import stands in front of the verb: tokenmix --import MODULE_OR_FILE.py VERB ...")
    for ours, theirs in _OURS.items():
        if plain in theirs and ours.split()[0] in known:
            return UserError(f"there is no option {word}; give {ours}")
    return None


FILE = re.compile(r"\S+\.(png|jpe?g|webp|bmp|gif|tiff?|ply|off|obj|npz|npy|txt|tsv|jsonl?)", re.IGNORECASE)


def check_data(spec: str) -> None:
    """Raise `UserError` for an unknown data set, or a missing path."""
    if not spec:
        return
    entry, variant = parse_spec(spec)
    # A table's columns follow its path; the reader expands patterns.
    path = variant.partition("#")[0]
    local = entry.variant == "path" and not is_url(path) and not re.search(r"[*?\[{,]", path)
    if local and not user_path(path).exists():
        raise UserError(f"{path} does not exist; give --data {entry.about}")


def check_mixers(names: Iterable[str]) -> None:
    """Raise `UserError` for an unknown mixer name; `module:Class` is checked by its import."""
    known = known_mixers()
    for name in names:
        if ":" not in name and name not in known:
            raise UserError(f"{unknown_name('mixer', name, known)} (if your code registers it, give --import MODULE)")


def known_mixers() -> list[str]:
    """Names in layers/__init__.py, read from its source unless imported, because its classes need PyTorch."""
    MODELS.names()  # imports the plug-ins, which may register mixers
    table = sys.modules.get("tokenmix.layers.table")
    if table is not None:
        return table.list_mixers()
    source = (Path(tokenmix.__file__).parent / "layers/__init__.py").read_text(encoding="utf-8")
    return re.findall(r'^ +"([^"]+)": MixerSpec\(', source, re.MULTILINE)


def check_files(words: Iterable[str]) -> None:
    """Raise `UserError` for a missing file among the words; words without a file suffix are text."""
    for word in words:
        path = word.rpartition("=")[2]
        if FILE.fullmatch(path) and not user_path(path).exists() and not Path(word).exists():
            raise UserError(f"no file {path}; give one that exists")


T = TypeVar("T")
STYLE = (tyro.conf.OmitArgPrefixes,)
OPTION_TYPES = ConstructorRegistry()
_cli: Any = functools.partial(tyro.cli, config=STYLE, registry=OPTION_TYPES)
UNKNOWN_OPTION = functools.partial(unknown_name, "option")


@OPTION_TYPES.primitive_rule
def _none(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[None] | None:
    if info.type is not type(None):
        return None

    def parse(args: list[str]) -> None:
        if args[0].lower() != "none":
            raise ValueError(f"{args[0]!r} is not none")

    return option("none", type(None), parse, lambda _: "none")


@OPTION_TYPES.primitive_rule
def _path(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Path] | None:
    return option("PATH", Path, lambda args: user_path(args[0])) if info.type is Path else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Printed:
    """Base of verbs that print a result."""

    json: bool = False
    """Print JSON instead of a table."""

    def print(self, result: Arguments | Sequence[Values]) -> None:
        from tokenmix.lab.cli.listing import print_result

        print(to_json(result)) if self.json else print_result(result)


def parse_into(kind: type[T], prog: str, args: Sequence[str], default: T | None = None, about: str = "") -> T:
    """A dataclass instance from the words after its verb; other options are those of `default`.

    `--help` of a document shows its usual options, `--help-all` all options. A mistake is a `UserError` of one line.
    """
    if "--help-all" in args:
        args = ["--help"]
    elif isinstance(default, TrainConfig | CompareConfig) and {"-h", "--help"} & {*args}:
        parse_usual(default, prog, about)
    given: Values = {} if default is None else {"default": default}
    unknown = default.unknown_option if isinstance(default, BaseConfig) else UNKNOWN_OPTION
    with one_line_errors(_options(kind if default is None else default), unknown, args):
        return _cli(
            kind, prog=prog, description=_described(prog, about or kind.__doc__ or ""), args=list(args), **given
        )


def parse_usual(document: TrainConfig | CompareConfig, prog: str, about: str) -> None:
    """Print help for the document's usual options, those of its task first, and exit."""
    task = document.task
    usual = {"task", *OF_RUN, *OF_MIXERS, *OF_TASK.get(task, vars(document.options))}
    changed: dict[str, tuple[Any, Any]] = {}
    for f in dataclasses.fields(document):
        part, note = getattr(document, f.name), tyro.conf.arg(name="task" if f.name == "options" else f.name)
        if dataclasses.is_dataclass(part):
            rest = [leaf for leaf in dataclasses.fields(part) if leaf.name not in usual]
            part = _retyped(part, {leaf.name: (_hidden(leaf.type), getattr(part, leaf.name)) for leaf in rest})
            kind: Any = type(part)
            changed[f.name] = (Annotated[kind, note] if usual & {*vars(part)} else _hidden(kind), part)
        elif f.name not in usual:
            changed[f.name] = (_hidden(f.type), part)
    options_first = dataclasses.make_dataclass("OptionsFirst", [("options", Any)], frozen=True, kw_only=True)
    short = _retyped(document, changed, options_first)
    data, model = LAYOUTS.get(task, "PATH"), document.model.model or "MODEL"
    examples = [f"{prog} {task} --model {model} --data {data} --out runs/{task}"]
    if task == "image-classification":  # the task of most of the verb's examples
        examples += EXAMPLES[prog.split()[1]]
    elif prog.endswith("compare"):
        examples.append(f"{prog} {task} --mixers self,external --data {data} --seeds 0,1,2")
    else:
        examples.append(f"{prog} --resume runs/{task}")
    about = f"{about} {prog} {task} --help-all shows all {len(_options(document))} options."
    shown = _described(prog, about, *examples)
    _cli(type(short), prog=prog, description=shown, args=["--help"], default=short)


def _retyped(part: Any, changed: Mapping[str, tuple[Any, Any]], *bases: type) -> Any:
    types = [(name, kind) for name, (kind, _) in changed.items()]
    made = dataclasses.make_dataclass(type(part).__name__, types, bases=(type(part), *bases), frozen=True, kw_only=True)
    return made(**{**vars(part), **{name: value for name, (_, value) in changed.items()}})


def _hidden(kind: Any) -> Any:
    return tyro.conf.Suppress[kind]


def _described(prog: str, about: str, *more: str) -> str:
    return "\n".join([about, "", "Examples:", *(f"  {line}" for line in more or EXAMPLES[prog.split()[1]])])


def parse_known(kind: type[T], prog: str, args: Sequence[str]) -> T:
    """`parse_into` for only the words that the dataclass has options for."""
    with one_line_errors(_options(kind), UNKNOWN_OPTION, args):
        return _cli(kind, prog=prog, args=list(args), return_unknown_args=True, add_help=False)[0]


def parse_verb(verbs: Mapping[str, Any], argv: Sequence[str], about: str) -> Any:
    """Print help for all verbs, or raise the error for an unknown verb."""
    if not argv:
        raise UserError(f"no verb; give one of {', '.join(verbs)}")
    if argv[0] in _VERBS:
        raise UserError(f"unknown verb {argv[0]!r}; give tokenmix {_VERBS[argv[0]]}")
    if argv[0] not in ("-h", "--help", "--help-all"):
        raise unknown_name("verb", argv[0], verbs)
    return tyro.extras.subcommand_cli_from_dict(
        dict(verbs), prog="tokenmix", description=about, args=["--help"], config=STYLE, registry=OPTION_TYPES
    )


def _options(kind: Any) -> list[str]:
    """Options as typed, of a dataclass, or of an instance and its parts."""
    found = []
    for field in dataclasses.fields(kind):
        value = None if isinstance(kind, type) else getattr(kind, field.name)
        if dataclasses.is_dataclass(value):
            found += _options(value)
        else:
            found.append(f"--{field.name.replace('_', '-')}")
    return found


EXAMPLES: dict[str, list[str]] = {}
"""Three command lines for each verb."""
for _line in """
tokenmix list mixers
tokenmix list models
tokenmix list data --json
tokenmix info gmlp_small
tokenmix info eamlp_7 --img-size 384
tokenmix info mixer_nano --model-kwargs mixer=external depth=6
tokenmix train image-classification --model gmlp_nano --data fashion-mnist --epochs 5 --out runs/first
tokenmix train semantic-segmentation --model eanet_seg_nano --data masks:PATH --crop 112
tokenmix train --resume runs/first
tokenmix eval runs/first
tokenmix eval runs/first --data folder:photos --json
tokenmix eval runs/first --optimize int8
tokenmix predict runs/first shirt.png boot.png
tokenmix predict runs/first shirt.png --json
tokenmix predict runs/segmenter photograph.jpg --out masks
tokenmix generate runs/gan --out images
tokenmix generate runs/gan --classes Sneaker,Bag --num 16 --seed 1 --out images
tokenmix generate runs/gan --interpolate 8 --out images
tokenmix compare --mixers self,external,gating --data fashion-mnist --epochs 5 --seeds 0,1,2
tokenmix compare text-classification --mixers external,my_layers:MyMixer --data csv:reviews.csv#text,label
tokenmix compare --model resnet18 --insert-after layer3 --mixers self,external --data folder:photos
tokenmix cost external multihead-external --tokens 196,1024,4096
tokenmix cost gmlp_small vit_small_patch16_224 --img-size 224,384 --out cost
tokenmix cost external --tokens 4096,65536 --device cuda --dtype bf16
tokenmix inspect runs/first shirt.png --out maps
tokenmix inspect gmlp_small photograph.jpg
tokenmix inspect runs/pretrained 'a sentence' --out gates
tokenmix export runs/first
tokenmix export runs/first --format torch-export
tokenmix export runs/first --format onnx --out model.onnx
tokenmix swap deit_tiny_patch16_224 --to external
tokenmix swap torchvision:vit_b_16 --to gating --where '*layer_1[01].*'
tokenmix swap runs/first --to multihead-external --mixer-kwargs expansion=1
tokenmix distill all-MiniLM-L6-v2 --to linear --layers 3-5 --text sentences.txt --out converted
tokenmix distill my_encoder --to em --text sentences.txt --output cls --steps 2000 --out converted
tokenmix distill my_encoder --to gating --max-length 64 --text sentences.txt --precision bf16 --out converted
tokenmix probe external
tokenmix probe gating my_layers:MyMixer --tasks recall,shift
tokenmix probe external multihead-external --full --out probe
tokenmix doctor my_layers:MyAttention
tokenmix doctor my_layers:MyAttention --dim 64 --num-tokens 50
tokenmix doctor my_layers:build_layer --json
tokenmix data list
tokenmix data get fashion-mnist
tokenmix data list --json
tokenmix train-tokenizer --data text:PATH --out tokenizer
tokenmix train-tokenizer --data jsonl:PATH#text --vocab-size 32000 --out tokenizer
tokenmix train-tokenizer --data text:PATH --kind wordpiece --lowercase yes --out tokenizer
""".strip().splitlines():
    EXAMPLES.setdefault(_line.split()[1], []).append(_line)

# Options in `--help` of train and compare: of every run, of mixers and comparisons, of a task.
OF_RUN = ("data", "model", "epochs", "batch_size", "lr", "lr_g", "lr_d", "seed", "device", "init_from", "out", "resume")
OF_MIXERS = ("swap", "insert", "insert_after", "mixers", "seeds", "config", "jobs")
OF_TASK: dict[str, tuple[str, ...]] = {
    "image-classification": ("img_size", "augment", "mixup", "class_weights", "teacher"),
    "semantic-segmentation": ("crop", "augment", "iou_loss", "way"),
    "detection": ("crop", "min_size", "augment", "detections"),
    "instance-segmentation": ("crop", "min_size", "augment", "detections"),
    "image-generation": ("img_size", "features", "classes", "ema"),
    "point-classification": ("num_points", "features", "votes", "class_weights"),
    "point-segmentation": ("num_points", "features", "votes"),
    "masked-lm": ("tokenizer", "seq_len", "mask_prob", "teacher"),
    "text-classification": ("tokenizer", "seq_len", "class_weights", "teacher"),
    "question-answering": ("tokenizer", "seq_len", "doc_stride"),
}
# Layouts of users' files, for the examples.
LAYOUTS = {
    "image-classification": "folder:PATH",
    "semantic-segmentation": "masks:PATH",
    "detection": "coco:PATH",
    "instance-segmentation": "coco:PATH",
    "image-generation": "folder:PATH",
    "point-classification": "clouds:PATH",
    "point-segmentation": "shapenet-part:PATH",
    "masked-lm": "text:PATH",
    "text-classification": "csv:PATH#text,label",
    "question-answering": "squad:PATH",
}
