"""Verbs without a run: on mixers, models and data sets by name, and on users' layers."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from tokenmix.errors import UserError
from tokenmix.files import Values, check_regular, to_json, user_path
from tokenmix.lab.cli.parsing import Printed, check_mixers, known_mixers
from tokenmix.lab.data.fetch import log
from tokenmix.lab.registry import DATA_SETS, TASKS, get_task
from tokenmix.lab.train.config import ModelConfig
from tokenmix.lab.train.schema import Names, Numbers, Pairs, Range, Section, joined, named, option
from tokenmix.registry import MODELS, check_models, import_object

Positional = tyro.conf.Positional
ModelName = Annotated[Positional[str], tyro.conf.arg(metavar="MODEL")]


def _size(args: list[str]) -> int | tuple[int, int]:
    sides = args[0].lower().replace("x", ",").split(",")
    if len(sides) > 2 or not all(side.strip().isdecimal() for side in sides):
        raise ValueError(f"{args[0]!r} is not a size in pixels; give a side, or height x width as in 224x160")
    height, width = int(sides[0]), int(sides[-1])
    return height if len(sides) == 1 else (height, width)


Size = Annotated[
    int | tuple[int, int],
    option(
        "SIDE|HxW", (int, tuple), _size, lambda size: str(size) if isinstance(size, int) else "x".join(map(str, size))
    ),
]


Threads = Annotated[int | None, Range(least=1), tyro.conf.arg(help_behavior_hint="(default: PyTorch's own choice)")]


def _words(names: tuple[str, ...]) -> tuple[str, ...]:
    """Names separated by spaces, or by commas as in --mixers; an existing folder's name may contain a comma."""
    parts = ([name] if user_path(name).exists() else name.split(",") for name in names)
    return tuple(word for part in parts for word in part if word)


def _set_threads(threads: int | None) -> None:
    import torch

    if threads is not None:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class List(Printed):
    """Names that the other verbs take."""

    what: Positional[Literal["mixers", "models", "tasks", "data"]]
    """Kind of name."""

    def run(self) -> None:
        rows: list[Values]
        # Columns that fit a terminal; --json has all.
        short: list[Values] | None = None
        if self.what == "mixers":
            from tokenmix.layers.table import MIXERS

            rows = [{"name": name, **asdict(m.capabilities), "about": m.about} for name, m in MIXERS.items()]
            short = [
                {"name": row["name"], "cost in N": "linear" if row["linear"] else "quadratic"}
                | {key: row[key] for key in ("length", "causal", "map", "about")}
                for row in rows
            ]
        elif self.what == "data":
            from tokenmix.lab.data import list_data

            rows = [asdict(entry) for entry in list_data()]
            # Users' files and the hub's are not in the cache.
            elsewhere = {entry.name for entry in DATA_SETS if entry.variant != "none" and not entry.stored}
            short = [
                {key: row[key] for key in ("name", "about", "licence")}
                | {"cached": "–" if row["name"] in elsewhere else row["cached"]}
                for row in rows
            ]
        elif self.what == "models":
            rows = [{"name": entry.name, "task": ", ".join(entry.tasks), "about": entry.about} for entry in MODELS]
        else:
            rows = [{"name": entry.name, "about": entry.about} for entry in TASKS]
        self.print(rows if self.json else short or rows)


