"""Whether attention maps saturate with depth: how far each block's map is from the map of the block before it.

    python -m recipes.classification.depth

The distance of `tokenmix inspect`, 1 - linear CKA, on test images: 0 if two blocks distinguish tokens in the same way.
`fall` is the mean over the first third of the blocks less that over the last third. The control is the same network
with the random weights of another seed. Writes recipes/classification/depth.json for the ledger, with the distance,
entropy and saturation of each block.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from recipes.program import run_program, write_scores
from tokenmix.errors import UserError
from tokenmix.lab.compare.statistics import covariance_of_means
from tokenmix.lab.inspect import attention_maps, map_numbers
from tokenmix.lab.train.load import load_task, make_model

RESULTS = Path(__file__).with_suffix(".json")
MEASURES = ("distance", "entropy", "saturation")


@dataclass(frozen=True)
class Args:
    """Measure the maps of the runs of compare_depth, and of networks with random weights."""

    runs: Path = Path("runs/all/compare_depth")
    """Folder of compare_depth, of which all runs are taken."""
    images: int = 64
    """Test images."""


def measured(model: nn.Module, images: torch.Tensor) -> np.ndarray:
    """The measures of each image and block: (images, blocks, measures); nan for the distance of the first block."""
    rows = [map_numbers(attention_maps(model.eval(), image[None])) for image in images]
    return np.array([[[getattr(block, name) for name in MEASURES] for block in row] for row in rows], dtype=float)


def main(args: Args) -> None:
    """The measures of all runs, and their covariance under the draw of the images."""
    variants: dict[str, dict[str, Any]] = {}
    drawn: dict[str, np.ndarray] = {}
    for run in sorted((args.runs / "runs").glob("*-seed*")):
        mixer, _, seed = run.name.rpartition("-seed")
        task: Any = load_task(run)
        data = type(task).load_data(task.config, like=task.data)
        images = next(iter(data.test_batches(batch_size=args.images)))["image"]
        torch.manual_seed(100 + int(seed))
        for name, model in ((mixer, task.model), (f"{mixer}-random", make_model(task.config, task.data))):
            found = measured(model, images)
            third = found.shape[1] // 3
            variant = variants.setdefault(name, {"name": f"{name}-fall", "runs": []})
            folder = f"{name}-seed{seed}"
            drawn[folder] = found[:, 1 : 1 + third, 0].mean(1) - found[:, -third:, 0].mean(1)
            variant["runs"].append({"seed": int(seed), "folder": folder, "score": float(drawn[folder].mean())})
            curves = dict(zip(MEASURES, found.mean(0).T.round(4).tolist()))
            variant["blocks"] = [*variant.get("blocks", []), {**curves, "distance": curves["distance"][1:]}]
            print(f"{name}, seed {seed}: {curves}", flush=True)
    if not drawn:
        raise UserError(f"no runs in {args.runs}; run compare_depth first")
    covariance = covariance_of_means(np.stack([*drawn.values()]))
    write_scores(
        RESULTS,
        [*variants.values()],
        [{"samples": args.images, "unit": "images", "runs": [*drawn], "covariance": covariance}],
        kept={run: falls.astype(np.float32) for run, falls in drawn.items()},
        metric="fall of distance",
        note="runs of `compare_depth`; `python -m recipes.classification.depth`",
    )


if __name__ == "__main__":
    run_program(main, Args)
