"""A comparison as one self-contained HTML file, without a network or other files.

The template report.html escapes its values; charts are SVG. The page shows selected test samples with each variant's
prediction, and for images the attention maps.
"""

import base64
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from tokenmix.errors import UserError
from tokenmix.files import replace_file, to_frame
from tokenmix.lab.compare.charts import bars, confusions, cost_charts, growth_charts, learning_curves, marker
from tokenmix.lab.compare.notes import budget_sentence, finding_sentence, notes
from tokenmix.lab.compare.results import Results, Variant, columns, differences_of, metrics_of, table_of
from tokenmix.lab.data.lookup import short_name

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

import io

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tokenmix.lab.compare.results import Example
from tokenmix.lab.inspect import SIGNED, Tile, attention_maps, tiles_of
from tokenmix.lab.train.programs import Shown
from tokenmix.lab.train.task import TaskData, TaskModule
from tokenmix.layers.base import Mixer
from tokenmix.models import BlockMap

CANDIDATES, AT_ONCE = 256, 32
TILES = 4


@dataclass(frozen=True)
class ExampleMaps:
    """A test image of the report: `image` is uint8 (C, H, W); `tiles` by mixer, then by block."""

    known: Example
    image: Tensor
    tiles: dict[str, list[list[Tile]]]

    @property
    def url(self) -> str:
        values = self.image.expand(3, -1, -1) if self.image.shape[0] == 1 else self.image[:3]
        return _png(values.permute(1, 2, 0).numpy())


@dataclass(frozen=True)
class ShownExample:
    """A test sample as its task shows it, as images or text; see `Shown`."""

    index: int
    input: Image.Image | str | None
    truth: Image.Image | str
    predictions: Mapping[str, Image.Image | str]
    legend: Mapping[str, str]

    def pictures(self) -> list[tuple[str, bool, str]]:
        """A row's entries: title, whether it is an image, and the text or the image's data URL."""
        found = []
        for name, one in {"sample": self.input, "truth": self.truth, **self.predictions}.items():
            if isinstance(one, str):
                found.append((name, False, one))
            elif one is not None:
                small = one.copy()
                small.thumbnail((240, 240))
                found.append((name, True, _png(np.array(small.convert("RGB")))))
        return found


def tile_url(tile: Tile) -> str:
    """A map as a data URL: signed values as in `signed`, others on their own scale with low values transparent."""
    values, (low, high) = tile.values.numpy(), tile.range
    if tile.signed:
        return _png(signed(values))
    scaled = (values - low) / (high - low) if high > low else np.zeros_like(values)
    shown = 0.35 + 0.5 * scaled if tile.on_image else np.ones_like(scaled)
    return _png(_coloured(tile.scale, scaled, shown))


def color_bars() -> dict[str, str]:
    """The colour bar of each scale, by its name, as a data URL."""
    values = torch.linspace(-1, 1, 64)[None]
    bars = (Tile("", values, signed=signed, on_image=False) for signed in (False, True))
    return {bar.scale: tile_url(bar) for bar in bars}


def signed(values: np.ndarray) -> np.ndarray:
    """RGBA: blue below 0, red above, opacity by size, 0 transparent."""
    scaled = values / max(abs(values).max(), 1e-12)
    return _coloured(SIGNED, (scaled + 1) / 2, 0.92 * abs(scaled))


def _coloured(scale: str, values: np.ndarray, opacity: np.ndarray) -> np.ndarray:
    from matplotlib import colormaps

    return colormaps[scale](values, alpha=opacity, bytes=True)


