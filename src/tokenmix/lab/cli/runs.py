"""Verbs that make a run, a comparison or a tokenizer, and verbs on a run folder."""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import tyro

from tokenmix.errors import UserError, printable
from tokenmix.lab.cli.parsing import Printed, check_data, check_files, check_mixers, parse_into, parse_known, stray
from tokenmix.lab.data.lookup import data_sets
from tokenmix.lab.registry import DATA_SETS, TASKS, check_model
from tokenmix.lab.train.config import CompareConfig, TaskConfig, TrainConfig
from tokenmix.lab.train.folder import RunFolder, is_run
from tokenmix.lab.train.launch import number_in
from tokenmix.lab.train.schema import Names, Section, named, option
from tokenmix.lab.train.sources import base_comparison, base_config, load_comparison, merge_kwargs

D = TypeVar("D", bound=TaskConfig)
# Classes whose confusion matrix is printed; of others, reports show colours only.
MOST_CLASSES = 12
Positional = tyro.conf.Positional
RunArgument = Annotated[
    Positional[RunFolder],
    option("RUN", RunFolder, lambda args: RunFolder.of(args[0]), lambda run: str(run.path)),
]


@dataclass(frozen=True)
class Train:
    """Train a model; writes a run folder."""

    config: TrainConfig

    @classmethod
    def parse(cls, prog: str, args: Sequence[str]) -> "Train":
        """A run with its task's options; other options come from the recipe or the resumed run."""
        task = _task(prog, args)
        source = parse_known(Source, prog, args)
        base = base_config(task, source.recipe, source.resume, source.init_from, source.model)
        return cls(merge_kwargs(base, _parse_config(TrainConfig, prog, args, base, cls.__doc__ or "")))

    def run(self) -> None:
        if self.config.loop.resume is None:
            check_model(self.config.task, self.config.model.model)
            check_mixers(filter(None, (self.config.swap.swap, self.config.swap.insert)))
            check_data(self.config.data.data)
        from tokenmix.lab.train.run import finish_run, run_folder, train

        # torchrun restarts the processes after losing one (--max-restarts above 0).
        if number_in("TORCHELASTIC_MAX_RESTARTS") > 0 and self.config.loop.resume is None:
            finish_run(self.config.replace(out=run_folder(self.config)))
        else:
            train(self.config)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Options that determine the defaults of the others."""

    recipe: str | None = None
    config: str | None = None
    resume: Path | None = None
    init_from: Path | None = None
    model: str | None = None


@dataclass(frozen=True)
class Compare:
    """Compare mixers on any task: train variants that differ only in the mixer, at equal budget; writes a report."""

    config: CompareConfig

    @classmethod
    def parse(cls, prog: str, args: Sequence[str]) -> "Compare":
        task = _task(prog, args)
        args = [_axis(word, after) for word, after in zip(args, [*args[1:], ""])]
        source = parse_known(Source, prog, args)
        if source.config:
            base = load_comparison(source.config, task)
        else:
            base = base_comparison(task or CompareConfig.task, source.init_from, source.model)
        given = _parse_config(CompareConfig, prog, args, base, cls.__doc__ or "")
        # The file has them, not the parser.
        return cls(given.replace(variants=base.variants))

    def run(self) -> int:
        """Exit code 1 if a run failed; runs that `--only` leaves to other machines have not."""
        check_mixers(name for name in self.config.mixers if name != "none")
        check_model(self.config.task, self.config.model.model)
        for data in data_sets(self.config.data.data):
            check_data(data)
        from tokenmix.lab.compare.compare import compare
        from tokenmix.lab.compare.variants import NOT_FINISHED

        found = compare(config=self.config).comparisons.values()
        messages = (run.message for results in found for variant in results.variants for run in variant.runs)
        return int(any(message not in ("", NOT_FINISHED) for message in messages))


def _task(prog: str, args: Sequence[str]) -> str | None:
    """The task, which is the first word; `UserError` for --task, or for data in its place."""
    if "--task" in args[:-1]:
        raise UserError(f"the task is the first word: {prog} {args[args.index('--task') + 1]} ...; leave --task out")
    task = args[0] if args and not args[0].startswith("-") else None
    if task is not None and task not in TASKS and task.partition(":")[0] in DATA_SETS:
        raise UserError(f"{task!r} is no task but data; give --data {task}")
    return task


def _axis(word: str, after: str) -> str:
    """The option's name for several values: --img-size 144,288 is an axis, --img-size 144 an option."""
    name, _, value = word.partition("=")
    return word.replace(name, "--img-sizes", 1) if name == "--img-size" and "," in (value or after) else word


