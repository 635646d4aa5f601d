"""Training by options from Python; the result has numbers, a table and a figure."""

import csv
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from torch import nn

from tokenmix.errors import as_user_error
from tokenmix.files import Values, read_text, to_frame, to_html
from tokenmix.lab.data.fetch import muted
from tokenmix.lab.train import run as runs
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.folder import RunFolder
from tokenmix.lab.train.load import load_run
from tokenmix.lab.train.options import TrainOptions
from tokenmix.lab.train.schema import fitted
from tokenmix.lab.train.sources import check_call, make_config
from tokenmix.registry import Arguments
from tokenmix.trust import from_caller, only_typed, typed_words

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class RunResult(os.PathLike[str]):
    """A finished run in the folder `path`."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "_trusted", typed_words())

    @cached_property
    def result(self) -> Values:
        return RunFolder(self.path).result

    @property
    def metrics(self) -> dict[str, Any]:
        """Metrics of the best epoch on the test samples."""
        return self.result["metrics"]

    @property
    def best(self) -> float:
        """The monitored metric of the best epoch on the test samples; NaN if it is not defined."""
        monitor = self.result["monitor"]
        value = fitted(float | None, self.metrics.get(monitor), monitor)
        return math.nan if value is None else value

    @cached_property
    def model(self) -> nn.Module:
        """The network with the weights of the best epoch, in eval mode."""
        # The caller of `train` named the code of its own model.
        with only_typed(getattr(self, "_trusted", None)):
            return load_run(self.path)[0]

    def history(self) -> list[dict[str, float | None]]:
        """The rows of metrics.csv: step, epoch, losses, learning rate, throughput and validation metrics."""
        file = self.path / "metrics.csv"
        rows = csv.DictReader(read_text(file).splitlines())
        with as_user_error(f"{file} is damaged (", "); put a whole one back", ValueError, TypeError):
            return [{name: float(text) if text else None for name, text in row.items()} for row in rows]

    def to_pandas(self) -> "pd.DataFrame":
        """`history()` as a table; needs pandas."""
        return to_frame(self.history())

    def plot(self) -> "Figure":
        """Plot training loss and, with validation samples, the monitored metric over steps."""
        from matplotlib.figure import Figure

        monitor, rows = self.result["monitor"], self.history()
        columns = [name for name in ("train_loss", f"val_{monitor}") if any(row.get(name) is not None for row in rows)]
        figure = Figure(figsize=(4.2 * len(columns), 3.2), layout="constrained")
        for axes, name in zip(figure.subplots(1, len(columns), squeeze=False)[0], columns):
            points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
            axes.plot(*zip(*points), marker="o" if len(points) < 20 else None, markersize=3)
            axes.set(xlabel="step", ylabel=name.replace("train_", "training ").replace("val_", "validation "))
            axes.grid(alpha=0.3)
        return figure

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        result = self.result
        return (
            f"{result['task']}, {result['model']} on {result['data']}: test {result['monitor']} {self.best:.4f} "
            f"(epoch {result['best_epoch']} of {result['epochs']}), {result['seconds']:.1f} s of training, {self.path}"
        )

    def _repr_html_(self) -> str:
        numbers = {name: value for name, value in self.metrics.items() if isinstance(value, int | float)}
        rows = [["test metric", "value"], *([name, f"{value:.4g}"] for name, value in numbers.items())]
        return to_html(rows, str(self))


@from_caller
def train(
    task: str | None = None,
    *,
    config: TrainConfig | None = None,
    data: str | None = None,
    model: str | None = None,
    model_kwargs: Arguments | None = None,
    pretrained: bool | None = None,
    recipe: str | None = None,
    init_from: str | Path | None = None,
    swap: str | None = None,
    insert: str | None = None,
    insert_after: str | None = None,
    epochs: int | None = None,
    max_steps: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    seed: int | None = None,
    limit: int | None = None,
    limit_eval: int | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    device: str | None = None,
    threads: int | None = None,
    quiet: bool = False,
    **options: Unpack[TrainOptions],
) -> RunResult:
    """Train a model by options, as `tokenmix train` does, or continue a run.

    Args:
        task: a name of `tokenmix.list_tasks()`; default: the recipe's or run's task, else image classification.
        config: all options in one object; options given separately override it.
        data: a data set of `tokenmix list data`, or your files, such as "folder:photos"; default: that of `init_from`,
            else Fashion-MNIST for images.
        model: the network's name; default: the model of `init_from`, else the task's default.
        model_kwargs: arguments of the model.
        pretrained: start from the published weights of a model of timm or torchvision.
        recipe: name or file of a recipe to start from.
        init_from: a safetensors file or run folder to start from.
        swap: replace the model's attention layers by this mixer.
        insert, insert_after: insert a block with this mixer after the module or glob `insert_after`.
        epochs, max_steps, batch_size, lr, seed: length, batch, learning rate and seed.
        limit, limit_eval: use this many training and test samples.
        out: the run folder; runs/MODEL-DATA-SEED if not given.
        resume: continue this run folder.
        device, threads: device, and CPU threads.
        quiet: print nothing.
        **options: any other option of the command, by its name with underscores.

    Returns:
        `.metrics`, `.best`, `.path`, `.model`, `.history()`, `.to_pandas()`, `.plot()`.

    Raises:
        UserError: a wrong option; data or disk do not allow the run; the loss is not finite (the last good checkpoint
            is kept).
        KeyboardInterrupt: Ctrl-C or SIGTERM; the run is saved.
    """
    values = {
        name: value
        for name, value in locals().items()
        if name not in ("config", "task", "recipe", "resume", "quiet", "options") and value is not None
    } | dict(options)
    check_call("train", task, config, TrainConfig)
    if isinstance(values.get("model_kwargs"), Mapping):
        values["model_kwargs"] = dict(values["model_kwargs"])
    if config is None:
        config = make_config(task, recipe=recipe, resume=None if resume is None else Path(resume), **values)
    else:
        values |= {"task": task or config.task, "recipe": recipe or config.loop.recipe}
        config = config.replace(**values, **({} if resume is None else {"resume": resume}))
    with muted(quiet):
        return RunResult(runs.train(config, quiet=quiet))
