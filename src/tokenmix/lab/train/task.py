"""The interface between the trainer and a task.

Methods have the names of LightningModule's. A classifier implements `loss`, `evaluate` and `make_metrics`; adversarial
tasks also override `training_step` and `configure_optimizers`. `LightningTask` runs a task under Lightning's Trainer.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.optim import Optimizer

from tokenmix.errors import UserError, as_user_error, unknown_name
from tokenmix.files import Values, user_path
from tokenmix.lab.data.indexed import IndexedDataset, make_loader, spread, subset
from tokenmix.lab.data.lookup import with_absolute_paths
from tokenmix.lab.registry import check_model
from tokenmix.lab.train.checkpoint import initial_weights
from tokenmix.lab.train.config import TeacherOptions, TrainConfig
from tokenmix.lab.train.distributed import all_reduce_mean
from tokenmix.lab.train.metrics import INDEX, Metric, Rows, collected, joined, num_rows
from tokenmix.lab.train.plan import EPOCHS, Configured, make_optimizer, make_schedule
from tokenmix.lab.train.programs import (
    Batch,
    Description,
    HubForm,
    PlainSamples,
    Shown,
    View,
    check_sizes,
    model_summary,
    own_macs,
)
from tokenmix.layers.base import count_parameters
from tokenmix.layers.table import own_mixers
from tokenmix.registry import TORCHVISION, Arguments, is_elsewhere

SHOWN = 32
"""Test samples from which a report takes its few."""


class TaskData(ABC):
    """The data of a task. The order of training batches depends only on (seed, epoch).

    Attributes:
        num_train, num_test: numbers of training and test samples.
        num_validation: number of training samples held out to choose the best epoch; with 0 the last epoch is kept.
        unit: plural name of the samples.
        notes: lines for the start of a run.
    """

    num_train: int
    num_test: int
    num_validation: int = 0
    unit: str = "images"
    notes: Sequence[str] = ()

    @abstractmethod
    def describe(self) -> Values:
        """Description of the data for the run folder, as JSON values: enough for the model and for predictions."""

    @abstractmethod
    def train_batches(self, *, batch_size: int, epoch: int, start: int) -> Iterable[Batch]:
        """Full batches of one epoch, without the first `start`, which are not read."""

    @abstractmethod
    def test_batches(self, *, batch_size: int) -> Iterable[Batch]:
        """All test samples in a fixed order; `len` gives the number of batches."""

    def validation_batches(self, *, batch_size: int) -> Iterable[Batch]:
        """All validation samples in a fixed order; called only if there are any."""
        raise NotImplementedError

    def batches_of(self, part: Literal["train", "test"], batch_size: int) -> Iterable[Batch]:
        """Training batches of the first epoch, or all test samples."""
        if part == "test":
            return self.test_batches(batch_size=batch_size)
        return self.train_batches(batch_size=min(batch_size, self.num_train), epoch=0, start=0)

    def shown_batches(self, number: int) -> Iterable[Batch]:
        """Some test samples for a report, about `number`."""
        return islice(self.test_batches(batch_size=number), 1)

    def save(self, run: Path) -> None:
        """Write data for later commands that a description cannot hold, such as a tokenizer."""
        return

    def part(self, rank: int, world_size: int) -> "TaskData":
        """The part of the data that one of `world_size` processes reads; sample counts stay those of the whole.

        Each part has equally many training batches, and at least one test batch.
        """
        raise UserError(
            f"{type(self).__name__} cannot be split over {world_size} processes; train with one, or implement its "
            "part()"
        )


def built_with(model: str, given: Arguments) -> AbstractContextManager[None]:
    """Raise `UserError` if the model cannot be built with the user's arguments."""
    if not given:
        return nullcontext()
    listed = " ".join(f"{name}={value!r}" for name, value in given.items())
    kinds = ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError
    return as_user_error(f"{model} cannot be built with --model-kwargs {listed} (", "); give other values", *kinds)


