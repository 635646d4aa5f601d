"""How far simple features go on LDraw's clouds: random forests on shape statistics, and on a point's surroundings.

A trained model that is not better than this has earned no claim. `python -m recipes.points.points_base`, two minutes.
"""

import argparse

import numpy as np
from scipy.spatial import cKDTree
from sklearn.ensemble import RandomForestClassifier
from sklearn.metrics import balanced_accuracy_score, confusion_matrix

from tokenmix.lab.tasks.points.data import PackedClouds, load_points

BINS = 8
NEIGHBOURS = 16
TRAIN_POINTS, TEST_POINTS = 32, 128


def shape_features(points: np.ndarray, normals: np.ndarray) -> np.ndarray:
    """Proportions, spread along the axes, histograms of coordinates, normals and distances between points."""
    extent = np.ptp(points, axis=0)
    spread = np.sqrt(np.linalg.eigvalsh(np.cov(points.T)).clip(0))
    half = len(points) // 2
    apart = np.linalg.norm(points[:half] - points[half : 2 * half], axis=1)
    histograms = [np.histogram(points[:, axis], BINS, (-1, 1))[0] for axis in range(3)]
    histograms += [np.histogram(normals[:, axis], BINS, (-1, 1))[0] for axis in range(3)]
    histograms += [np.histogram(apart, BINS, (0, 2))[0], np.histogram(np.linalg.norm(points, axis=1), BINS, (0, 1))[0]]
    return np.concatenate([extent, np.sort(extent), spread, np.concatenate(histograms) / len(points)])


def point_features(points: np.ndarray, normals: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Place, normal, place in the bounding box, and flatness and distance of the nearest neighbours."""
    low, extent = points.min(0), np.ptp(points, axis=0)
    distance, near = cKDTree(points).query(points[chosen], NEIGHBOURS)
    around = points[near] - points[near].mean(1, keepdims=True)
    spread = np.sqrt(np.linalg.eigvalsh(np.einsum("nki,nkj->nij", around, around) / NEIGHBOURS).clip(0))
    agree = np.einsum("nki,ni->nk", normals[near], normals[chosen])
    parts = [points[chosen], normals[chosen], (points[chosen] - low) / np.maximum(extent, 1e-6), spread]
    parts += [distance[:, -1:], agree.mean(1, keepdims=True), np.broadcast_to(extent, (len(chosen), 3))]
    return np.concatenate(parts, axis=1).astype(np.float32)


def classify(trees: int) -> None:
    """Accuracy over categories, and balanced over them."""
    data = load_points("ldraw", want="class")

    def table(clouds: PackedClouds) -> np.ndarray:
        rows = []
        for index in range(len(clouds)):
            cloud = clouds.cloud(index)
            assert cloud.normals is not None
            rows.append(shape_features(cloud.points.numpy(), cloud.normals.numpy()))
        return np.stack(rows)

    forest = RandomForestClassifier(trees, random_state=0, n_jobs=-1).fit(table(data.train), data.train.labels.numpy())
    truth, found = data.test.labels.numpy(), forest.predict(table(data.test))
    print(f"classes: {len(data.train)} + {len(data.test)} clouds, {len(data.classes)} classes")
    print(
        f"accuracy {(truth == found).mean():.3f}, balanced {balanced_accuracy_score(truth, found):.3f}, "
        f"largest class {np.bincount(truth).max() / len(truth):.3f}"
    )


def segment(trees: int) -> None:
    """Intersection over union of each kind of surface over the points of all test clouds, and their mean."""
    data = load_points("ldraw", want="parts")

    def table(clouds: PackedClouds, count: int) -> tuple[np.ndarray, np.ndarray]:
        features, parts = [], []
        for index in range(len(clouds)):
            cloud = clouds.cloud(index)
            assert cloud.normals is not None
            assert cloud.parts is not None
            chosen = np.random.default_rng(index).choice(len(cloud.points), count, replace=False)
            features.append(point_features(cloud.points.numpy(), cloud.normals.numpy(), chosen))
            parts.append(cloud.parts.numpy()[chosen])
        return np.concatenate(features), np.concatenate(parts)

    forest = RandomForestClassifier(trees, min_samples_leaf=5, random_state=0, n_jobs=-1).fit(
        *table(data.train, TRAIN_POINTS)
    )
    features, truth = table(data.test, TEST_POINTS)
    matrix = confusion_matrix(truth, forest.predict(features), labels=range(len(data.part_names)))
    iou = matrix.diagonal() / (matrix.sum(0) + matrix.sum(1) - matrix.diagonal())
    print(f"parts: {len(data.train)} + {len(data.test)} clouds, {TRAIN_POINTS} and {TEST_POINTS} points of each")
    print(", ".join(f"{name} {share:.3f}" for name, share in zip(data.part_names, iou)), f"mean {iou.mean():.3f}")
    print(f"accuracy of points {matrix.trace() / matrix.sum():.3f}, body {matrix.sum(1)[0] / matrix.sum():.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trees", type=int, default=40)
    arguments = parser.parse_args()
    classify(5 * arguments.trees)
    segment(arguments.trees)
