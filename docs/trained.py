"""The small networks whose maps and gates the documentation shows, trained on Fashion-MNIST by this script alone."""

import argparse
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from stamps import digest
from torch import Tensor, nn

from tokenmix.lab.data.images import ImageData, load_images, normalize
from tokenmix.lab.data.indexed import make_loader
from tokenmix.models import create_model

__all__ = ["GRID", "Trained", "of_networks", "test_images"]

STEPS, BATCH = 800, 32
GRID = (14, 14)
MIXERS: dict[str, dict[str, int]] = {
    "self": {},
    "sagan": {},
    "external": {"num_slots": 32},
    "multihead-external": {"num_slots": 16},
    "gating": {},
    "gating-attention": {"attention_dim": 32},
    "less": {},
}


@cache
def fashion() -> ImageData:
    """The images, fetched once."""
    return load_images("fashion-mnist", limit_eval=1000)


def test_images(indices: list[int]) -> tuple[Tensor, Tensor]:
    """Test images as pictures in 0..1 (B, H, W), and as the networks take them (B, 1, H, W)."""
    data = fashion()
    images, _ = data.test.pixels(torch.tensor(indices))
    return images[:, 0] / 255, normalize(images, data.mean, data.std)


class Trained:
    """Networks of 4 blocks of width 64 on 14 x 14 patches; trained when first asked for, and kept in a folder."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.models: dict[str, nn.Module] = {}

    def __call__(self, mixer: str) -> Any:
        """The trained `MixerNet` with that mixer, in eval mode."""
        if mixer not in self.models:
            self.models[mixer] = self._load_or_train(mixer)
        return self.models[mixer].eval()

    def _load_or_train(self, mixer: str) -> nn.Module:
        torch.manual_seed(0)
        model = _network(mixer)
        file = None if self.folder is None else self.folder / f"{mixer}.safetensors"
        if file is not None and file.exists():
            model.load_state_dict(load_file(file))
            return model
        _train(model)
        print(f"{mixer}: {_accuracy(model):.3f} of 1,000 test images right after {STEPS} steps", flush=True)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            save_file(model.state_dict(), file)
        return model


def _network(mixer: str, device: str = "cpu") -> nn.Module:
    shape = {"img_size": 28, "patch_size": 2, "in_chans": 1, "num_classes": 10, "depth": 4}
    return create_model("mixer_nano", mixer=mixer, mixer_kwargs=MIXERS[mixer], device=device, **shape)


def of_networks(mixers: list[str]) -> str:
    """A digest of what these networks are: their weights' names and shapes, and the length of their training."""
    shapes = [{k: list(v.shape) for k, v in _network(mixer, "meta").state_dict().items()} for mixer in mixers]
    return digest(STEPS, BATCH, shapes)


def _train(model: nn.Module) -> None:
    data = fashion()
    loader = make_loader(data.train.prepared(mean=data.mean, std=data.std), batch_size=BATCH, shuffle=True, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=STEPS)
    for _, batch in zip(range(STEPS), loader):
        loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def _accuracy(model: nn.Module) -> float:
    data = fashion()
    loader = make_loader(data.test.prepared(mean=data.mean, std=data.std), batch_size=100, shuffle=False, seed=0)
    right = [(model.eval()(batch["image"]).argmax(1) == batch["label"]).sum() for batch in loader]
    return int(sum(right)) / len(data.test)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the weights go")
    arguments = parser.parse_args()
    for name in MIXERS:
        Trained(arguments.folder)(name)