def input_sizes(model: nn.Module, img_size: Sequence[int] | None = None) -> Values:
    """`img_size` (height, width), `patch_size` and `num_tokens` (a list if there are stages), if the model has them."""
    stem: Any = getattr(model, "stem", None)  # ours
    embed: Any = getattr(model, "patch_embed", None)  # timm's
    size: Any = getattr(model, "img_size", None) or getattr(embed, "img_size", None) or img_size
    patch = next((p for p in (getattr(part, "patch_size", None) for part in (model, stem, embed)) if p), None)
    grids: Any = getattr(model, "grid_sizes", ())
    tokens: Any = [height * width for height, width in grids] or getattr(model, "num_tokens", None)
    if tokens is None and hasattr(embed, "num_patches"):
        tokens = embed.num_patches + (getattr(model, "num_prefix_tokens", 0) or 0)
    patch = patch[0] if isinstance(patch, Sequence) else patch
    size = [size, size] if isinstance(size, int) else size
    # A user's model may have another meaning of img_size.
    if not isinstance(size, Sequence) or len(size) != 2 or not all(isinstance(side, int) for side in size):
        return {}
    found = {"img_size": list(size), "patch_size": patch, "num_tokens": tokens}
    return {name: value for name, value in found.items() if value is not None}


def size_note(sizes: Arguments) -> str:
    """The result of `input_sizes` as a line of text."""
    words = ["images of {} x {} px".format(*sizes["img_size"])]
    if "patch_size" in sizes:
        words.append(f"patches of {sizes['patch_size']} px")
    if "num_tokens" in sizes:
        tokens = sizes["num_tokens"]
        words.append(f"{', then '.join(map(str, tokens)) if isinstance(tokens, list) else tokens} tokens")
    return ", ".join(words)


