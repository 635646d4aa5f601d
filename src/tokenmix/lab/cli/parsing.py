"""Command-line parsing with tyro: dataclass to options, options of one task, options of a saved run."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from tokenmix.errors import unknown_name
from tokenmix.files import Values, to_json, user_path
from tokenmix.lab.cli.errors import one_line_errors
from tokenmix.lab.train.config import CompareConfig, TrainConfig
from tokenmix.lab.train.schema import Document, option
from tokenmix.registry import Arguments

T = TypeVar("T")
STYLE = (tyro.conf.OmitArgPrefixes,)
WORDS = ConstructorRegistry()
_cli: Any = functools.partial(tyro.cli, config=STYLE, registry=WORDS)
UNKNOWN_OPTION = functools.partial(unknown_name, "option")


@WORDS.primitive_rule
def _none(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[None] | None:
    """none, as in recipes, and None, as in Python."""
    if info.type is not type(None):
        return None

    def parse(args: list[str]) -> None:
        if args[0].lower() != "none":
            raise ValueError(f"{args[0]!r} is not none")

    return option("none", type(None), parse, lambda _: "none")


@WORDS.primitive_rule
def _path(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Path] | None:
    """A path with `~` expanded."""
    return option("PATH", Path, lambda args: user_path(args[0])) if info.type is Path else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Printed:
    """Base of verbs that print a result."""

    json: bool = False
    """Print JSON instead of a table."""

    def print(self, result: Arguments | Sequence[Values]) -> None:
        """Print it so."""
        from tokenmix.lab.cli.listing import print_result

        print(to_json(result)) if self.json else print_result(result)


def parse_into(kind: type[T], prog: str, args: Sequence[str], default: T | None = None, about: str = "") -> T:
    """An instance of the dataclass from the words after its verb; options that are not given are those of `default`.

    `--help` of a document shows its usual options, `--help-all` all of them. A mistake is a `UserError` of one line.
    """
    if "--help-all" in args:
        args = ["--help"]
    elif isinstance(default, TrainConfig | CompareConfig) and {"-h", "--help"} & {*args}:
        parse_usual(default, prog, about)
    given: Values = {} if default is None else {"default": default}
    unknown = default.unknown_option if isinstance(default, Document) else UNKNOWN_OPTION
    with one_line_errors(_options(kind if default is None else default), unknown, args):
        return _cli(
            kind, prog=prog, description=_described(prog, about or kind.__doc__ or ""), args=list(args), **given
        )


def parse_usual(document: TrainConfig | CompareConfig, prog: str, about: str) -> None:
    """Print the help of the document's usual options, those of its task first, and exit."""
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
    example = (
        f"{prog} {task} --model {document.model.model or 'MODEL'} --data {LAYOUTS.get(task, 'PATH')} --out runs/{task}"
    )
    about = f"{about} {prog} {task} --help-all shows all {len(_options(document))} options."
    shown = _described(prog, about, example)
    _cli(type(short), prog=prog, description=shown, args=["--help"], default=short)


def _retyped(part: Any, changed: Mapping[str, tuple[Any, Any]], *bases: type) -> Any:
    """The dataclass's instance with new types and values of some fields."""
    types = [(name, kind) for name, (kind, _) in changed.items()]
    made = dataclasses.make_dataclass(type(part).__name__, types, bases=(type(part), *bases), frozen=True, kw_only=True)
    return made(**{**vars(part), **{name: value for name, (_, value) in changed.items()}})


def _hidden(kind: Any) -> Any:
    return tyro.conf.Suppress[kind]


def _described(prog: str, about: str, *more: str) -> str:
    """What a verb does, and its examples."""
    return "\n".join([about, "", "Examples:", *(f"  {line}" for line in more), *EXAMPLES[prog.split()[1]]])


def parse_known(kind: type[T], prog: str, args: Sequence[str]) -> T:
    """The same from only those words that the dataclass has options for."""
    with one_line_errors(_options(kind), UNKNOWN_OPTION, args):
        return _cli(kind, prog=prog, args=list(args), return_unknown_args=True, add_help=False)[0]


def parse_verb(verbs: Mapping[str, Any], argv: Sequence[str], about: str) -> Any:
    """Help for all verbs, or the error for an unknown one."""
    words = ["--help" if word == "--help-all" else word for word in argv]
    with one_line_errors(list(verbs), functools.partial(unknown_name, "verb")):
        return tyro.extras.subcommand_cli_from_dict(
            dict(verbs), prog="tokenmix", description=about, args=words, config=STYLE, registry=WORDS
        )


def _options(kind: Any) -> list[str]:
    """The options of a dataclass, or of an instance and its parts, as they are typed."""
    found = []
    for field in dataclasses.fields(kind):
        value = None if isinstance(kind, type) else getattr(kind, field.name)
        if dataclasses.is_dataclass(value):
            found += _options(value)
        else:
            found.append(f"--{field.name.replace('_', '-')}")
    return found


EXAMPLES: dict[str, list[str]] = {}
"""Of each verb, three command lines."""
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
tokenmix distill all-MiniLM-L6-v2 --to external --layers 3-5 --text sentences.txt --out converted
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
    EXAMPLES.setdefault(_line.split()[1], []).append(f"  {_line}")

# What `--help` shows of train and compare: options of every run, of mixers and comparisons, of a task.
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
# The user's own files, in the example.
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
