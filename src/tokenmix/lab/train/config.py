"""Configs of runs and comparisons. No heavy import here: the command line reads these classes for its help."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import tyro

from tokenmix.errors import UserError, unknown_name
from tokenmix.files import Values
from tokenmix.lab.registry import TASKS, get_task
from tokenmix.lab.train.schema import (
    FREE,
    RESUMABLE,
    Axis,
    BaseConfig,
    Folders,
    Jobs,
    Names,
    Needed,
    Numbers,
    Pairs,
    Range,
    Section,
    named,
)
from tokenmix.registry import load_object, without_timm

if TYPE_CHECKING:
    from tokenmix.lab.train.task import TaskModule


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Data options."""

    data: Annotated[Needed, named("DATA")] = "fashion-mnist"
    """A data set of `tokenmix list data` for the task, or your own files in one of the listed layouts.
    Layouts are folder:PATH (one sub-folder per class), masks:PATH, coco:PATH, text:PATH, clouds:PATH and others."""
    limit: Annotated[int | None, Range(least=1)] = None
    """Use this many training samples."""
    limit_eval: Annotated[int | None, Range(least=1)] = None
    """Use this many test samples."""
    validation: Annotated[int | None, Range(least=0)] = None
    """Hold out this many training samples (scenes, questions) to choose the best epoch; 0 keeps the last epoch.
    If not given, a tenth of the samples used, at most 10,000; no sample if a tenth is fewer than 10."""
    workers: Annotated[int, Range(least=0, most=256)] = field(default=0, metadata=RESUMABLE)
    """Processes that load samples."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """Model options."""

    model: Annotated[Needed, named("MODEL")] = "vit_nano"
    """A model for the task, see `tokenmix list models`; for image-classification also any of timm.
    For classification, segmentation and detection in images also torchvision:NAME, or your function module:factory.
    For image-classification, semantic-segmentation and text also transformers:FOLDER or transformers:OWNER/NAME."""
    model_kwargs: Pairs = field(default_factory=dict)
    """Arguments of the model, for example --model-kwargs depth=6 drop_path_rate=0.1."""
    pretrained: bool = False
    """Start from published weights of a timm, torchvision or transformers model or backbone; else use --init-from."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str):
            raise UserError(
                f"model takes a name, got a {type(self.model).__name__}; a network of yours is named by a function "
                "that builds it: model='module:factory'"
            )
        super().__post_init__()
        object.__setattr__(self, "model", without_timm(self.model))
        # Ranges that the names of arguments imply: rates below 1, sizes and counts at least 1.
        for name, value in self.model_kwargs.items():
            label = f"model argument {name}={value!r}"
            if name in SET_ELSEWHERE:
                raise UserError(f"{label} cannot be given here; use {SET_ELSEWHERE[name]}")
            for number in value if isinstance(value, tuple | list) else (value,):
                if isinstance(number, float) and not math.isfinite(number):
                    raise UserError(f"{label} must be finite")
                plain = isinstance(number, int | float) and not isinstance(number, bool)
                if name.endswith("_rate") and not (plain and 0 <= number < 1):
                    raise UserError(f"{label} must be a number in [0, 1)")
                size = SIZES.fullmatch(name) and (plain or isinstance(number, str | dict))
                least, most = int(name not in MAY_BE_ZERO), 10_000 if name.startswith("depth") else 1_000_000
                if size and not (isinstance(number, int) and least <= number <= most):
                    raise UserError(f"{label} must be a whole number in [{least}, {most}]")


# Arguments of timm's factory and of PyTorch that another option sets, or that make another kind of model.
SET_ELSEWHERE = {
    "checkpoint_path": "--init-from FILE",
    "pretrained_cfg": "--init-from FILE",
    "pretrained_cfg_overlay": "--init-from FILE",
    "device": "--device",
    "dtype": "--precision",
    "features_only": "timm in Python",
    "out_indices": "timm in Python",
}
# Sizes for which 0 means "none of them".
MAY_BE_ZERO = ("attention_dim", "frozen_stages", "num_leading", "num_vanilla", "type_vocab_size")
SIZES = re.compile(r"num_\w+|(\w+_)?(depth|dim|width|size|channel|stride)s?|image_size")


