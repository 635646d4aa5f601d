"""Samples of a generator: noise that depends only on a seed and an index, grids of images, strips between two."""

from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.utils import make_grid

from tokenmix.files import replacing
from tokenmix.lab.data.seeding import hash_indices


def noise_of(places: Tensor, latent_dim: int, *, seed: int, group: int = 0) -> Tensor:
    """Normal noise (n, latent_dim), a row for each place: a function of (seed, group, place) and of nothing else.

    So neither the batch, nor the number of processes, nor what else is asked for changes a sample.
    """
    rows = []
    for bits in hash_indices(seed, group, places.cpu(), purpose=3).tolist():
        generator = torch.Generator().manual_seed(bits & 0x7FFFFFFFFFFFFFFF)
        rows.append(torch.randn(latent_dim, generator=generator))
    return torch.stack(rows).to(places.device)


def between(first: Tensor, last: Tensor, count: int) -> Tensor:
    """`count` points (count, z) along the great circle from one noise (z,) to another.

    On a straight line the middle would be nearer to 0 than any noise that the generator was trained with.
    """
    angle = torch.arccos((first @ last / (first.norm() * last.norm())).clamp(-1, 1))
    shares = torch.linspace(0, 1, count, device=first.device)[:, None]
    if angle < 1e-4:
        return first + shares * (last - first)
    return (torch.sin((1 - shares) * angle) * first + torch.sin(shares * angle) * last) / torch.sin(angle)


@torch.no_grad()
def strips(gan: nn.Module, latent_dim: int, classes: Tensor, count: int, *, seed: int) -> Tensor:
    """Images (classes x count) on the way between two noises, which are the same for each class."""
    ends = noise_of(torch.arange(2, device=classes.device), latent_dim, seed=seed)
    path = between(ends[0], ends[1], count)
    return gan(path.repeat(len(classes), 1), classes.repeat_interleave(count))


def save_grid(images: Tensor, columns: int, path: Path) -> Path:
    """Write images (n, C, H, W) in -1 .. 1 row by row as one PNG."""
    return save_image(make_grid(images.float().cpu(), nrow=columns, padding=2, pad_value=1.0), path)


def save_image(image: Tensor, path: Path) -> Path:
    """Write one image (C, H, W) in -1 .. 1 as a PNG, grey if it has one channel."""
    levels = image.float().cpu().add(1).div(2).clamp(0, 1).mul(255).round().byte().permute(1, 2, 0).numpy()
    with replacing(path) as partial:
        Image.fromarray(levels[..., 0] if levels.shape[2] == 1 else levels).save(partial)
    return path