@dataclass(frozen=True)
class Info(Printed):
    """Parameters and multiply-adds of a model."""

    model: ModelName
    """A name of `tokenmix list models`, torchvision:NAME, or module:factory."""
    img_size: Size | None = None
    """Side of the image in pixels, or height x width such as 224x160; the model's own if not given."""
    num_points: int | None = None
    """Points of the cloud, for point-cloud models; if not given 1024, or 2048 for parts."""
    model_kwargs: Pairs = field(default_factory=dict)
    """Arguments of the model, for example mixer=external."""

    def run(self) -> None:
        name, given = self.model, self.model_kwargs
        ModelConfig(model=name, model_kwargs=given)
        if user_path(name).is_dir():
            raise UserError(
                f"{name} is a folder and no model's name; the model of a run is measured by: tokenmix cost {name}"
            )
        check_models([name])
        from tokenmix.lab.cli.listing import print_blocks, summarize_foreign
        from tokenmix.lab.train.task import built_with

        asked = {"img_size": self.img_size, "num_points": self.num_points}
        sizes = {name: size for name, size in asked.items() if size is not None}
        summarize = get_task(MODELS[name].tasks[0]).summarize_model if name in MODELS else summarize_foreign
        with built_with(name, given):
            summary = summarize(name, sizes, given)
        if self.json:
            self.print(summary)
        elif "blocks" in summary:
            print_blocks(summary)
        else:
            told = {key: value for key, value in summary.items() if value is not None}
            self.print({key: f"{value:,}" if isinstance(value, int) else value for key, value in told.items()})


@dataclass(frozen=True)
class Cost(Printed):
    """Parameters, multiply-adds, memory and time of mixers over numbers of tokens, or of models over image sizes."""

    names: Annotated[
        Positional[tuple[str, ...]], tyro.conf.arg(metavar="NAME ...", help_behavior_hint="(required without --table)")
    ] = ()
    """Mixers; or models of tokenmix, timm or torchvision, or run folders."""
    tokens: Annotated[Numbers | None, tyro.conf.arg(help_behavior_hint="(default: 196,1024,4096)")] = None
    """Numbers of tokens, separated by commas. For mixers."""
    img_size: Annotated[Numbers | None, tyro.conf.arg(help_behavior_hint="(default: the model's own)")] = None
    """Image sizes in pixels, separated by commas. For models."""
    dim: Annotated[int | None, tyro.conf.arg(help_behavior_hint="(default: 256)")] = None
    """Width of the tokens. For mixers."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to measure."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Data type of weights and inputs."""
    threads: Threads = None
    """CPU threads of PyTorch, at most the CPUs of this machine."""
    table: Annotated[Literal["eanet"] | None, tyro.conf.arg(help_behavior_hint="(default: none)")] = None
    """Multiply-adds and parameters at the sizes of a paper's table, counted by tokenmix, instead of a measurement."""
    out: Annotated[Path | None, tyro.conf.arg(help_behavior_hint="(default: none is written)")] = None
    """Folder for cost.json, cost.md, cost.png and cost.svg."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", _words(self.names))

    def run(self) -> None:
        mixers = known_mixers()
        runs = [n for n in self.names if n not in mixers and n not in MODELS and user_path(n).is_dir()]
        check_models([name for name in self.names if name not in runs], mixers)
        from tokenmix.profiling import cost_report

        if self.table is not None:
            if self != Cost(table=self.table, json=self.json):
                raise UserError(f"--table {self.table} measures nothing: leave out all but --json")
            cost_report.print_requirements(as_json=self.json)
            return
        subjects: Values = {name: name for name in self.names}
        options = {name: value for name, value in vars(self).items() if name not in ("names", "dtype", "table", "json")}
        for name in runs:
            from tokenmix.lab.train.load import load_task

            task = load_task(user_path(name))
            if task.inspects != "images" or hasattr(task.model, "find"):
                raise UserError(
                    f"{name} is a run of {task.config.task}; cost measures runs of image-classification and "
                    "semantic-segmentation, and compare those of every task"
                )
            subjects[name] = task.model
            options["img_size"] = options["img_size"] or tuple(task.data["img_size"][:1])
        cost_report.print_costs(subjects, precision=self.dtype, as_json=self.json, **options)


@dataclass(frozen=True, kw_only=True)
class Swap(Printed, Section):
    """Show what replacing a model's attention by a mixer would change and cost; nothing is written."""

    model: ModelName
    """A model of tokenmix or timm, torchvision:NAME, module:factory, or a folder: a run's, or one of Hugging Face."""
    to: Annotated[str, named("MIXER")]
    """The mixer, a name of tokenmix list mixers or module:Class."""
    where: Annotated[str, named("GLOB")] = "*"
    """Glob over the names of the modules, for example "blocks.[0-5].*"."""
    img_size: int | None = None
    """Side of the image in pixels; the model's own if not given."""
    mixer_kwargs: Pairs = field(default_factory=dict)
    """Arguments of the mixer, for example num_slots=32."""
    drop: Literal["positions"] | None = None
    """positions: drop rotary and relative positions inside the attention; attention with them cannot be replaced."""
    rank: bool = False
    """Fit a mixer for each layer and rank the layers by how well it replaces them.
    For a run on images, or a folder of Hugging Face with --text."""
    text: Path | None = None
    """With --rank: a file with a text in each line."""
    steps: Annotated[int, Range(least=1)] = 100
    """With --rank: training steps of the fit."""

    def run(self) -> None:
        check_mixers([self.to])
        folder, swap = user_path(self.model), {"mixer_kwargs": self.mixer_kwargs, "drop": self.drop}
        if self.rank and not folder.is_dir():
            raise UserError(
                f"--rank needs weights and data, and {self.model} is no folder; give a run folder, or one of Hugging "
                "Face with --text"
            )
        if self.text is not None and not self.rank:
            raise UserError("--text goes with --rank; leave it out, or give --rank")
        if not folder.is_dir():
            check_models([self.model])
        from tokenmix.lab.swapping import load_model, rank_folder
        from tokenmix.swap import swap_attention

        if self.rank:
            report = rank_folder(folder, self.to, self.where, self.text, self.steps, swap)
        else:
            model, example = load_model(self.model, self.img_size)
            report = swap_attention(model, self.to, self.where, img_size=self.img_size, example_inputs=example, **swap)
        print(to_json({"model": self.model, **report.to_json()}) if self.json else report)


