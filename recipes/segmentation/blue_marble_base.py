"""The base of segmentation on Blue Marble: a random forest on the colour of a pixel, and with what is around it.

A network that does not beat it has earned no claim. Learnt from pixels of the training tiles, tested on pixels of the
test tiles; what is around a pixel ends with its tile, as it does for a network.

    python -m recipes.segmentation.blue_marble_base --data blue-marble:64 blue-marble:450 \\
        --out recipes/segmentation/blue_marble_base.json
"""

import argparse
import json
from pathlib import Path

import numpy as np
from scipy.ndimage import uniform_filter
from sklearn.ensemble import RandomForestClassifier

from tokenmix.lab.data.scenes import Scenes, load_scenes

WINDOWS = {"color": (), "context": (9, 33)}
LEARNT, TESTED = 100_000, 200_000


def tiles(scenes: Scenes) -> tuple[np.ndarray, np.ndarray]:
    """Images float32 (N, H, W, 3) and classes (N, H, W)."""
    read = [scenes.scene(i) for i in range(len(scenes))]
    images = np.stack([s.image.permute(1, 2, 0).numpy() for s in read]).astype(np.float32)
    return images, np.stack([s.classes.numpy() for s in read if s.classes is not None])


def features(images: np.ndarray, windows: tuple[int, ...]) -> np.ndarray:
    """Colours, and mean and deviation of each channel in square windows: (N, H, W, 3 + 6 for each window)."""
    parts = [images]
    for side in windows:
        mean = uniform_filter(images, (1, side, side, 1), mode="nearest")
        square = uniform_filter(images**2, (1, side, side, 1), mode="nearest")
        parts += [mean, np.sqrt(np.maximum(square - mean**2, 0))]
    return np.concatenate(parts, -1)


def measure(spec: str, windows: tuple[int, ...], seed: int) -> dict[str, object]:
    """Accuracy, mean IoU and the IoU of each class on the test tiles."""
    data = load_scenes(spec, want="classes")
    images, classes = tiles(data.train)
    chosen = np.random.default_rng(seed).choice(classes.size, LEARNT, replace=False)
    inputs = features(images, windows)
    forest = RandomForestClassifier(100, min_samples_leaf=5, random_state=seed)
    forest.fit(inputs.reshape(-1, inputs.shape[-1])[chosen], classes.flat[chosen])
    images, classes = tiles(data.test)
    chosen = np.random.default_rng(0).choice(classes.size, TESTED, replace=False)
    inputs = features(images, windows)
    predicted = forest.predict(inputs.reshape(-1, inputs.shape[-1])[chosen])
    table = np.zeros((len(data.classes),) * 2)
    np.add.at(table, (classes.flat[chosen], predicted), 1)
    iou = np.diag(table) / (table.sum(0) + table.sum(1) - np.diag(table))
    return {
        "data": spec,
        "windows": list(windows),
        "accuracy": round(float(np.trace(table) / table.sum()), 4),
        "miou": round(float(iou.mean()), 4),
        "iou": dict(zip(data.classes, iou.round(3).tolist())),
    }


def main() -> None:
    """Both bases on each of the sets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", nargs="+", default=["blue-marble:64"])
    args = parser.parse_args()
    rows = [
        {"features": name, **measure(spec, windows, args.seed)}
        for spec in args.data
        for name, windows in WINDOWS.items()
    ]
    text = json.dumps({"seed": args.seed, "learnt_pixels": LEARNT, "tested_pixels": TESTED, "rows": rows}, indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
