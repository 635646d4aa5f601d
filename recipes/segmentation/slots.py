"""Whether a memory slot means the same in all pictures: what it tells of the class, within a test tile and over all.

    python -m recipes.segmentation.slots --runs runs/all/compare_climates

Each position of a tile gets the slot with the largest weight. A score is the mutual information of slot and class, over
the entropy of the class. `slots` counts over all tiles at once; `slots-within` counts in each tile alone, where a slot
may mean something else than in the next. Two controls are k-means clusters of the features that the memory compares
with its slots, as many as the exponential of the entropy of the slots: `clusters` of all tiles, and `own-clusters` of
each tile alone, whose numbers mean nothing in the next. Writes recipes/segmentation/slots.json for the ledger.
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
from tokenmix.lab.train.load import load_task

RESULTS = Path(__file__).with_suffix(".json")
NETWORKS = {"double": "external-S64", "softmax": "external-softmax-S64"}
POINTS = 2500
"""Positions of a tile that k-means sees."""
Array = NDArray[Any]


@dataclass(frozen=True)
class Args:
    """Read the slots of the segmenters of compare_climates, and write what they tell."""

    runs: Path
    """Folder of compare_climates, of which all seeds are taken."""


def read_tiles(run: Path) -> tuple[list[Array], list[Array], list[Array]]:
    """Slots (N,), features (N, D) and classes (N,) of each test tile; positions without a class are left out."""
    task: Any = load_task(run)
    task.eval()
    model, found = task.model, []
    for batch in type(task).load_data(task.config, like=task.data).test_batches(batch_size=1):
        with torch.no_grad():
            x = model.before_context(model.forward_features(batch["image"]))
            slots = model.context.attention_map(x)[0, 0].argmax(-1)
            features = model.context.conv1(x)[0].flatten(1).T
        classes = F.interpolate(batch["classes"][None].float(), size=x.shape[2:], mode="nearest").long().flatten()
        known = classes != task.data["ignore"]
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


def told_within(tables: Array) -> Array:
    """The same from each tile's counts (..., tiles, labels, classes), weighted by the entropy of all its classes."""
    weights = tables.sum((-2, -1)) * entropy(tables.sum(-2), -1)
    return (weights * told(tables)).sum(-1) / weights.sum(-1)


def tables_of(labels: Sequence[Array], classes: Sequence[Array]) -> Array:
    """Counts (tiles, labels, classes)."""
    shape = len(labels), max(one.max() for one in labels) + 1, max(one.max() for one in classes) + 1
    tables = np.zeros(shape)
    for table, *pair in zip(tables, labels, classes):
        np.add.at(table, tuple(pair), 1)
    return tables


def labelled(run: Path, seed: int) -> dict[str, Array]:
    """Counts of slots and of both controls."""
    slots, features, classes = read_tiles(run)
    tables = tables_of(slots, classes)
    means = KMeans(round(np.exp(entropy(tables.sum((0, 2)), 0))), n_init=1, random_state=seed)
    rng = np.random.default_rng(seed)
    some = [rng.choice(one, min(POINTS, len(one)), replace=False) for one in features]
    own = [means.fit(few).predict(every) for few, every in zip(some, features)]
    means.fit(np.concatenate(some))
    clusters = [means.predict(every) for every in features]
    return {"slots": tables, "clusters": tables_of(clusters, classes), "own-clusters": tables_of(own, classes)}


def main(args: Args) -> None:
    """The scores of all runs, and their covariance under the draw of the tiles."""
    variants: dict[str, list[dict[str, Any]]] = {}
    drawn: dict[str, Array] = {}
    for network, variant in NETWORKS.items():
        for run in sorted((args.runs / "runs").glob(f"{variant}-seed*")):
            seed = int(run.name.rpartition("seed")[2])
            for label, tables in labelled(run, seed).items():
                counts = np.concatenate([*resample(len(tables))])
                pooled = np.einsum("rt,tlc->rlc", counts, tables)
                within = counts[..., None, None] * tables
                for name, score, scores in (
                    (f"{network}-{label}", told(tables.sum(0)), told(pooled)),
                    (f"{network}-{label}-within", told_within(tables), told_within(within)),
                ):
                    folder = f"{name}-seed{seed}"
                    variants.setdefault(name, []).append({"seed": seed, "folder": folder, "score": float(score)})
                    drawn[folder] = scores
                    print(f"{folder}: {score:.3f}", flush=True)
    if not drawn:
        raise UserError(f"no runs in {args.runs}; run compare_climates first")
    write_scores(
        RESULTS,
        [{"name": name, "runs": runs} for name, runs in variants.items()],
        {"samples": len(tables), "unit": "images", "runs": [*drawn]},
        covariance_of_resamples(np.stack([*drawn.values()]), len(tables)),
        metric="share of the class's entropy",
        note="segmenters of `compare_climates`; `python -m recipes.segmentation.slots`",
    )


if __name__ == "__main__":
    run_program(main, Args)