@dataclass(frozen=True)
class Doctor(Printed):
    """Run our property tests on your own layer; exit code 1 if a test fails."""

    target: Annotated[Positional[str], tyro.conf.arg(metavar="LAYER")]
    """module:Class, module:function that builds the layer, or a name of tokenmix list mixers."""
    dim: int | None = None
    """Width to build the layer with."""
    num_tokens: int | None = None
    """Number of tokens to build the layer with."""

    def run(self) -> int:
        if ":" in self.target:
            import_object(self.target)
        from tokenmix.testing.doctor import print_report

        return print_report(self.target, self.dim, self.num_tokens, self.json)


@dataclass(frozen=True)
class Data(Printed):
    """List data sets, or fetch one from its publisher or its package."""

    action: Positional[Literal["list", "get"]]
    """list or get."""
    name: Annotated[Positional[str | None], tyro.conf.arg(metavar="[NAME]", help_behavior_hint="(with get)")] = None
    """The data set."""

    def run(self) -> None:
        if self.action == "list":
            List(what="data", json=self.json).run()
            return
        if self.name is None:
            raise UserError("tokenmix data get needs a name; see tokenmix data list")
        from tokenmix.lab.data import fetch_data

        print(fetch_data(self.name))


@dataclass(frozen=True, kw_only=True)
class Probe(Printed, Section):
    """Train mixers on synthetic tasks with known answers, with self-attention and no mixing for comparison."""

    mixers: Annotated[Positional[tuple[str, ...]], tyro.conf.arg(metavar="NAME ...", help_behavior_hint="(required)")]
    """Mixers of `tokenmix list mixers`, or module:Class."""
    tasks: Annotated[Names | None, tyro.conf.arg(help_behavior_hint="(default: all)")] = None
    """Tasks, separated by commas: recall, copy, shift, count, majority, same, path."""
    full: bool = False
    """Five seeds with 95 % confidence intervals, instead of one seed."""
    threads: Threads = None
    """CPU threads of PyTorch."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to train."""
    out: Annotated[Path | None, tyro.conf.arg(help_behavior_hint="(default: none is written)")] = None
    """Folder for probe.json, probe.md and probe.png."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "mixers", _words(self.mixers))

    def run(self) -> None:
        if not self.mixers:
            raise UserError("no mixer given; name one or more, for example: tokenmix probe external")
        check_mixers(tuple(part for name in self.mixers for part in name.split("+")))
        from tokenmix.files import make_folder, replace_file, replacing
        from tokenmix.testing.probe import probe

        _set_threads(self.threads)
        if self.out is not None:
            make_folder(self.out)
        report = probe(
            self.mixers,
            tasks=self.tasks,
            full=self.full,
            device=self.device,
            progress=log,
        )
        print(report.to_json() if self.json else report)
        if self.out is not None:
            replace_file(self.out / "probe.json", report.to_json().encode())
            replace_file(self.out / "probe.md", f"{report.markdown()}\n".encode())
            with replacing(self.out / "probe.png") as path:
                report.plot().savefig(path, dpi=120)
            log(f"probe.json, probe.md and probe.png are in {self.out}")


def _layers(args: list[str]) -> tuple[int, ...]:
    found: list[int] = []
    for word in args[0].split(","):
        first, dash, last = word.strip().partition("-")
        numbers = first.isdecimal() and (last.isdecimal() and int(first) <= int(last) if dash else not last)
        if not numbers:
            raise ValueError(f"{word!r} is not a layer; give numbers from 0 as in 3-5 or 0,2,4")
        found += range(int(first), int(last or first) + 1)
    return tuple(dict.fromkeys(found))


Layers = Annotated[tuple[int, ...], option("3-5|0,2,4", tuple, _layers, joined)]


@dataclass(frozen=True, kw_only=True)
class Distill(Printed, Section):
    """Replace attention in a text model of Hugging Face and train it to reproduce the original, without labels."""

    folder: Annotated[Positional[Path], tyro.conf.arg(metavar="DIR")]
    """A local folder with model and tokenizer."""
    to: Annotated[str, named("MIXER")]
    """The mixer, a name of tokenmix list mixers or module:Class."""
    text: Path
    """A file with a text in each line."""
    out: Path
    """Folder to write; must be new or empty."""
    layers: Annotated[Layers | None, tyro.conf.arg(help_behavior_hint="(default: all)")] = None
    """Attention layers to replace, by number from 0."""
    mixer_kwargs: Pairs = field(default_factory=dict)
    """Arguments of the mixer, for example num_slots=32."""
    drop: Literal["positions"] | None = None
    """positions: drop relative or rotary positions inside the attention; attention with them is refused otherwise."""
    output: Literal["mean", "cls", "tokens"] = "mean"
    """What to match: the mean of the tokens, as in sentence embeddings, the first token, or every token."""
    loss: Literal["cosine", "mse"] = "cosine"
    """cosine: cosine distance; mse: squared error relative to the original's mean square."""
    steps: Annotated[int, Range(least=0)] = 1000
    """Training steps; 0 replaces the layers and measures."""
    batch_size: Annotated[int, Range(least=1)] = 32
    """Texts per step."""
    lr: Annotated[float, Range(above=0)] = 1e-3
    """Learning rate."""
    max_length: Annotated[int, Range(least=1)] = 128
    """Texts are cut at this many tokens, the size of mixers with a matrix over tokens."""
    held_out: Annotated[int, Range(least=1)] = 500
    """Texts that measure fidelity, at most a tenth of all."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: autocast; faster on processors with bfloat16."""
    threads: Threads = None
    """CPU threads of PyTorch."""
    seed: int = 0
    """Seed of the split, the order and the new weights."""

    def run(self) -> int | None:
        check_mixers([self.to])
        if not self.folder.is_dir():
            raise UserError(f"no folder {self.folder}; give a local one with config.json, weights and tokenizer")
        check_regular(self.text)
        from tokenmix.lab.swapping import convert_folder, read_texts

        _set_threads(self.threads)
        options = {name: value for name, value in vars(self).items() if name not in ("text", "threads", "json")}
        swap, report = convert_folder(texts=read_texts(self.text), progress=log, **options)
        print(to_json({"swap": swap.to_json(), "distill": report.to_json()}) if self.json else report)
        log(f"{self.out}: opened by AutoModel.from_pretrained after import tokenmix.register")
        return 130 if report.interrupted else None
