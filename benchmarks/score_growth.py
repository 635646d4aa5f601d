"""How the scores of less-attention grow with depth, and what holds them: a loss, or a smaller rate for Theta and Psi.

The network and the training are those of docs/trained.py: four blocks of width 64 on 14 x 14 patches of Fashion-MNIST,
the first with self-attention, batches of 32 images (there 800 steps). Prints one line of JSON.
"""

import argparse
import json
import math
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenmix.lab.data.images import ImageData, load_images
from tokenmix.lab.data.indexed import make_loader
from tokenmix.lab.inspect import map_numbers
from tokenmix.losses import DiagonalityForm, diagonality_loss
from tokenmix.models import create_model

__all__ = ["accuracy", "optimizer_of", "scores_of", "train"]

TRANSFORM = ("theta", "psi", "theta_bias", "psi_bias")


def optimizer_of(model: nn.Module, lr: float, transform_factor: float) -> tuple[torch.optim.Optimizer, list[float]]:
    """AdamW in two groups, and the peak rate of each: Theta and Psi with their biases apart."""
    named = list(model.named_parameters())
    groups = [
        {"params": [p for name, p in named if (name.rpartition(".")[2] in TRANSFORM) == inside]}
        for inside in (False, True)
    ]
    return torch.optim.AdamW(groups, lr=lr, weight_decay=0.05), [lr, lr * transform_factor]


def train(
    model: nn.Module, data: ImageData, *, steps: int, seed: int, weight: float, form: DiagonalityForm, factor: float
) -> None:
    """docs/trained.py's training, with the loss on the scores and the factor on the rate of Theta and Psi."""
    loader = make_loader(data.train.prepared(mean=data.mean, std=data.std), batch_size=32, shuffle=True, seed=seed)
    optimizer, peaks = optimizer_of(model, 2e-3, factor)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peaks, total_steps=steps)
    for _, batch in zip(range(steps), loader):
        logits, scores = model.forward_with_scores(batch["image"])  # type: ignore[operator]
        loss = F.cross_entropy(logits, batch["label"])
        if weight:
            losses = torch.stack([diagonality_loss(layer, form) for layer in scores])
            loss = loss + weight * (losses.sum() if form == "printed" else losses.mean())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def scores_of(model: Any, images: Tensor) -> list[Tensor]:
    """The scores (B, H, N, N) of each block before its softmax."""
    x, carry, found = model.tokens(images), None, []
    for block in model.blocks:
        x, carry = block(x, carry)
        found.append(carry.matrix())
    return found


@torch.no_grad()
def accuracy(model: nn.Module, data: ImageData) -> float:
    """Share of the test images that are right."""
    loader = make_loader(data.test.prepared(mean=data.mean, std=data.std), batch_size=100, shuffle=False, seed=0)
    right = [(model(batch["image"]).argmax(1) == batch["label"]).sum() for batch in loader]
    return int(sum(right)) / len(data.test)


def _rounded(values: list[float]) -> list[float | str]:
    return [float(f"{value:.4g}") if math.isfinite(value) else str(value) for value in values]


def main() -> None:
    """Train once and print the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weight", type=float, default=0.0, help="of the diagonality loss")
    parser.add_argument("--form", choices=("hinge", "printed"), default="hinge")
    parser.add_argument("--factor", type=float, default=1.0, help="on the learning rate of Theta and Psi")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=800)
    asked = parser.parse_args()
    torch.manual_seed(asked.seed)
    data = load_images("fashion-mnist", limit_eval=1000)
    model = create_model("mixer_nano", mixer="less", depth=4, img_size=28, patch_size=2, in_chans=1, num_classes=10)
    start = time.perf_counter()
    train(model, data, steps=asked.steps, seed=asked.seed, weight=asked.weight, form=asked.form, factor=asked.factor)
    seconds = time.perf_counter() - start
    model.eval()
    images = next(
        iter(make_loader(data.test.prepared(mean=data.mean, std=data.std), batch_size=64, shuffle=False, seed=0))
    )
    numbers = map_numbers(model.attention_maps(images["image"]))  # type: ignore[operator]
    found = {
        "std": _rounded([scores.std((-2, -1)).mean().item() for scores in scores_of(model, images["image"])]),
        "share": _rounded([block.saturation for block in numbers]),
        "columns": _rounded([block.effective_columns for block in numbers]),
        "accuracy": accuracy(model, data),
    }
    print(json.dumps({**vars(asked), **found, "seconds": round(seconds, 1)}), flush=True)


if __name__ == "__main__":
    main()
