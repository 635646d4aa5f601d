"""Whether a memory slot means the same in all pictures: what it tells of the class, over all test tiles.

    python -m recipes.segmentation.slots

Each position of a tile gets the slot with the largest weight. A score is the mutual information of slot and class, over
the entropy of the class. Two controls are k-means clusters of the features that the memory compares with its slots, as
many as the exponential of the entropy of the slots: `clusters` of the training tiles, and `own-clusters` of each test
tile alone, whose numbers mean nothing in the next. Writes recipes/segmentation/slots.json for the ledger.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from sklearn.cluster import KMeans

from recipes.program import run_program, write_scores
from tokenmix.errors import UserError
from tokenmix.lab.compare.statistics import covariance_of_resamples, resample
from tokenmix.lab.data.scenes import PixelSamples, load_scenes
from tokenmix.lab.train.load import load_task

RESULTS = Path(__file__).with_suffix(".json")
NETWORKS = {"double": "external-S64", "softmax": "external-softmax-S64"}
POINTS = 2500
"""Positions of a tile that k-means sees."""
Array = NDArray[Any]


@dataclass(frozen=True)
class Args:
    """Read the slots of the segmenters of compare_climates, and write what they tell."""

    runs: Path = Path("runs/all/compare_climates")
    """Folder of compare_climates, of which all seeds are taken."""


def read_tiles(task: Any, samples: PixelSamples) -> tuple[list[Array], list[Array], list[Array]]:
    """Slots (N,), features (N, D) and classes (N,) of each tile; positions without a class are left out."""
    model, found = task.model, []
    for i in range(len(samples)):
        batch = samples.read(torch.tensor([i]), 0)
        with torch.no_grad():
            x = model.before_context(model.forward_features(batch["image"]))
            slots = model.context.attention_map(x)[0, 0].argmax(-1)
            features = model.context.conv1(x)[0].flatten(1).T
        classes = F.interpolate(batch["classes"][None].float(), size=x.shape[2:], mode="nearest").long().flatten()
        known = classes != samples.ignore
        found.append([one[known].numpy() for one in (slots, features, classes)])
    slots, features, classes = map(list, zip(*found))
    return slots, features, classes


def entropy(counts: Array, axis: int | tuple[int, ...]) -> Array:
    """In nats, of the distributions that counts give along `axis`."""
    p = counts / counts.sum(axis, keepdims=True).clip(1)
    return -(p * np.log(p.clip(1e-300))).sum(axis)


def told(tables: Array) -> Array:
    """Share of the entropy of the class that the label tells, from counts (..., labels, classes)."""
    classes = entropy(tables.sum(-2), -1)
    both = entropy(tables, (-2, -1))
    return (classes + entropy(tables.sum(-1), -1) - both) / np.where(classes > 0, classes, 1)


def tables_of(labels: Sequence[Array], classes: Sequence[Array]) -> Array:
    """Counts (tiles, labels, classes)."""
    shape = len(labels), max(one.max() for one in labels) + 1, max(one.max() for one in classes) + 1
    tables = np.zeros(shape)
    for table, *pair in zip(tables, labels, classes):
        np.add.at(table, tuple(pair), 1)
    return tables


def labelled(run: Path, seed: int) -> dict[str, Array]:
    """Counts of slots and of both controls on the test tiles."""
    task: Any = load_task(run)
    task.eval()
    data = load_scenes(task.config.data.data, want="classes")
    seen, learned, _ = read_tiles(task, PixelSamples(data, data.train))
    slots, features, classes = read_tiles(task, PixelSamples(data, data.test))
    number = round(np.exp(entropy(np.bincount(np.concatenate(seen)), 0)))
    means, rng = KMeans(number, n_init=1, random_state=seed), np.random.default_rng(seed)

    def some(of: Array) -> Array:
        return rng.choice(of, min(POINTS, len(of)), replace=False)

    own = [means.fit(some(one)).predict(one) for one in features]
    means.fit(np.concatenate([some(one) for one in learned]))
    labels = {"slots": slots, "clusters": [means.predict(one) for one in features], "own-clusters": own}
    return {name: tables_of(one, classes) for name, one in labels.items()}


def main(args: Args) -> None:
    """The scores of all runs, and their covariance under the draw of the tiles of each part of the map."""
    variants: dict[str, list[dict[str, Any]]] = {}
    samplings: list[dict[str, Any]] = []
    kept: dict[str, Array] = {}
    for part in sorted(args.runs.glob("*/runs")):
        drawn: dict[str, Array] = {}
        for network, variant in NETWORKS.items():
            for run in sorted(part.glob(f"{variant}-seed*")):
                seed = int(run.name.rpartition("seed")[2])
                for label, tables in labelled(run, seed).items():
                    name = f"{network}-{label}"
                    folder, score = f"{part.parent.name}/{name}-seed{seed}", float(told(tables.sum(0)))
                    kept[folder] = tables.astype(np.int32)
                    variants.setdefault(name, []).append({"seed": seed, "folder": folder, "score": score})
                    counts = np.concatenate([*resample(len(tables))])
                    drawn[folder] = told(np.einsum("rt,tlc->rlc", counts, tables))
                    number = len(tables)
                    print(f"{folder}: {score:.3f}", flush=True)
        if drawn:
            covariance = covariance_of_resamples(np.stack([*drawn.values()]), number)
            samplings.append({"samples": number, "unit": "images", "runs": [*drawn], "covariance": covariance})
    if not samplings:
        raise UserError(f"no runs in {args.runs}; run compare_climates first")
    write_scores(
        RESULTS,
        [{"name": name, "runs": runs} for name, runs in variants.items()],
        samplings,
        kept=kept,
        metric="share of the class's entropy",
        note="segmenters of `compare_climates`; `python -m recipes.segmentation.slots`",
    )


if __name__ == "__main__":
    run_program(main, Args)
