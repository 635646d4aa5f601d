"""Climates of Blue Marble, one backbone and four heads: none, self-attention, external attention normalised two ways.

    python -m recipes.segmentation.segmentation_nano [--out runs/segmentation] [--seeds 0,1,2]

Equal budget, held-out longitudes; mean IoU, time, memory; then memory and time of the blocks alone from 64 x 64 to
512 x 512 places. Finished runs and measurements are kept, so the same command goes on where it stopped. Writes
recipes/segmentation/segmentation_nano.json and .md, and docs/images/segmentation_answers.png and segmentation_cost.png.
"""

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch.nn.functional import cross_entropy

from recipes.over_seeds import commits, over_seeds, read_result, shown
from recipes.program import run_program
from recipes.small_pictures import save_small
from tokenmix.environment import environment
from tokenmix.lab.data.scenes import Scenes, load_scenes
from tokenmix.lab.train.config import Numbers
from tokenmix.lab.train.finish import finish_run
from tokenmix.lab.train.load import load_task
from tokenmix.lab.train.run import evaluate
from tokenmix.lab.train.sources import make_config
from tokenmix.layers import ExternalAttention2d
from tokenmix.layers.base import Mixer
from tokenmix.models import create_model
from tokenmix.models.context import SelfAttention2d
from tokenmix.profiling.memory import peak_memory
from tokenmix.profiling.speed import time_interleaved