def _parse_config(kind: type[D], prog: str, args: Sequence[str], base: D, about: str) -> D:
    """The config with the given options; `UserError` unless the task, which they depend on, comes first."""
    given = parse_into(kind, prog, args, base, about)
    if given.task != base.task and given.task not in TASKS:
        raise stray(given.task, args)
    if given.task != base.task:
        raise UserError(f"the task comes first: {prog} {given.task} ..., got it after other options")
    vars(given)["options"].check_given(word[2:].partition("=")[0].replace("-", "_") for word in args)
    return given


@dataclass(frozen=True, kw_only=True)
class RunCommand(Printed):
    """Base of verbs on a run folder that also take its task's evaluation options."""

    run_folder: RunArgument
    """A run folder. Options of its task follow, see tokenmix VERB RUN --help."""
    options: Annotated[Any, tyro.conf.arg(name="task")] = field(default_factory=Section)

    @classmethod
    def parse(cls, prog: str, args: Sequence[str]) -> Self:
        """The command; other options of the task are the run's own."""
        plain = [field for field in fields(cls) if field.name not in ("run_folder", "inputs", "options")]
        shared = [(field.name, field.type, field) for field in plain]
        folder = make_dataclass("Folder", [("words", Positional[tuple[str, ...]], ()), *shared], kw_only=True)
        words = parse_known(folder, prog, args).words
        if not words:
            return parse_into(cls, prog, args)
        missing = {
            field.name: tyro.MISSING for field in fields(cls) if field.default is field.default_factory is MISSING
        }
        run = RunFolder.of(words[0])
        default = cls(**missing, options=run.config.options.for_evaluation())
        return replace(parse_into(cls, prog, args, default), run_folder=run)


@dataclass(frozen=True, kw_only=True)
class Eval(RunCommand):
    """Evaluate a run on its own or other data."""

    data: Annotated[str, named("DATA")] | None = None
    """Another data set than the run's own."""
    optimize: Literal["float32", "bfloat16", "int8"] | None = None
    """Evaluate the CPU copy by tokenmix.optimize in this dtype, with training images as its example."""

    def run(self) -> None:
        if self.optimize is not None and self.options != self.run_folder.config.options.for_evaluation():
            raise UserError("--optimize takes the run's own options; omit the task's")
        from tokenmix.lab.train.run import evaluate

        result = evaluate(self.run_folder, self.data, options=vars(self.options), optimized=self.optimize)
        matrix, recall = result.get("confusion"), result.get("recall")
        # A user's own task may have other metrics of these names.
        if not self.json and isinstance(matrix, list) and isinstance(recall, dict) and len(matrix) <= MOST_CLASSES:
            result["confusion"] = {
                f"true {name}": {other: count for other, count in zip(recall, row) if count}
                for name, row in zip(recall, matrix)
            }
        self.print(result)


@dataclass(frozen=True, kw_only=True)
class Predict(RunCommand):
    """Predict files, or texts, with a run."""

    inputs: Annotated[
        Positional[tuple[str, ...]], tyro.conf.arg(metavar="FILE ...", help_behavior_hint="(at least one)")
    ]
    """Images or point clouds; for a run on text, sentences or files of them."""
    out: Path | None = None
    """Folder for predictions as files: masks, boxes, overlays."""

    def run(self) -> None:
        check_files(self.inputs)
        from tokenmix.lab.train.run import predict

        self.print(predict(self.run_folder, self.inputs, self.out, options=vars(self.options)))