@dataclass(frozen=True, kw_only=True)
class SwapConfig(Section):
    """Other mixers in the network: in place of its attention, or inserted."""

    swap: Annotated[str, named("MIXER")] | None = None
    """Replace the model's attention layers by this mixer, a name of `tokenmix list mixers` or module:Class.
    Weights of --init-from are loaded before the swap; projections carry over where possible, see `tokenmix swap`."""
    swap_where: Annotated[str, named("GLOB")] = "*"
    """Glob over the names of attention layers to replace, such as "blocks.1[01].*", the last two of 12."""
    swap_kwargs: Pairs = field(default_factory=dict)
    """Arguments of this mixer, for example --swap-kwargs num_slots=32."""
    swap_drop: Literal["positions"] | None = None
    """positions: drop rotary and relative positions inside the attention; attention with them cannot be replaced."""
    insert: Annotated[str, named("MIXER")] | None = None
    """Insert a residual block with this mixer after the modules of --insert-after; a new block is the identity."""
    insert_after: Annotated[str, named("GLOB")] | None = None
    """Name of a module of the model, or a glob such as "layer[34]"."""
    insert_kwargs: Pairs = field(default_factory=dict)
    """Arguments of the inserted mixer, for example --insert-kwargs num_slots=32."""
    train_only: Literal["all", "mixers"] = "all"
    """mixers: train the replaced layers and inserted blocks, and freeze the rest of the model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [field.name for field in fields(self) if getattr(self, field.name) not in ("*", {}, "all", None)]
        for part in ("swap", "insert"):
            other = next((name for name in given if name.startswith(f"{part}_")), None)
            if getattr(self, part) is None and other is not None:
                raise UserError(
                    f"{other}={getattr(self, other)!r} needs a mixer; give --{part} MIXER as well, or leave it out"
                )
        if self.insert is not None and not self.insert_after:
            raise UserError(f"insert={self.insert!r} needs a place; give --insert-after MODULE, such as layer3")
        if self.train_only == "mixers" and self.swap is None and self.insert is None:
            raise UserError("train_only='mixers' needs a mixer; give --swap or --insert MIXER as well, or leave it out")


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Section):
    """Optimiser and learning-rate options."""

    opt: Annotated[str, named("NAME")] = "adamw"
    """Optimiser, by timm's name."""
    opt_eps: Annotated[float | None, Range(least=0)] = None
    """Epsilon of the optimiser; the optimiser's default if not given."""
    lr: Annotated[float, Range(above=0)] = 2e-3
    """Peak learning rate."""
    min_lr: Annotated[float, Range(least=0)] = 1e-5
    """Learning rate at the end of the schedule."""
    schedule: Literal["cosine", "linear", "poly", "step", "constant"] = "cosine"
    """Learning-rate schedule after the warm-up.
    poly: (1 - step / steps) ** 0.9; step: a tenth from 8/12 of the run on, a hundredth from 11/12 on."""
    warmup_steps: Annotated[int | None, Range(least=0)] = None
    """Steps of linear warm-up; 5 % of the run if not given."""
    warmup_epochs: Annotated[float | None, Range(least=0)] = None
    """Epochs of linear warm-up, instead of --warmup-steps."""
    cooldown_epochs: Annotated[float, Range(least=0)] = 0.0
    """Final epochs (part of --epochs) at the lowest learning rate."""
    weight_decay: Annotated[float, Range(least=0)] = 0.05
    """Weight decay; not for norms, biases and the model's no_weight_decay parameters."""
    clip_grad: Annotated[float | None, Range(above=0)] = 1.0
    """Largest gradient norm; none switches clipping off."""
    accumulate: Annotated[int, Range(least=1)] = 1
    """Parts of a batch, one backward pass each (gradient accumulation)."""
    ema: Annotated[float | None, Range(above=0, below=1)] = None
    """Decay of the exponential moving average of the weights, such as 0.999; none switches it off."""


@dataclass(frozen=True, kw_only=True)
class ManualOptim(Section):
    """Base for tasks that step their optimisers themselves: the trainer neither accumulates, clips nor averages."""

    accumulate: ClassVar[int] = 1
    clip_grad: ClassVar[float | None] = None
    ema: ClassVar[float | None] = None