@torch.no_grad()
def make_examples(
    trained: Mapping[str, TaskModule], data: TaskData, number: int = 4
) -> Sequence[ExampleMaps | ShownExample]:
    """Predictions of trained variants on a few test samples: as the task shows them, or images with maps."""
    images, task = getattr(data, "images", None), next(iter(trained.values()))
    if type(task).show is not TaskModule.show:
        rows: dict[str, list[Shown]] = {name: [] for name in trained}
        for batch in data.shown_batches(number):
            for name, one in trained.items():
                rows[name] += one.eval().show(batch)
        return [
            ShownExample(
                i,
                one.input,
                one.truth,
                {name: row[i].prediction for name, row in rows.items()},
                {name: color for row in rows.values() for name, color in row[i].legend.items()},
            )
            for i, one in enumerate(next(iter(rows.values()))[:number])
        ]
    if images is None:
        return []
    indices = torch.linspace(0, len(images.test) - 1, min(CANDIDATES, len(images.test))).long()
    pixels, indices = images.test.pixels(indices)
    labels = images.test.labels[indices]
    mean, std = (torch.tensor(task.data[key]).view(-1, 1, 1) for key in ("mean", "std"))
    inputs = pixels.float().div(255).sub(mean).div(std)
    answers: dict[str, Any] = {
        name: torch.cat([one.model.eval()(some) for some in inputs.split(AT_ONCE)]).softmax(-1)
        for name, one in trained.items()
    }
    right = torch.stack([a.argmax(-1) == labels for a in answers.values()])
    chosen = choose_images(right, labels, number)
    maps = dict[str, list[BlockMap]]()
    for name, one in trained.items():
        mixers = [module for module in one.model.modules() if isinstance(module, Mixer)]
        # Mixers may lack a map, or be another library's attention.
        drawable = any(mixer.capabilities.map is not None for mixer in mixers)
        maps[name] = attention_maps(one.model, inputs[chosen]) if drawable else []
    found = list[ExampleMaps]()
    for row, i in enumerate(chosen):
        said = {name: (images.classes[int(p[i].argmax())], p[i].max().item()) for name, p in answers.items()}
        tiles = {name: [tiles_of(block, row, TILES) for block in blocks] for name, blocks in maps.items()}
        found.append(ExampleMaps(Example(int(indices[i]), images.classes[int(labels[i])], said), pixels[i], tiles))
    return found


