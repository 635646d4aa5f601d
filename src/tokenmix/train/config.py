"""What a run is made of. No heavy import here: the command line reads these classes to print its help."""

import ast
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.constructors import PrimitiveConstructorSpec

__all__ = ["Budget", "CompareConfig", "TrainConfig"]


def _value(text: str) -> Any:
    """A Python literal where it is one, else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _pairs(args: list[str]) -> dict[str, Any]:
    bare = [arg for arg in args if "=" not in arg]
    if bare:
        raise ValueError(f"{bare[0]!r} is not of the form name=value")
    return {key: _value(text) for key, _, text in (arg.partition("=") for arg in args)}


def _numbers(args: list[str]) -> tuple[int, ...]:
    words = [word.strip() for word in args[0].split(",") if word.strip()]
    wrong = next((word for word in words if not word.lstrip("+-").isdecimal()), None)
    if wrong is not None:
        raise ValueError(f"{wrong!r} is no whole number; separate them by commas")
    return tuple(map(int, words))


def _switch(args: list[str]) -> float | None:
    if args[0].lower() == "none":
        return None
    try:
        return float(args[0])
    except ValueError:
        raise ValueError(f"takes a number or none, got {args[0]!r}") from None


Switch = Annotated[
    float | None,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="{none}|FLOAT",
        instance_from_str=_switch,
        is_instance=lambda x: x is None or isinstance(x, float | int),
        str_from_instance=lambda x: [str(x).lower()],
    ),
]
Pairs = Annotated[
    dict[str, Any],
    PrimitiveConstructorSpec(
        nargs="*",
        metavar="NAME=VALUE ...",
        instance_from_str=_pairs,
        is_instance=lambda x: isinstance(x, dict),
        str_from_instance=lambda x: [f"{k}={v}" for k, v in x.items()],
    ),
]
Names = Annotated[
    tuple[str, ...],
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="A,B,C",
        instance_from_str=lambda args: tuple(name.strip() for name in args[0].split(",") if name.strip()),
        is_instance=lambda x: isinstance(x, tuple),
        str_from_instance=lambda x: [",".join(x)],
    ),
]
Numbers = Annotated[
    tuple[int, ...],
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="1,2,3",
        instance_from_str=_numbers,
        is_instance=lambda x: isinstance(x, tuple),
        str_from_instance=lambda x: [",".join(map(str, x))],
    ),
]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What twins of a comparison share: data, length of training and recipe."""

    data: str = "fashion-mnist"
    """A name of `tokenmix list data` that fits the task, or files of your own in a layout that it lists, such as
    folder:PATH (one sub-folder a class), masks:PATH, coco:PATH, text:PATH or clouds:PATH."""
    epochs: int = 10
    """Passes over the training samples: images, texts or clouds of points."""
    max_steps: int | None = None
    """Stop after this many optimiser steps, if that comes first."""
    batch_size: int = 128
    """Samples of one optimiser step on one device, divided into --accumulate parts."""
    lr: float = 2e-3
    """Peak learning rate."""
    min_lr: float = 1e-5
    """Learning rate at the end of the schedule."""
    schedule: Literal["cosine", "linear", "poly", "step", "constant"] = "cosine"
    """How the learning rate falls after the warm-up; poly is (1 - step / steps) ** 0.9, step a tenth from 8/12 and a
    hundredth from 11/12 of the run on, constant stays."""
    warmup_steps: int | None = None
    """Steps of linear warm-up; 5 % of the run if not given."""
    warmup_epochs: float | None = None
    """The same in epochs."""
    cooldown_epochs: float = 0.0
    """Last epochs, of those that --epochs counts, that stay at the lowest learning rate."""
    opt: str = "adamw"
    """Optimiser, by timm's name."""
    opt_eps: float | None = None
    """Epsilon of the optimiser; its own if not given."""
    weight_decay: float = 0.05
    """Weight decay; never on norms, biases and what a model's no_weight_decay names."""
    clip_grad: Switch = 1.0
    """Largest gradient norm; none switches clipping off."""
    accumulate: int = 1
    """Parts into which a batch is cut, one backward pass each."""
    augment: str = "light"
    """none, light (what suits the task: images are shifted and mirrored, of photographs a random part is taken, clouds
    are stretched), or, in image classification, a timm RandAugment string such as rand-m9-mstd0.5-inc1."""
    color_jitter: float = 0.0
    """Largest change of an image's brightness, contrast and saturation, beside light."""
    reprob: float = 0.0
    """Probability that a box of an image is erased (timm); image classification alone."""
    crop_pct: float | None = None
    """Share of a photograph's centre that is evaluated; 0.875 if not given."""
    mixup: float = 0.0
    """Mixup alpha (timm); image classification alone."""
    cutmix: float = 0.0
    """CutMix alpha (timm); image classification alone."""
    smoothing: float = 0.1
    """Label smoothing, where the task classifies images or clouds."""
    ema: Switch = None
    """Decay of the exponential moving average of the weights; none switches it off."""
    precision: Literal["32", "bf16-mixed", "16-mixed", "bf16"] = "32"
    """Numbers that the model computes in."""
    grad_checkpointing: bool = False
    """Compute each block again in the backward pass: less memory, more time."""
    limit: int | None = None
    """Use this many training samples."""
    limit_eval: int | None = None
    """Use this many test samples."""
    img_size: int | None = None
    """Side of the square that images are resized to, where the task resizes; the data set's own size if not given."""
    workers: int = 0
    """Processes that load samples."""
    threads: int | None = None
    """CPU threads of PyTorch."""
    device: str = "auto"
    """auto, cpu, cuda, mps."""
    log_every: int = 20
    """Steps between two rows of metrics.csv."""
    checkpoint_every: int = 200
    """Steps between two checkpoints; one is written after each epoch in any case."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Budget):
    """One run."""

    task: tyro.conf.Positional[str] = "image-classification"
    """What is learnt: see `tokenmix list tasks`."""
    model: str = "vit_nano"
    """A model for the task, see `tokenmix list models`."""
    model_kwargs: Pairs = field(default_factory=dict)
    """Arguments of the model, for example --model-kwargs depth=6 drop_path_rate=0.1."""
    task_kwargs: Pairs = field(default_factory=dict)
    """Settings that only this task has, for example --task-kwargs crop=513 ignore=255; a wrong name lists them."""
    diagonality: float = 0.0
    """Weight of the diagonality loss on the scores that less-attention makes; it writes an N x N map of every layer."""
    diagonality_form: Literal["hinge", "printed"] = "hinge"
    """hinge, bounded below, mean over the layers; or printed, the article's sums, which push the diagonal down."""
    tokenizer: Path | None = None
    """Folder of the tokenizer of a text task; that of --init-from if not given, else one is trained on the texts. The
    run folder keeps it."""
    vocab_size: int = 8000
    """Tokens of the tokenizer that is trained where none is given."""
    seq_len: int = 128
    """Tokens of a sequence of text."""
    masking: Literal["token", "whole-word"] = "token"
    """What masked-lm masks at a time."""
    mask_prob: float = 0.15
    """Share of the tokens that masked-lm predicts: 80 % masked, 10 % another, 10 % as they are."""
    doc_stride: int = 64
    """Tokens that two neighbouring windows of a long context share, in question-answering."""
    seed: int = 0
    """Seed of weights, order and augmentation."""
    out: Path | None = None
    """Run folder; runs/MODEL-DATA-SEED if not given."""
    resume: Path | None = None
    """Continue this run folder where it stopped; its own config is used."""
    init_from: Path | None = None
    """A safetensors file or run folder whose weights start the model; image size and classes may be others."""
    recipe: str | None = None
    """A recipe by name or file; what is given beside it wins. See recipes/."""
    devices: int | None = None
    """Processes on this machine, one a device; torchrun's number if that started them, else 1."""
    num_nodes: int | None = None
    """Machines; torchrun's number if that started the processes, else 1."""
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    """How processes share the work: ddp (auto) copies the model to each, fsdp cuts it into parts."""


@dataclass(frozen=True, kw_only=True)
class CompareConfig(Budget):
    """Twins that differ only in their mixer."""

    mixers: Names = ("self", "external", "multihead-external", "gating", "less")
    """Mixers to compare, separated by commas."""
    task: str = "image-classification"
    """What is learnt."""
    model: str = "mixer_nano"
    """The skeleton into which each mixer is put."""
    model_kwargs: Pairs = field(default_factory=dict)
    """Arguments of the skeleton, the same for every twin."""
    seeds: Numbers = (0,)
    """One run of every twin for each of these, separated by commas."""
    out: Path | None = None
    """Folder of the report; runs/compare-DATA if not given."""