class TaskModule(nn.Module, ABC):
    """A network with its loss and metrics, and hooks of other commands, with defaults.

    Only `model` is saved, so everything learned must be in `model`, including a second network.

    Args:
        model: the network.
        config: the run's config.
        data: result of `TaskData.describe`.

    Attributes:
        monitor: metric that picks the best checkpoint: `--monitor`, else `usual_monitor()`.
        mode: max if more of `monitor` is better, min if less is better.
        options: the task's own options, `config.options`.
        set_elsewhere: model arguments that users cannot give, and the option that sets each.
        total_steps, total_epochs: those of the whole run; the loop sets them before training.
        automatic_optimization: whether the loop runs the backward pass and the optimisers; else `training_step` does.
        inspects: what `inspect` can show: maps of an image from `view`, gates and attention of a text, or nothing.
        no_comparison: why `compare` refuses the task, and what to do instead; empty if it does not refuse.
        baselines: names of the task's simplest methods in `tokenmix.lab.compare.baselines`. `compare` fits them to
            `plain_samples`; `judged` takes logarithms of their probabilities, and the targets.
        hub: format of `save_for_hub`; None if no library of the hub loads the models.
        optimizers: result of `configure_optimizers`, for such a `training_step`.
        own_samples: samples of a test batch that this rank counts, if ranks share images.
        part_weight: factor on the loss of the current batch, see `part_weights`; set before each batch.
        metrics: result of `make_metrics`.
        samples: rows of the last evaluation.
        results: values of the metrics after the last evaluation.
    """

    monitor: str
    mode: Literal["max", "min"]
    set_elsewhere: ClassVar[Mapping[str, str]] = {}
    automatic_optimization: ClassVar[bool] = True
    inspects: ClassVar[Literal["images", "text", "nothing"]] = "nothing"
    no_comparison: ClassVar[str] = ""
    baselines: ClassVar[tuple[str, ...]] = ()
    hub: ClassVar[HubForm | None] = None

    def __init__(self, model: nn.Module, config: TrainConfig, data: Description) -> None:
        super().__init__()
        self.model, self.config, self.data = model, config, data
        self.options: Any = config.options
        self.metrics = self.make_metrics(config, data)
        self.watch(config.loop.monitor or self.usual_monitor())
        self.total_steps, self.total_epochs = 0, float(config.loop.epochs or EPOCHS)
        self.part_weight = 1.0
        self.own_samples = slice(None)
        self.optimizers: list[Optimizer] = []
        self.rows: list[Rows] = []
        self.samples: Rows = {}
        self.results: Values = {}

    @classmethod
    @abstractmethod
    def load_data(cls, config: TrainConfig, like: Description | None = None) -> TaskData:
        """Read `config.data.data`, preprocessed as in the description `like` if given; `UserError` if impossible."""

    @classmethod
    @abstractmethod
    def build_model(cls, config: TrainConfig, data: Description) -> nn.Module:
        """A new model for data of this description."""

    @classmethod
    def model_from_config(cls, config: TrainConfig, data: Description) -> nn.Module:
        """`build_model`, with a `UserError` if the user's arguments do not fit the model."""
        cls.check_arguments(config)
        with built_with(config.model.model, config.model.model_kwargs):
            model = cls.build_model(config, data)
        # With channels last, which outputs take from weights, steps on a CPU are up to 1.5 times as fast. FSDP refuses
        # such weights, and a network of the user's may call `view` on such outputs.
        name, package = config.model.model, type(model).__module__.partition(".")[0]
        theirs = is_elsewhere(name) and not name.startswith(TORCHVISION)
        if config.loop.strategy == "fsdp" or theirs or package not in ("tokenmix", "timm", "torchvision"):
            return model
        theirs_inside = {part for mixer in own_mixers(model) for part in mixer.modules()}
        for part in model.modules():
            if isinstance(part, nn.Conv2d | nn.ConvTranspose2d) and part not in theirs_inside:
                part.to(memory_format=torch.channels_last)
        return model

    @classmethod
    def with_absolute_paths(cls, config: TrainConfig) -> TrainConfig:
        """The config with absolute paths, so that the run can be used from anywhere."""
        config = config.replace(data=with_absolute_paths(config.data.data))
        teacher = config.options.teacher if isinstance(config.options, TeacherOptions) else None
        if teacher is None or not user_path(teacher).is_dir():
            return config
        return config.replace(teacher=str(user_path(teacher).absolute()))

    @classmethod
    def check(cls, config: TrainConfig, batch_size: int) -> None:
        """Raise `UserError` for conflicting options, before data is read; `batch_size` is that of one backward pass."""
        check_model(config.task, config.model.model)
        cls.check_arguments(config)

    @classmethod
    def check_arguments(cls, config: TrainConfig) -> None:
        """Raise `UserError` for a model argument in `set_elsewhere`."""
        given = config.model.model_kwargs
        for name in (name for name in cls.set_elsewhere if name in given):
            raise UserError(f"model argument {name}={given[name]!r} is set elsewhere; use {cls.set_elsewhere[name]}")

    def initial_weights(self, source: Path) -> dict[str, Tensor]:
        """Weights of a safetensors file or run folder, fitted to `model`; used by --init-from."""
        return initial_weights(source, self.model)

    @abstractmethod
    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a training batch, and further numbers for the log.

        A mean over the `count` of a batch must be multiplied by `part_weight`.
        """

    def count(self, batch: Batch) -> int | None:
        """Samples, tokens, pixels or points in the mean loss of a batch; None if all batches have equally many."""
        return None

    def part_weights(self, parts: Sequence[Batch]) -> list[float]:
        """The count of each part of a step, over the mean count of all parts on all ranks; all ranks must call this.

        The mean of the weighted means is then the mean over the whole step.
        """
        if type(self).count is TaskModule.count:
            return [1.0] * len(parts)
        counts = torch.tensor([self.count(part) for part in parts], dtype=torch.float64)
        mean = all_reduce_mean(counts.mean())
        return (counts / (mean or 1.0)).tolist()

    @abstractmethod
    def evaluate(self, batch: Batch) -> Rows:
        """Rows for the validation or test samples of a batch, enough for all metrics.

        Columns have one row per sample and include `index`; `metrics.joined` adds up rows of the same sample. Without
        `index` a comparison cannot pair the samples. A further table has its own index and columns named TABLE.NAME.
        """

    @classmethod
    @abstractmethod
    def make_metrics(cls, config: TrainConfig, data: Description) -> dict[str, Metric]:
        """Metrics of these rows, by their names in logs and results, for data of this description."""

    def usual_monitor(self) -> str:
        """The metric that picks the best checkpoint of these data; the task's `monitor` unless overridden."""
        return type(self).monitor

    def watch(self, monitor: str) -> None:
        """Set `monitor` and `mode`; `UserError` unless the metric is one number."""
        if monitor not in self.numbers():
            raise unknown_name(f"metric of {self.config.task}", monitor, self.numbers())
        self.monitor, self.mode = monitor, "max" if self.metrics[monitor].higher_is_better else "min"

    def numbers(self) -> list[str]:
        """Names of the scalar results, which are logged after each epoch."""
        return [name for name, metric in self.metrics.items() if metric.names is None]

    @abstractmethod
    def predict(self, inputs: Sequence[str | Path]) -> list[Values]:
        """Predictions as JSON values, for files or other inputs; called in evaluation mode without gradients."""

    def predict_into(self, inputs: Sequence[str | Path], out: Path) -> list[Values]:
        """The same predictions, also written as images and files into the existing folder `out`."""
        raise UserError(f"{self.config.task} writes no files; omit --out, or use --json")

    def draw(self, folder: Path, step: int) -> None:
        """Write images of the state after `step` steps into a folder; rank 0 calls this after each evaluation."""
        return

    def num_parameters(self) -> int:
        """Numbers that training learns or keeps fixed."""
        return count_parameters(self.model)

    def macs(self) -> int | None:
        """Multiply-adds per sample, from the equations; None if the model does not count them."""
        return own_macs(self.model)

    def example(self) -> dict[str, Tensor]:
        """Two samples in the order of the model's arguments, by their names in an export."""
        raise UserError(f"{type(self).__name__} cannot be exported; implement its example()")

    def swap_example(self) -> tuple[object, ...] | None:
        """Forward arguments from which a swap learns how the model calls its attention; None for one image."""
        return None if type(self).example is TaskModule.example else tuple(x[:1] for x in self.example().values())

    def inference_module(self) -> nn.Module:
        """The model for export: one tensor of predictions for the arguments in `example`."""
        return self.model

    def run_example(self) -> None:
        """Run the model once on samples of noise."""
        self.inference_module().eval()(*self.example().values())

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def training_step(self, batch: Batch, batch_idx: int) -> Values:
        """The loss, and under `logs` the values for metrics.csv, there named train_*."""
        loss, logs = self.loss(batch)
        if not self.part_weight:
            # A part of a step without a sample that counts: its mean may be NaN, its gradient is 0.
            loss, logs = loss.nan_to_num(), {name: value.nan_to_num() for name, value in logs.items()}
        return {"loss": loss, "logs": {"loss": loss.detach(), **logs}}

    def on_validation_epoch_start(self) -> None:
        self.rows, self.samples = [], {}

    def rows_of(self, batch: Batch) -> Rows:
        """Rows of a batch: those of `evaluate` and of base classes."""
        return self.evaluate(batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.rows.append(joined([self.rows_of(batch)]))
        # Many small tensors between large ones would keep the allocator from reusing memory of large ones.
        # Parts of similar size are joined, so each row is copied log(batches) times.
        while len(self.rows) > 1 and num_rows(self.rows[-2]) <= num_rows(self.rows[-1]):
            self.rows[-2:] = [joined(self.rows[-2:])]

    def shard(self, mesh: DeviceMesh) -> None:
        """Shard the parameters of each block, and the rest, over the ranks; blocks are gathered when used."""
        for block in [
            block
            for name, blocks in self.model.named_modules()
            if name.endswith(("blocks", ".layers"))
            for block in blocks.children()
        ]:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def split_tokens(self, mesh: DeviceMesh) -> None:
        """Split the tokens of each image over the ranks of a mesh, see `tokenmix.parallel.TokenParallel`."""
        from tokenmix.parallel import TokenParallel

        parallelize_module(self.model, mesh, TokenParallel())
        self.own_samples = slice(mesh.get_local_rank(), None, mesh.size())

    def on_validation_epoch_end(self) -> None:
        """Gather the rows of all batches and ranks, and compute the metrics as plain values."""
        self.samples, self.rows = collected(self.rows), []
        if INDEX in self.samples and not num_rows(self.samples):
            raise UserError("no sample of the evaluation can be read; correct the files that were left out")
        self.results = {name: metric(self.samples) for name, metric in self.metrics.items()}

    def parameter_groups(self) -> nn.Module | list[Values]:
        """Argument of `make_optimizer`: the model, or groups with their own rates and decays."""
        return self.model

    def configure_optimizers(self) -> Configured:
        """timm's optimiser, with the recipe's schedule after linear warm-up, updated after each step."""
        optim = self.config.optim
        optimizer = make_optimizer(self.parameter_groups(), optim)
        schedule = make_schedule(optimizer, optim, self.total_steps, self.total_epochs)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def plain_samples(self, data: Any, part: Literal["train", "test"]) -> Iterator[PlainSamples]:
        """Training or test data of simple baselines, in batches."""
        raise NotImplementedError(f"{type(self).__name__} names baselines and has no plain_samples")

    def judged(self, logits: Tensor, targets: Tensor, index: Tensor) -> Rows:
        """Rows of an evaluation for logits (n, classes, ...) and targets (n, ...) of the samples `index` (n,)."""
        raise NotImplementedError(f"{type(self).__name__} names baselines and has no judged")

    def num_targets(self) -> int:
        """Number of values that a target of `plain_samples` may have."""
        return len(self.data["classes"])

    def plain_answers(self, data: Any) -> dict[str, Rows]:
        """Rows of an evaluation of the task's own simple methods on the test samples, by method."""
        return {}

    def show(self, batch: Batch) -> list[Shown]:
        """Test samples to draw, with truth and prediction; empty if there is nothing to draw."""
        return []

    @classmethod
    def summarize_model(cls, name: str, sizes: Arguments, model_kwargs: Arguments) -> Values:
        """What `tokenmix info` prints of a model.

        Args:
            name: name in the registry.
            sizes: requested input sizes, `img_size` or `num_points`; `UserError` for one that the model lacks.
            model_kwargs: arguments of the model.
        """
        check_sizes(sizes, (), f"{name} is given its sizes by --model-kwargs")
        from tokenmix.models.registry import create_on_meta  # not at the top: it imports timm

        return model_summary(name, create_on_meta(name, **model_kwargs))

    @classmethod
    def view(cls, model: nn.Module, file: Path, data: Description) -> View:
        """The input in a file as `predict` reads it; `data` is the run's description of its data."""
        raise NotImplementedError(f"{cls.__name__} has no view")

    def save_for_hub(self, folder: Path) -> nn.Module:
        """Write the model into a folder in the form `hub`; return it from there, called like `inference_module()`."""
        raise NotImplementedError(f"{type(self).__name__} has a form on the hub and no save_for_hub")


class IndexedData(TaskData):
    """Samples for training and testing, within the config's limits; those for validation are read like `test`.

    `description` has the entries of the run's description besides the numbers of samples.
    """

    # The images of an image task, for a report that shows some.
    images: object = None

    def __init__(
        self,
        train: IndexedDataset,
        test: IndexedDataset,
        validation: IndexedDataset | None,
        *,
        config: TrainConfig,
        description: Values,
        test_batch: int | None = None,
    ) -> None:
        self.unit, self.test_batch = train.unit, test_batch
        self.train = subset(train, config.data.limit)
        self.test = subset(test, config.data.limit_eval)
        self.validation = validation
        self.num_train, self.num_test = len(self.train), len(self.test)
        self.num_validation = 0 if validation is None else len(validation)
        counts = {"train": self.num_train, "validation": self.num_validation, "test": self.num_test}
        self.description = {**counts, **description}
        self._shared: Values = {
            "seed": config.loop.seed,
            "workers": config.data.workers,
            "pin_memory": torch.cuda.is_available(),
        }

    def describe(self) -> Values:
        return self.description

    def train_batches(self, *, batch_size: int, epoch: int, start: int) -> Iterable[Batch]:
        loader = make_loader(
            self.train, batch_size=batch_size, shuffle=True, drop_last=True, start_batch=start, **self._shared
        )
        loader.set_epoch(epoch)
        return loader

    def batches_of(self, part: Literal["train", "test"], batch_size: int) -> Iterable[Batch]:
        """All training samples in the order of the first epoch, or all test samples; the last batch may be smaller."""
        if part == "test":
            return self.test_batches(batch_size=batch_size)
        return make_loader(
            self.train, batch_size=batch_size, shuffle=True, drop_last=False, start_batch=0, **self._shared
        )

    def test_batches(self, *, batch_size: int) -> Iterable[Batch]:
        return self._in_order(self.test, batch_size)

    def validation_batches(self, *, batch_size: int) -> Iterable[Batch]:
        assert self.validation is not None
        return self._in_order(self.validation, batch_size)

    def shown_batches(self, number: int) -> Iterable[Batch]:
        """`number` test samples, evenly spread, and of different classes if each sample has one."""
        some = spread(self.num_test, SHOWN)
        batches = self._in_order(self.test.chosen(some), SHOWN)
        labels = [label for batch in batches for label in batch.get("labels", batch.get("label", ()))]
        first = {str(label.tolist()): i for i, label in reversed([*enumerate(labels)])}
        places = sorted(first.values())
        different = [places[i] for i in spread(len(places), number)]
        wanted = dict.fromkeys([*different, *spread(len(some), number).tolist()])
        chosen = some[sorted([*wanted][:number])]
        return self._in_order(self.test.chosen(chosen), number)

    def _in_order(self, samples: IndexedDataset, batch_size: int) -> Iterable[Batch]:
        size = min(batch_size, self.test_batch or batch_size)
        return make_loader(samples, batch_size=size, shuffle=False, **self._shared)

    def part(self, rank: int, world_size: int) -> "IndexedData":
        """The same samples; this rank reads its share."""
        if self.num_test < world_size:
            raise UserError(
                f"{self.num_test} test {self.unit} are too few for {world_size} processes; give {world_size} or more"
            )
        if 0 < self.num_validation < world_size:
            raise UserError(
                f"{self.num_validation} validation {self.unit} are too few for {world_size} processes; give "
                f"--validation {world_size} or more, or 0 for none"
            )
        other = copy.copy(self)
        other._shared = {**self._shared, "rank": rank, "world_size": world_size}
        return other


def check_names(spec: str, found: Sequence[str], trained: Sequence[str], what: str = "classes") -> None:
    """Raise `UserError` unless the data `spec` has the same names in the same order as the run."""
    if list(found) != list(trained):
        raise UserError(
            f"{spec!r} has the {what} {_first(found)}; the run was trained on {_first(trained)}: give data with "
            "these, in this order"
        )


def _first(names: Sequence[str]) -> str:
    return (", ".join(names[:3]) or "none") + (f", ... ({len(names)})" if len(names) > 3 else "")