def choose_images(right: Tensor, labels: Tensor, number: int) -> list[int]:
    """Half images that all variants predict correctly, half with most disagreement, from different classes.

    Shape: right (variants, images), whether a variant's prediction is correct, and labels (images,).
    """
    share, chosen = right.float().mean(0), list[int]()
    for size, rank in (((number + 1) // 2, -share), (number, (share - 0.5).abs())):
        order = torch.argsort(rank, stable=True).tolist()
        for new_class in (True, False):
            for i in order:
                seen = {int(labels[j]) for j in chosen}
                if len(chosen) < size and i not in chosen and (int(labels[i]) not in seen or not new_class):
                    chosen.append(i)
    return chosen


def _png(pixels: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def write_report(results: Results, file: Path, examples: Sequence[ExampleMaps | ShownExample] = ()) -> Path:
    """Write report.html; `examples` are maps of test images, or samples as the task shows them.

    The page's policy allows only its own style, script and embedded images, so names in the page cannot run code.
    """
    machine, data, number = results.environment, results.data, len(results.variants)
    what = f"{number} variant{'s' if number > 1 else ''} of {results.config['model']}"
    commit = machine["commit"] or "installed package"
    maps = [example for example in examples if isinstance(example, ExampleMaps)]
    shown = [example for example in examples if isinstance(example, ShownExample)]
    return write_page(
        file,
        "report.html",
        script=_part("js"),
        title=f"{what} on {data.get('name', short_name(results.config['data']))}",
        environment=machine,
        machine=machine["gpus"][0] if results.device.startswith("cuda") and machine["gpus"] else machine["cpu"],
        finding=finding_sentence(results),
        budget=budget_sentence(results),
        notes=notes(results),
        results=results,
        variants=results.variants,
        columns=columns(results),
        table=table_of(results),
        differences=differences_of(results),
        metrics=metrics_of(results),
        several=len(results.config["seeds"]) > 1,
        marker=marker,
        curves=learning_curves(results),
        scatters=cost_charts(results),
        growth=growth_charts(results),
        bars=partial(bars, results),
        confusions=confusions(results),
        examples=maps,
        color_bars=color_bars(),
        tile_url=tile_url,
        shown=shown,
        legend={name: color for example in shown for name, color in example.legend.items()},
        repeat={
            "date": machine["date"],
            "device": results.device,
            "processor": f"{machine['cpu']}; cores: {machine['cores']}, threads: {machine['threads']}",
            "GPU": ", ".join(machine["gpus"]) or "none",
            "system": f"{machine['platform']}, Python {machine['python']}",
            "versions": ", ".join(f"{name} {version}" for name, version in machine["versions"].items()),
            "commit": f"{commit}{' with uncommitted changes' if machine['changed'] else ''}",
            "data": data.get("source", results.config["data"]),
        },
    )


def write_page(file: Path, template: str, **values: Any) -> Path:
    """Write one HTML file with the report's style from a template of this folder, which escapes the values."""
    page = _templates().get_template(template).render(style=_part("css"), **values)
    replace_file(file, page.encode())
    return file


def _templates() -> Environment:
    pages = Environment(
        loader=PackageLoader("tokenmix.lab.compare", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )

    def digest(text: str) -> str:
        return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"

    pages.filters["digest"] = digest
    return pages


def _part(kind: str) -> str:
    return files("tokenmix.lab.compare").joinpath(f"report.{kind}").read_text()


@dataclass(frozen=True, repr=False)
class ComparisonResult(os.PathLike[str]):
    """A finished comparison: its folder `path`, and results by name of each comparison of a grid, else ""."""

    path: Path
    comparisons: Mapping[str, Results]

    @property
    def results(self) -> Results:
        """Results; in a grid, those of the first comparison."""
        return next(iter(self.comparisons.values()))

    @property
    def best(self) -> Variant:
        """The variant with the best score, possibly by chance: see `results.leaders()`."""
        if not (leaders := self.results.leaders()):
            raise UserError(finding_sentence(self.results))
        return leaders[0]

    def to_pandas(self) -> "pd.DataFrame":
        """A row per run with score, times and costs; needs pandas."""
        return to_frame(
            {
                "comparison": name,
                "variant": variant.name,
                "seed": run.seed,
                results.metric: run.score,
                "status": run.status,
                "seconds": run.seconds,
                "parameters": variant.parameters,
                "macs": variant.macs,
                f"train_{results.unit}_per_second": variant.rate(results.step_batch),
                "forward_seconds": variant.forward_seconds,
                "step_memory": variant.step_memory,
                "inference_memory": variant.inference_memory,
                **run.metrics,
            }
            for name, results in self.comparisons.items()
            for variant in results.variants
            for run in variant.runs
        )

    def plot(self) -> "Figure":
        """Score over multiply-adds, with the standard deviation over seeds and lines for the baselines."""
        from matplotlib.figure import Figure

        results = self.results
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.add_subplot()
        for variant in results.variants:
            if variant.score is not None and variant.macs:
                axes.errorbar(
                    variant.macs, variant.score, yerr=variant.deviation, fmt="o", capsize=3, label=variant.name
                )
        for (name, score), style in zip(results.baselines.items(), cycle(("--", ":", "-.", "-"))):
            axes.axhline(score, color="grey", linestyle=style, linewidth=1, label=name)
        axes.set(xscale="log", xlabel="multiply-adds of one sample", ylabel=f"test {results.measure}")
        figure.legend(frameon=False, loc="outside right upper")
        return figure

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"<comparison {str(self.path)!r}: {finding_sentence(self.results)}>"

    def __str__(self) -> str:
        return "\n\n".join(
            f"{f'{name}: ' if name else ''}{finding_sentence(results)}\n\n{table_of(results).markdown()}"
            for name, results in self.comparisons.items()
        )

    def _repr_html_(self) -> str:
        shown = {name: (finding_sentence(one), table_of(one)) for name, one in self.comparisons.items()}
        return _templates().get_template("notebook.html").render(shown=shown)