HERE = Path(__file__).parent
IMAGES = HERE.parents[1] / "docs" / "images"
BACKBONE = {"layers": (1, 1, 1, 1), "channels": (16, 24, 32, 64)}
NETWORK: dict[str, Any] = {"backbone": "resnet18", "backbone_kwargs": BACKBONE, "stem": "small", "output_stride": 4}
# Small crops from anywhere in large tiles: what is learnt from larger ones, or from tiles as they lie, is the map of
# the training longitudes (dev/LOG.md).
CROP, TILE = 112, 450
SCALES = (0.5, 0.7, 1.0)
SHARED: dict[str, Any] = {
    "task": "semantic-segmentation",
    "model": "eanet_seg_nano",
    "data": f"blue-marble:{TILE}",
    "batch_size": 16,
    "epochs": 5,
    "lr": 4e-3,
    "ema": 0.99,
    "precision": "bf16-mixed",
    "threads": 1,
    "device": "cpu",
    "log_every": 1000,
    "checkpoint_every": 100_000,
    "weight_decay": 0.5,
    "crop": CROP,
    "crops": 48,
    "train_scales": SCALES,
    "mirror": "yes",
    "iou_loss": 1.0,
}
LOOKS: dict[str, dict[str, Any]] = {
    "windows of 300": {"way": "sliding", "window": 300, "stride": 100},
    "whole tiles": {"way": "whole"},
    f"windows of {CROP}": {"way": "sliding", "window": CROP, "stride": CROP // 2},
}
"""How the test tiles are looked at; the first is what tables and pictures show."""
HEADS: dict[str, dict[str, Any]] = {
    "none": {"mixer": "none"},
    "self": {"mixer": "self"},
    "external, softmax, S 64": {"normalization": "softmax", "num_slots": 64},
    **{f"external, double, S {slots}": {"num_slots": slots} for slots in (8, 32, 64, 256)},
}
BASE = {"miou": 0.5617, "accuracy": 0.8896}
"""A random forest on colours with their surroundings, on the same tiles: recipes/segmentation/blue_marble_base.json."""
WIDTH = 64
ROWS = 4
SIDES = (64, 128, 256, 512)
CHUNK = 4096
# Self-attention at 512 x 512 would take sixteen times as long as at 256 x 256.
LONGEST = 30.0


@dataclass(frozen=True)
class Args:
    """Train what is not yet trained, then write the tables and pictures."""

    out: Path = Path("runs/segmentation")
    """Folder of the run folders."""
    seeds: Numbers = (0, 1, 2)
    """Seeds, separated by commas."""
    quick: bool = False
    """A few steps of everything, to see that it runs; nothing is written beside the runs."""


def one_run(args: Args, head: str, seed: int) -> dict[str, Any]:
    """The result of one run, trained now if need be."""
    folder = args.out / f"{head.replace(', ', '-').replace(' ', '')}-{seed}"
    less = {"max_steps": 3, "epochs": 1, "limit_eval": 3} if args.quick else {}
    settings = {**SHARED, "model_kwargs": {**NETWORK, **HEADS[head]}, **less}
    finish_run(make_config(out=folder, seed=seed, **settings), quiet=True)
    result = read_result(folder)
    scores = ", ".join(f"{look} {looked(folder, look)['miou']:.4f}" for look in LOOKS)
    print(head, seed, scores, f"{result['seconds']:.0f} s", flush=True)
    return {**result, "folder": str(folder)}


def looked(run: Path, look: str) -> dict[str, Any]:
    """What a run scores after its last epoch if it looks at tiles in this way."""
    file = run / f"{look.replace(' ', '-')}.json"
    if not file.exists():
        state = torch.load(run / "checkpoints" / "last" / "state.pt", weights_only=True)

        def last(task: Any, _: object) -> None:
            task.model.load_state_dict(state["average"])

        found = evaluate(run, device="cpu", options=LOOKS[look], change=last)
        scores = {"miou": found["miou"], "accuracy": found["accuracy"], "class_iou": list(found["class_iou"].values())}
        file.write_text(json.dumps(scores))
    return json.loads(file.read_text())


def summarise(head: str, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean and spread over seeds after the last epoch, in each way of looking, and what the model costs."""
    looks = {}
    for look in LOOKS:
        scores = [looked(Path(result["folder"]), look) for result in results]
        looks[look] = {
            "miou": over_seeds([one["miou"] for one in scores]),
            "accuracy": over_seeds([one["accuracy"] for one in scores]),
            "class_iou": [
                statistics.mean(values) for values in zip(*(one["class_iou"] for one in scores), strict=True)
            ],
        }
    return {
        "head": head,
        "looks": looks,
        "parameters": results[0]["parameters"],
        "macs": results[0]["macs"],
        "images": results[0]["images"],
        "step_bytes": step_bytes(head),
        "commits": commits(results),
    }


def step_bytes(head: str) -> int:
    """Peak memory of a training step on a batch of tiles."""
    model = create_model(SHARED["model"], num_classes=7, img_size=CROP, **NETWORK, **HEADS[head])
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randn(SHARED["batch_size"], 3, CROP, CROP)
    classes = torch.randint(7, (SHARED["batch_size"], CROP, CROP))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(images)
        cross_entropy(logits.float(), classes).backward()

    step()
    return peak_memory(step, "cpu")


def blocks() -> dict[str, Mixer]:
    """The blocks that are measured alone, each `WIDTH` wide."""
    return {
        "self": SelfAttention2d(WIDTH),
        "external, all at once": ExternalAttention2d(WIDTH),
        f"external, chunks of {CHUNK}": ExternalAttention2d(WIDTH, chunk_size=CHUNK),
    }


def cost(block: Mixer, side: int) -> dict[str, Any]:
    """Multiply-adds, seconds and peak memory of a forward pass on a map of side x side places."""
    x = torch.randn(1, WIDTH, side, side)
    with torch.no_grad():
        peak = peak_memory(lambda: block(x), "cpu")
        started = time.perf_counter()
        block(x)
        # The first call of the measurement above has warmed up; a call of many seconds needs no second one.
        seconds = time.perf_counter() - started
        if seconds < 2:
            seconds = time_interleaved({"block": lambda: block(x)}, repeats=5)["block"].median
    return {"side": side, "macs": block.macs(side**2), "seconds": seconds, "bytes": peak}


def costs(args: Args) -> dict[str, list[dict[str, Any]]]:
    """Of each block on growing maps, until one would take too long."""
    file = args.out / "costs.json"
    if file.exists():
        return json.loads(file.read_text())
    found: dict[str, list[dict[str, Any]]] = {}
    for name, block in blocks().items():
        rows = found.setdefault(name, [])
        for side in SIDES[:2] if args.quick else SIDES:
            if rows and rows[-1]["seconds"] * 16 > LONGEST and name == "self":
                break
            rows.append(cost(block.eval(), side))
            print(name, rows[-1], flush=True)
    file.write_text(json.dumps(found))
    return found


def markdown(found: Mapping[str, Any], command: str) -> str:
    """The findings as tables."""
    first, *others = LOOKS
    lines = [
        f"Made by `{command}` on {environment()['cpu']}, one thread, bf16; after the last epoch, mean ± sample",
        f"standard deviation over the seeds. Every head sees the same {found['heads'][0]['images']:,} crops of "
        f"{CROP} px in",
        f"the same order, out of tiles scaled by {', '.join(map(str, SCALES))}, and learns cross-entropy with the "
        "soft IoU beside it. It",
        f"answers tiles of {TILE} px on longitudes that it never saw, as they are and mirrored: in windows of 300 px",
        f"every 100 px, whole, and in windows of {CROP} px, as large as the crops, every {CROP // 2} px.",
        "A random forest on colours and their surroundings",
        f"(`recipes/segmentation/blue_marble_base.py`) has a mean IoU of {BASE['miou']} and an accuracy of "
        f"{BASE['accuracy']} on",
        "these tiles; the mark to beat was 0.59.",
        f"Memory is the peak of a training step of {SHARED['batch_size']} crops beyond weights and input.",
        "",
        f"| head | mean IoU, {first} | accuracy | mean IoU, {' | mean IoU, '.join(others)} "
        "| parameters | MACs / crop | peak memory |",
        f"|---|---:|---:|{'---:|' * len(others)}---:|---:|---:|",
        *(_head_row(row) for row in found["heads"]),
        "",
        f"| IoU of a class, {first} | {' | '.join(found['classes'])} |",
        f"|---|{'---:|' * len(found['classes'])}",
        *(
            f"| {row['head']} | {' | '.join(f'{value:.3f}' for value in row['looks'][first]['class_iou'])} |"
            for row in found["heads"]
        ),
        "",
        f"One block of {WIDTH} channels on one map, forward, float32, {found['threads']} thread; the median of five",
        "calls, or one call where it takes more than two seconds. Self-attention is PyTorch's fused kernel, which",
        "never writes its map of N x N; that map would take the bytes in brackets.",
        "",
        "| block | places | MACs | seconds | peak beyond the input |",
        "|---|---:|---:|---:|---:|",
        *(_cost_row(name, row) for name, rows in found["costs"].items() for row in rows),
    ]
    return "\n".join(lines) + "\n"


def _head_row(row: Mapping[str, Any]) -> str:
    first, *others = (shown(look["miou"], 3) for look in row["looks"].values())
    accuracy = shown(next(iter(row["looks"].values()))["accuracy"], 3)
    return (
        f"| {row['head']} | {' | '.join([first, accuracy, *others])} | {row['parameters']:,} "
        f"| {row['macs'] / 1e6:.1f} M | {row['step_bytes'] / 2**20:.0f} MiB |"
    )


def _cost_row(name: str, row: Mapping[str, Any]) -> str:
    places = row["side"] ** 2
    written = f" ({4 * places**2 / 2**30:,.2g} GiB)" if name == "self" else ""
    return (
        f"| {name} | {row['side']} x {row['side']} | {row['macs'] / 1e9:.2f} G | {row['seconds']:.3g} "
        f"| {row['bytes'] / 2**20:.1f} MiB{written} |"
    )


def draw_answers(folders: Mapping[str, Path], data: str, file: Path) -> None:
    """Tiles of the test columns: the photograph, the truth, and what each head answers."""
    scenes = load_scenes(data, want="classes")
    palette = np.array(scenes.palette, dtype=np.uint8)
    tasks: dict[str, Any] = {head: load_task(folder, next(iter(LOOKS.values())))[0] for head, folder in folders.items()}
    chosen = _varied(scenes.test)
    figure = Figure(figsize=(1.5 * (2 + len(tasks)), 1.5 * len(chosen) + 0.6), layout="constrained")
    grid = figure.subplots(len(chosen), 2 + len(tasks), squeeze=False)
    for axes, place in zip(grid, chosen, strict=True):
        scene = scenes.test.scene(place)
        assert scene.classes is not None
        pictures = {"image": scene.image.permute(1, 2, 0).numpy(), "truth": palette[scene.classes.numpy()]}
        pictures |= {head: palette[task.answer(scene.image).numpy()] for head, task in tasks.items()}
        for axis, (title, picture) in zip(axes, pictures.items(), strict=True):
            axis.imshow(picture)
            axis.set(xticks=[], yticks=[])
            if place == chosen[0]:
                axis.set_title(title, fontsize=8)
    handles = [Patch(color=palette[i] / 255, label=name) for i, name in enumerate(scenes.classes)]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=7)
    save_small(figure, file)


def _varied(scenes: Scenes) -> list[int]:
    """The tiles of most classes, one from each part of the set, so that they are of several continents."""
    counts = [len(torch.unique(_classes(scenes, i))) for i in range(len(scenes))]
    parts = np.array_split(np.arange(len(scenes)), ROWS)
    return [int(max(part, key=lambda i: counts[i])) for part in parts if len(part)]


def _classes(scenes: Scenes, place: int) -> torch.Tensor:
    classes = scenes.scene(place).classes
    assert classes is not None
    return classes


def draw_costs(found: Mapping[str, Sequence[Mapping[str, Any]]], file: Path) -> None:
    """Seconds and peak memory over the places of the map, both axes logarithmic."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axis, key, label in zip(
        figure.subplots(1, 2), ("seconds", "bytes"), ("seconds, forward", "peak, MiB"), strict=True
    ):
        for name, rows in found.items():
            values = [row[key] / (2**20 if key == "bytes" else 1) for row in rows]
            axis.plot([row["side"] ** 2 for row in rows], values, marker="o", label=name)
        if key == "bytes":
            places = [side**2 for side in SIDES[:2]]
            axis.plot(places, [4 * n**2 / 2**20 for n in places], "k:", label="an N x N map, if it were written")
        axis.set(xscale="log", yscale="log", xlabel="places of the map", ylabel=label)
        axis.legend(frameon=False, fontsize=7)
        axis.grid(alpha=0.3)
    figure.savefig(file, dpi=110)


def main(args: Args) -> None:
    """Run, then write."""
    if args.quick:
        args = replace(args, out=args.out / "quick")
    results = {head: [one_run(args, head, seed) for seed in args.seeds] for head in HEADS}
    torch.set_num_threads(1)
    folders = {head: Path(runs[0]["folder"]) for head, runs in results.items()}
    described = json.loads((folders["none"] / "data.json").read_text())
    command = f"python -m recipes.segmentation.segmentation_nano --seeds {','.join(map(str, args.seeds))}"
    found = {
        "command": command,
        "environment": environment(),
        "shared": SHARED,
        "network": NETWORK,
        "base": BASE,
        "classes": described["classes"],
        "threads": torch.get_num_threads(),
        "heads": [summarise(head, runs) for head, runs in results.items()],
        "costs": costs(args),
    }
    images = args.out if args.quick else IMAGES
    images.mkdir(parents=True, exist_ok=True)
    shown_heads = ("none", "self", "external, double, S 8")
    draw_answers({head: folders[head] for head in shown_heads}, SHARED["data"], images / "segmentation_answers.png")
    draw_costs(found["costs"], images / "segmentation_cost.png")
    home = args.out if args.quick else HERE
    (home / "segmentation_nano.json").write_text(json.dumps(found, indent=1) + "\n")
    (home / "segmentation_nano.md").write_text(markdown(found, command))
    print(markdown(found, command))


if __name__ == "__main__":
    run_program(main, Args)
