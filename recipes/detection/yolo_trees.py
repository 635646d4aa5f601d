"""Does a block with a token mixer pay in YOLO11? None, block, control and next size on tree crowns, over seeds.

    python -m recipes.detection.yolo_trees [--out runs/yolo] [--seeds 0,1,2,3,4]

It needs Ultralytics (AGPL-3.0), which is not installed with tokenmix. Each row is trained from scratch on tiles of one
photograph and measured on tiles of the other places, by its last weights. Finished runs are kept, so the same command
goes on where it stopped. Writes recipes/detection/yolo_trees.json.
"""

import importlib
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from recipes.datasets.images.trees import load_trees
from recipes.program import run_program
from tokenmix.files import replacing
from tokenmix.lab.data.lookup import DataRequest
from tokenmix.lab.train.config import Numbers
from tokenmix.lab.train.schema import Names
from tokenmix.swap.ultralytics import register

HERE = Path(__file__).parent
# Scale, and the mixer of a block behind the stage of stride 8.
ROWS: dict[str, tuple[str, str | None]] = {
    "none": ("n", None),
    "external": ("n", "external"),
    "depthwise-2d": ("n", "depthwise-2d"),
    "next-size": ("s", None),
}
AFTER = 4
SETTINGS: dict[str, Any] = {
    "imgsz": 128,
    "epochs": 40,
    "batch": 8,
    "optimizer": "AdamW",
    "lr0": 2e-3,
    "close_mosaic": 10,
    "device": "cpu",
    "workers": 0,
    "amp": False,
    "val": False,
    "plots": False,
    "verbose": False,
    "exist_ok": True,
    "deterministic": True,
}


@dataclass(frozen=True)
class Args:
    """Train what is not yet trained, then write the table."""

    out: Path = Path("runs/yolo")
    """Folder of the runs."""
    seeds: Numbers = (0, 1, 2, 3, 4)
    """Seeds, separated by commas."""
    rows: Names = tuple(ROWS)
    """Rows, separated by commas."""


def write_tiles(folder: Path) -> Path:
    """Tiles of 256 px and their boxes in Ultralytics' layout; the file that names them."""
    data = load_trees(DataRequest("trees", "256", "detection"))
    for part, scenes in (("train", data.train), ("val", data.test)):
        for kind in ("images", "labels"):
            (folder / kind / part).mkdir(parents=True, exist_ok=True)
        for i in range(len(scenes)):
            scene = scenes.scene(i)
            height, width = scene.image.shape[1:]
            Image.fromarray(scene.image.permute(1, 2, 0).numpy()).save(folder / "images" / part / f"{i}.png")
            boxes = scene.objects.boxes / torch.tensor([width, height, width, height])
            centres = torch.cat([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]], 1)
            lines = ["0 " + " ".join(f"{v:.6f}" for v in box) for box in centres.tolist()]
            (folder / "labels" / part / f"{i}.txt").write_text("\n".join(lines) + "\n")
    file = folder / "data.yaml"
    file.write_text(f"path: {folder.resolve()}\ntrain: images/train\nval: images/val\nnames: {{0: tree}}\n")
    return file


def write_model(folder: Path, scale: str, mixer: str | None) -> Path:
    """YOLO11 of a scale for one class, with a block behind row `AFTER`: later rows and their sources move by one."""
    tasks: Any = importlib.import_module("ultralytics.nn.tasks")
    root = Path(importlib.import_module("ultralytics").__file__ or "").parent
    model = tasks.yaml_model_load(str(root / "cfg" / "models" / "11" / "yolo11.yaml"))
    model["nc"] = 1
    if mixer:
        rows = [*model["backbone"], *model["head"]]
        for row in rows[AFTER + 1 :]:
            sources = row[0] if isinstance(row[0], list) else [row[0]]
            moved = [source + 1 if source > AFTER else source for source in sources]
            row[0] = moved if isinstance(row[0], list) else moved[0]
        model["backbone"].insert(AFTER + 1, [-1, 1, "TokenMix", ["ch", "f", mixer.replace("-", "_")]])
    # Ultralytics reads the scale from the file's name.
    file = folder / f"yolo11{scale}-{mixer or 'none'}.yaml"
    file.write_text(json.dumps({name: model[name] for name in ("nc", "scales", "backbone", "head")}))
    return file


def train_one(args: Args, data: Path, name: str, seed: int) -> dict[str, float]:
    """What a row scores with a seed, trained now if need be."""
    result = args.out / f"{name}-{seed}.json"
    if result.exists():
        return json.loads(result.read_text())
    yolo = importlib.import_module("ultralytics").YOLO(str(write_model(args.out, *ROWS[name])))
    began = time.process_time()
    settings = {**SETTINGS, "project": str(args.out.resolve()), "name": result.stem}
    yolo.train(data=str(data), seed=seed, **settings)
    seconds = time.process_time() - began
    # A new object, for the one that trained keeps what it selected.
    last = importlib.import_module("ultralytics").YOLO(str(args.out / result.stem / "weights" / "last.pt"))
    box = last.val(data=str(data), imgsz=SETTINGS["imgsz"], device="cpu", workers=0, plots=False, verbose=False).box
    net = last.model.fuse().eval()
    picture = torch.rand(1, 3, SETTINGS["imgsz"], SETTINGS["imgsz"])
    rounds = []
    with torch.inference_mode():
        for _ in range(40):
            start = time.process_time()
            net(picture)
            rounds.append(1000 * (time.process_time() - start))
    found = {
        "map": float(box.map),
        "map_50": float(box.map50),
        "parameters": sum(p.numel() for p in net.parameters()),
        "milliseconds": statistics.median(rounds[10:]),
        "seconds": seconds,
    }
    with replacing(result) as file:
        file.write_text(json.dumps(found))
    return found


def main(args: Args) -> None:
    """All rows of a seed before the next seed, so that what is there when time ends can be compared."""
    torch.set_num_threads(1)
    register()
    args.out.mkdir(parents=True, exist_ok=True)
    data = write_tiles(args.out / "tiles")
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in args.rows}
    for seed in args.seeds:
        for name in args.rows:
            runs[name].append(train_one(args, data, name, seed))
        with replacing(HERE / "yolo_trees.json") as file:
            file.write_text(
                json.dumps({"settings": SETTINGS, "seeds": list(args.seeds), "runs": runs}, indent=1) + "\n"
            )
        for name, found in runs.items():
            for metric in ("map", "map_50"):
                values = [run[metric] for run in found]
                spread = statistics.stdev(values) if len(values) > 1 else float("nan")
                print(f"{name:14} {metric:8} {statistics.mean(values):.4f} +- {spread:.4f}")


if __name__ == "__main__":
    run_program(main, Args)