@dataclass(frozen=True, kw_only=True)
class BudgetConfig(Section):
    """Budget, precision, device and initial weights."""

    epochs: Annotated[int | None, Range(least=1)] = None
    """Passes over the training samples: images, texts or point clouds.
    If not given 10, and from random weights on few samples up to 30: as many as make 1,000 steps."""
    max_steps: Annotated[int | None, Range(least=1)] = None
    """Stop after this many optimiser steps, if that comes first."""
    batch_size: Annotated[int, Range(least=1)] = 64
    """Samples per optimiser step on one device, divided into --accumulate parts."""
    monitor: Annotated[str, named("METRIC")] | None = None
    """Metric that picks the best epoch and is reported; the task's default if not given."""
    precision: Literal["32", "bf16-mixed", "16-mixed", "bf16"] = "32"
    """Training precision."""
    grad_checkpointing: bool = field(default=False, metadata=RESUMABLE)
    """Recompute each block in the backward pass: less memory, more time."""
    threads: Annotated[int | None, Range(least=1, most=1024)] = field(default=None, metadata=RESUMABLE)
    """CPU threads of PyTorch."""
    device: Literal["auto", "cpu", "cuda", "mps"] = field(default="auto", metadata=RESUMABLE)
    """Device to train on; auto takes a GPU if there is one."""
    log_every: Annotated[int, Range(least=1)] = field(default=20, metadata=FREE)
    """Steps between rows of metrics.csv."""
    checkpoint_every: Annotated[int, Range(least=1)] = field(default=200, metadata=FREE)
    """Steps between checkpoints; one is also written after each epoch."""
    logger: Literal["tensorboard", "wandb", "mlflow"] | None = field(default=None, metadata=RESUMABLE)
    """Log to TensorBoard (in the run folder), Weights & Biases or MLflow, in addition to metrics.csv.
    Configure the last two by their environment variables, such as WANDB_MODE and MLFLOW_TRACKING_URI."""
    init_from: Path | None = None
    """Start from the weights of a safetensors file or run folder; image size and classes may differ.
    Positions of your own models are interpolated if they have the shape (1, h*h, D) or (1, 1 + h*h, D).
    A run folder also sets data, model, its arguments and its swap, unless you give others or a --recipe."""


@dataclass(frozen=True, kw_only=True)
class LoopConfig(BudgetConfig):
    """Budget, seed, folders and processes of a run."""

    seed: Annotated[int, Range(least=0)] = 0
    """Seed of weights, order and augmentation."""
    out: Path | None = field(default=None, metadata=FREE)
    """Run folder; runs/MODEL-DATA-SEED if not given."""
    resume: Path | None = field(default=None, metadata=FREE)
    """Continue this run folder from its last checkpoint, with its own config."""
    recipe: Annotated[str, named("NAME")] | None = None
    """A recipe by name or file; options on the command line override it. See recipes/."""
    devices: Annotated[int | None, Range(least=1)] = field(default=None, metadata=FREE)
    """Processes on this machine, one per device; torchrun's number, else 1, if not given."""
    num_nodes: Annotated[int | None, Range(least=1)] = field(default=None, metadata=FREE)
    """Machines; torchrun's number, else 1, if not given."""
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    """How processes share the work: ddp (auto) replicates the model, fsdp shards it."""
    token_parallel: Annotated[int, Range(least=1)] = 1
    """Processes that share each image, each with some rows of its tokens; must divide --devices."""


@dataclass(frozen=True, kw_only=True)
class TaskOptions(Section):
    """Base of a task's options, and the options of a task without its own.

    `evaluation` is the dataclass of the options that `eval` and `predict` can override.
    """

    evaluation: ClassVar[type[Section]] = Section

    def check_given(self, names: Iterable[str]) -> None:
        """Raise `UserError` if an option in `names`, given on the command line, needs another one."""

    def for_evaluation(self) -> Section:
        """The options that `eval` and `predict` can override."""
        return self.evaluation(**{field.name: getattr(self, field.name) for field in fields(self.evaluation)})


@dataclass(frozen=True, kw_only=True)
class TeacherOptions(TaskOptions):
    """Base of the options of tasks that predict classes: knowledge distillation from a trained model."""

    teacher: Annotated[str, named("RUN|MODEL")] | None = None
    """Trained teacher: a run folder of the same task and classes.
    For image classification also a pretrained timm model by name, hf-hub:OWNER/NAME or local-dir:PATH."""
    distill: Annotated[float, Range(above=0, most=1)] = 0.5
    """Weight w of the teacher's logits: (1 - w) * loss + w * T^2 * KL(teacher / T || model / T).
    At 1 no label is used."""
    temperature: Annotated[float, Range(above=0)] = 2.0
    """Temperature T of the distillation."""
    distill_from: Literal["logits", "layers"] = "logits"
    """What to learn from the teacher: its logits, or the outputs of the layers that --swap replaces.
    layers: each swapped layer gets the teacher's input to that layer; needs no labels, and freezes the rest."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_given(field.name for field in fields(TeacherOptions) if getattr(self, field.name) != field.default)

    def check_given(self, names: Iterable[str]) -> None:
        """Raise `UserError` if a distillation option is given without `--teacher`."""
        own = {field.name for field in fields(TeacherOptions)} - {"teacher"}
        name = next((name for name in names if name in own), None)
        if self.teacher is None and name is not None:
            raise UserError(f"{name}={getattr(self, name)!r} needs a teacher; give --teacher RUN, or leave it out")


@dataclass(frozen=True, kw_only=True)
class ClassOptions(TaskOptions):
    """Base of the options of tasks with one class per sample: classes of unequal size."""

    class_weights: Literal["none", "balanced"] = "none"
    """balanced: all classes have the same weight in the loss; a sample of class c counts N / (C * N_c).
    C: classes; N: training samples; N_c: training samples of class c."""
    sampler: Literal["shuffle", "balanced"] = "shuffle"
    """balanced: an epoch has equally many samples of each class; samples of small classes are repeated."""


@dataclass(frozen=True, kw_only=True)
class DiagonalityOptions(TaskOptions):
    """Base of the options of tasks on labelled images: the diagonality loss of less-attention."""

    diagonality: Annotated[float, Range(least=0)] = 0.0
    """Weight of the diagonality loss on the scores of less-attention; it materialises the N x N map of every layer."""
    diagonality_form: Literal["hinge", "printed"] = "hinge"
    """hinge: bounded below, mean over layers; printed: the paper's sums, which push the diagonal down."""


