"""Verbs that make a run, a comparison or a tokenizer, and those that need a run folder."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro

from tokenmix.errors import UserError
from tokenmix.tasks.fitting import check_model_name
from tokenmix.train.config import CompareConfig, Names, Pairs, TrainConfig

__all__ = ["Compare", "Eval", "Export", "Generate", "Inspect", "Predict", "Train", "TrainTokenizer"]

Positional = tyro.conf.Positional


@dataclass(frozen=True, kw_only=True)
class Train(TrainConfig):
    """Train a model; leaves a run folder."""

    def run(self) -> int:
        if self.resume is None:
            check_model_name(self.task, self.model)
        from tokenmix.train.run import train

        train(self)
        return 0


@dataclass(frozen=True, kw_only=True)
class Compare(CompareConfig):
    """Train twins that differ only in their mixer, at equal budget; leaves a report."""

    def run(self) -> int:
        from tokenmix.compare.compare import compare

        compare(self)
        return 0


@dataclass(frozen=True)
class Eval:
    """Evaluate a run on its own or other data."""

    run_folder: Positional[Path]
    data: str | None = None
    """Other data than the run's own."""
    optimize: Literal["float32", "bfloat16", "int8"] | None = None
    """Evaluate the copy for CPUs that tokenmix.optimize makes in this dtype, with training images as its example."""
    task_kwargs: Pairs = field(default_factory=dict)
    """Settings of the task in the place of the run's own, for example way=sliding scales=0.5,1,1.5 mirror=yes."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        if self.optimize is not None:
            from tokenmix.cpu.run import evaluate as evaluate_optimized

            if self.task_kwargs:
                raise UserError("--optimize takes the run's own settings; leave --task-kwargs out")
            result = evaluate_optimized(self.run_folder, self.data, dtype=self.optimize)
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
        from tokenmix.tasks.generation.generate import generate

        made = generate(
            self.run_folder, self.out, classes=self.classes, num=self.num, seed=self.seed, interpolate=self.interpolate
        )
        _print(made, self.json)
        return 0


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
        from tokenmix.tasks.text.tokenizer import run

        print(run(self.data, self.out, self.kind, self.vocab_size, self.lowercase, self.max_length))
        return 0


def _print(result: Any, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result, indent=2, default=str))
        return
    from tokenmix.cli.listing import print_result

    print_result(result)