@dataclass(frozen=True)
class Generate(Printed):
    """Generate images with a run of image-generation, as PNG files and a grid."""

    run_folder: RunArgument
    """A run folder."""
    out: Path
    """Folder to write."""
    classes: Names = ()
    """Classes, separated by commas; all if not given."""
    num: int = 8
    """Images per class."""
    seed: int = 0
    """Seed of the noise."""
    interpolate: int | None = None
    """Also write strips.png: for each class, this many images interpolated between two."""

    def run(self) -> None:
        self.run_folder.config  # noqa: B018  report a damaged config now
        from tokenmix.lab.tasks.generation.task import generate

        made = generate(
            self.run_folder.path,
            self.out,
            classes=self.classes,
            num=self.num,
            seed=self.seed,
            interpolate=self.interpolate,
        )
        self.print(made)


@dataclass(frozen=True)
class Inspect:
    """Show attention maps, gates and saturation over depth, as figures and numbers."""

    target: Annotated[Positional[str], tyro.conf.arg(metavar="RUN|MODEL")]
    """A run folder, or the name of a model."""
    file: Annotated[Positional[str | None], tyro.conf.arg(metavar="[INPUT]", help_behavior_hint="(optional)")] = None
    """An image; for a run on text a sentence, needed only for attention maps."""
    out: Path = Path("inspect")
    """Folder for figures and numbers."""

    def run(self) -> None:
        is_run(self.target)  # report a wrong target now
        check_files([self.file] if self.file else [])
        from tokenmix.lab.cli.listing import print_rows
        from tokenmix.lab.inspect import inspect

        found = inspect(self.target, self.file, out=self.out)
        if found.blocks:
            # Short headings, so that the table fits into 80 columns.
            short = {"effective_columns": "columns", "diagonality": "diagonal"}
            rows = [{key: row[key] for key in row if key not in ("shape", "kind")} for row in found.blocks]
            print_rows([{short.get(key, key): value for key, value in row.items()} for row in rows])
        if found.answer is not None:
            print(printable(f"prediction: {found.answer}"))
        print(f"{len(found.figures)} figures and numbers.json in {found.path}")


@dataclass(frozen=True)
class Export:
    """Export a run's model to another runtime or the hub, and check that its outputs are the same."""

    run_folder: RunArgument
    """A run folder."""
    format: Literal["onnx", "torch-export", "hub"] = "onnx"
    """hub: a folder in the format of timm or transformers, with a model card."""
    out: Path | None = None
    """File or folder to write; model.onnx, model.pt2 or hub in the run folder if not given."""
    push: Annotated[str, named("OWNER/NAME")] | None = None
    """With --format hub: upload the folder to this repository of the Hugging Face hub."""

    def run(self) -> None:
        self.run_folder.config  # noqa: B018  report a damaged config now
        if self.push is not None and self.format != "hub":
            raise UserError(f"--push {self.push} goes with --format hub, got --format {self.format}")
        from tokenmix.lab.train.export import TOLERANCE, export, export_to_hub

        if self.format == "hub":
            print(export_to_hub(self.run_folder, self.out, self.push))
            return
        out = export(self.run_folder, self.format, self.out)
        size = f"{out.stat().st_size / 1e6:.1f} MB"
        print(f"{out}: {self.format}, {size}, any batch size; its outputs equal PyTorch's to within {TOLERANCE:.0e}")


@dataclass(frozen=True)
class TrainTokenizer:
    """Train a tokenizer on text; writes a folder in Hugging Face's format."""

    data: Annotated[str, named("DATA")]
    """A corpus of tokenmix data list, text:PATH, or jsonl:PATH#column, also csv and parquet; uses its training part."""
    out: Path
    """Folder to write; must be new or empty."""
    kind: Literal["bpe", "wordpiece", "unigram"] = "bpe"
    vocab_size: int = 8000
    """Number of pieces, including the five special ones."""
    lowercase: Literal["yes", "no"] = "no"
    """Lowercase the text; wordpiece then also drops accents."""
    max_length: int = 512
    """Longest text in tokens, stored in the tokenizer's config."""

    def run(self) -> None:
        check_data(self.data)
        from tokenmix.lab.tasks.text.tokenizer import write_tokenizer

        print(write_tokenizer(self.data, self.out, self.kind, self.vocab_size, self.lowercase, self.max_length))