@dataclass(frozen=True, kw_only=True)
class TaskConfig(BaseConfig):
    """Base of configs with the task's own `optim` and `options`."""

    task: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TASK")] = "image-classification"
    """Task to train, see `tokenmix list tasks`."""

    @property
    def task_class(self) -> "type[TaskModule]":
        """The class of the task, imported on access; `UserError` for an unknown task."""
        return get_task(self.task)

    def replace(self, **values: object) -> Self:
        """`BaseConfig.replace`; the task cannot change because the options belong to it."""
        if values.get("task", self.task) != self.task:
            raise UserError(f"a config of {self.task} cannot become one of {values['task']}; use make_config")
        return super().replace(**values)

    def unknown_option(self, name: str, known: Iterable[str]) -> UserError:
        """The error for an option that the task lacks; names the tasks that have it."""
        plain = name.removeprefix("--").replace("-", "_")
        having = [entry.name for entry in TASKS if plain in default_config(entry.name).flat()]
        if 0 < len(having) < 6:
            return UserError(f"{self.task} has no option {name}, which is one of {', '.join(having)}; leave it out")
        return unknown_name(f"option of {self.task}", name, known)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TaskConfig):
    """One run."""

    data: DataConfig = DataConfig()
    model: ModelConfig = field(default_factory=ModelConfig)
    swap: SwapConfig = field(default_factory=SwapConfig)
    optim: Any = OptimConfig()
    loop: LoopConfig = LoopConfig()
    options: Annotated[Any, tyro.conf.arg(name="task")] = TaskOptions()


def default_config(task: str) -> TrainConfig:
    """A run of this task with default options; `UserError` with the nearest names for an unknown task."""
    entry = TASKS[task]
    config = TrainConfig(task=task, optim=load_object(entry.optim)(), options=load_object(entry.options)())
    return config.replace(**{"model": "", "data": "", **entry.defaults})


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Section):
    """Where the runs of a comparison are trained."""

    engine: Literal["local", "ray", "slurm"] = "local"
    """local: this machine; ray: tasks on a Ray cluster; slurm: an array job.
    Every node needs the same packages, and the same files at the same paths."""
    jobs: Annotated[Jobs, Range(least=0)] = None
    """Concurrent runs, each in its own process; 0: one after another in this process, with all threads.
    auto: one single-threaded run per core if only the CPU is used. With slurm: of the array; auto: all."""
    address: Annotated[str, named("HOST:PORT")] | None = None
    """Address of the Ray cluster, such as HOST:6379 or auto; if not given, Ray starts on this machine."""
    run_cpus: Annotated[int | None, Range(least=1)] = None
    """CPUs per run that ray and slurm reserve; 1 if not given."""
    run_gpus: Annotated[float | None, Range(least=0)] = None
    """GPUs per run that ray and slurm reserve, for ray also a fraction; none if not given."""
    slurm: Pairs = field(default_factory=dict)
    """Parameters of submitit's executor, for example --slurm timeout_min=600 slurm_partition=gpu."""

    def __post_init__(self) -> None:
        if self.jobs == "auto":
            object.__setattr__(self, "jobs", None)
        super().__post_init__()
        takes = {
            "jobs": ("local", "slurm"),
            "address": ("ray",),
            "run_cpus": ("ray", "slurm"),
            "run_gpus": ("ray", "slurm"),
            "slurm": ("slurm",),
        }
        for name, engines in takes.items():
            if getattr(self, name) and self.engine not in engines:
                raise UserError(
                    f"{name}={getattr(self, name)!r} needs --engine {' or '.join(engines)}, got {self.engine}; "
                    "change the engine, or leave it out"
                )


