"""`make demo`: five token mixers compared within six minutes on two CPU cores, on pairs of real pictures.

The question is whether two items of Fashion-MNIST are of one class. A network that does not mix tokens can hardly tell.
"""

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenmix.errors import UserError, needs

OUT = Path("demo")
SECONDS = 180.0
"""Of training, for all variants together; measuring and the baselines take about another minute."""
# Patches of 14 pixels, for which the stem has two convolutions: external attention has 0.871 after 73,000 images in 25
# seconds of one core. With patches of 7 pixels, which have one, it has 0.848 after 72,000. No augmentation: in so few
# epochs it only slows learning (dev/LOG.md, 2026-11-21).
SHARED: dict[str, Any] = {
    "model_kwargs": {"patch_size": 14},
    "batch_size": 64,
    "lr": 2e-3,
    "augment": "none",
    "out": OUT,
}
DIGITS: dict[str, Any] = {"data": "digits", "epochs": 20, "model_kwargs": {"patch_size": 2}}
# A tenth of the training images is held out and evaluated after each epoch; the test images once, or twice if an
# earlier epoch was better.
EPOCHS, IMAGES, TEST_IMAGES, HELD_OUT = 2, 54_000, 20_000, 0.1
# A forward pass is a third of a step.
STEPS, FORWARD_SHARE = 100, 1 / 3


def main() -> int:
    """Compare on Fashion-MNIST, or on the embedded digits where it cannot be had; returns the exit code."""
    try:
        with needs("the demo"):
            from tokenmix.lab.compare.compare import compare
            from tokenmix.lab.data import fetch_data
            from tokenmix.lab.train.config import CompareConfig
        budget = DIGITS
        config = CompareConfig().replace(**SHARED)
        try:
            print(fetch_data("fashion-pairs"), file=sys.stderr)
        except UserError as reason:
            print(f"tokenmix: {reason}", file=sys.stderr)
            print("tokenmix: using scikit-learn's embedded digits (real 8 x 8 scans) instead", file=sys.stderr)
        else:
            config = config.replace(data="fashion-pairs")
            budget = _budget(config)
        compare(config=config.replace(**budget))
    except UserError as error:
        print(f"tokenmix: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"tokenmix: {stop or 'interrupted'}", file=sys.stderr)
        return 130
    return 0


def _budget(config: Any) -> dict[str, int]:
    """Epochs and images of a run, so that all variants take `SECONDS` here; those of a run begun before.

    Short runs, side by side as the runs will be, say how long an image takes.
    """
    from tokenmix.lab.compare.variants import plan_runs
    from tokenmix.lab.grid import in_processes
    from tokenmix.lab.train.folder import read_part

    if (OUT / "compare.json").is_file():
        begun = read_part(OUT, "compare.json")
        return {name: begun[name] for name in ("epochs", "limit")}
    with TemporaryDirectory() as folder:
        cells = plan_runs(config.replace(max_steps=STEPS, validation=0, limit_eval=64), Path(folder))
        jobs, alone = min(len(cells), os.cpu_count() or 1), 0.0
        for cell, wrong in in_processes(cells, jobs):
            if wrong:
                raise UserError(f"{cell.name}: {wrong}")
            result = cell.run.result
            alone += result["seconds"] / result["images"]
    image = alone / jobs
    seen = (SECONDS / image - TEST_IMAGES * FORWARD_SHARE) / (1 + HELD_OUT * FORWARD_SHARE)
    epochs = max(EPOCHS, int(seen) // IMAGES)
    limit = max(640, min(IMAGES, int(seen) // epochs))
    print(
        f"tokenmix: {len(cells)} networks, each on {limit:,} images, {epochs} times; "
        f"about {SECONDS / 60:.0f} minutes of training, at {len(cells) / image:,.0f} images a second",
        file=sys.stderr,
    )
    return {"epochs": epochs, "limit": limit}


if __name__ == "__main__":
    sys.exit(main())