@dataclass(frozen=True, kw_only=True)
class CompareConfig(TaskConfig):
    """Variants of one model that differ only in their mixer."""

    mixers: Names = ("self", "external", "multihead-external", "gating", "less")
    """Mixers to compare, separated by commas: names of tokenmix list mixers, or module:Class.
    A model with an argument `mixer` gets the mixer there. In any other model the mixer replaces the attention layers.
    With --insert-after each mixer is inserted after those modules."""
    swap_where: Annotated[str, named("GLOB")] = "*"
    """Glob over the names of attention layers to replace, in a model without an argument `mixer`."""
    swap_drop: Literal["positions"] | None = None
    """positions: drop rotary and relative positions inside these layers; layers with them cannot be replaced."""
    insert_after: Annotated[str, named("GLOB")] | None = None
    """Insert each mixer as a residual block after this module of the model, or after a glob such as "layer[34]"."""
    train_only: Literal["all", "mixers"] = "all"
    """mixers: train the replaced layers and freeze the rest of the model."""
    controls: bool = True
    """Also train the network without mixing, and fit the task's simplest baselines."""
    seeds: Numbers = (0,)
    """Seeds, separated by commas; each variant runs once per seed."""
    sizes: Names = ()
    """Sizes of the network, separated by commas: nano,small compares in mixer_nano and in mixer_small.
    Each size has its own report; so has each data set if --data names several, separated by commas."""
    patch: Annotated[Axis, Range(least=1)] = ()
    """Patch sizes of the model, separated by commas: 8,4. Each has its own report."""
    img_sizes: Annotated[Axis, Range(least=1, most=16384)] = ()
    """Sides of the images in pixels, separated by commas, each with its own report; --img-size 144,288 is the same."""
    tune: Annotated[str, named("auto|lr=A,B,C")] | None = None
    """Choose each variant's learning rate on validation samples, with runs of half the length: lr=1e-3,2e-3,4e-3.
    auto: half of --lr, --lr, and twice --lr."""
    budget: Literal["images", "macs", "seconds"] = "images"
    """What is equal for all variants: training samples, multiply-adds, or time.
    macs and seconds: the first variant's training is the budget; the cost of another variant scales its steps."""
    only: Names = ()
    """Train only these runs, separated by commas, such as self-seed0, self or '*-seed0'; report on finished runs."""
    merge: Folders = None
    """Train nothing: copy the runs of these comparison folders with equal settings to --out, and report on them."""
    config: Annotated[str, named("NAME")] | None = None
    """Options from a TOML file, or a comparison of recipes/ by name; options on the command line override them.
    A table [variants.NAME] in the file is a row of its own, with its own run options."""
    variants: Annotated[Values, tyro.conf.Suppress] = field(default_factory=dict)
    """Rows that differ in more than the mixer: run options by name of the row."""
    out: Path | None = None
    """Folder of the report; runs/compare-DATA if not given."""
    data: DataConfig = DataConfig()
    model: ModelConfig = field(default_factory=lambda: ModelConfig(model="mixer_nano"))
    optim: Any = OptimConfig()
    loop: BudgetConfig = BudgetConfig()
    engine: EngineConfig = field(default_factory=EngineConfig)
    options: Annotated[Any, tyro.conf.arg(name="task")] = field(
        default_factory=lambda: default_config(CompareConfig.task).options
    )

    def replace(self, **values: object) -> Self:
        """A changed copy; several values of `img_size` become `img_sizes`."""
        sides = values.get("img_size")
        several = {"img_size": None, "img_sizes": tuple(sides)} if isinstance(sides, tuple | list) else {}
        return super().replace(**{**values, **several})


def comparison_config(task: str = CompareConfig.task, **values: object) -> CompareConfig:
    """A comparison on this task with defaults for the other options; `UserError` for an unknown task or option."""
    if task != CompareConfig.task:
        run, skeleton = default_config(task), TASKS[task].skeleton
        budget = {field.name: getattr(run.loop, field.name) for field in fields(BudgetConfig)}
        values = {"mixers": ("self", "external"), **budget, **({"model": skeleton} if skeleton else {}), **values}
        config = CompareConfig(task=task, data=run.data, model=run.model, optim=run.optim, options=run.options)
        return config.replace(**values)
    return CompareConfig().replace(**values)
