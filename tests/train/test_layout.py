"""Convolutions have channels last, unless FSDP or a network of the user's needs another layout."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import tokenmix
from tokenmix.lab.tasks.classification.task import ImageClassification
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.sources import make_config
from tokenmix.layers import Capabilities, Mixer
from tokenmix.registry import MODELS, ModelEntry
from tokenmix.trust import typed


class Viewing(nn.Module):
    """As many classifiers are written: it can only be run with outputs in rows of pixels."""

    def __init__(self, num_classes: int = 10, in_chans: int = 3, img_size: object = 16) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(in_chans, 4, 3, 2, 1), nn.Linear(64, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.conv(images)
        return self.head(x.view(len(x), -1))


DESCRIPTION = {"classes": [str(i) for i in range(10)], "channels": 3, "img_size": [8, 8]}


def built(config: TrainConfig) -> nn.Module:
    return ImageClassification.model_from_config(config, DESCRIPTION)


def in_rows(model: nn.Module) -> list[bool]:
    """For each convolution with more than one tap and channel, whether its weights are contiguous."""
    convs = [part for part in model.modules() if isinstance(part, nn.Conv2d)]
    weights = [conv.weight for conv in convs if conv.weight.shape[1] > 1 and conv.weight[0, 0].numel() > 1]
    assert weights
    return [weight.is_contiguous() for weight in weights]


@pytest.mark.parametrize("model", ["mixer_nano", "timm:resnet10t", "torchvision:resnet18"])
def test_convolutions_have_channels_last(model: str):
    given = {"data": "digits", "model": model}
    assert not any(in_rows(built(make_config(**given))))
    assert all(in_rows(built(make_config(**given, strategy="fsdp"))))


@pytest.mark.parametrize("registered", [False, True])
def test_a_network_of_the_user_may_view_its_outputs(registered: bool, monkeypatch: pytest.MonkeyPatch):
    target = f"{__name__}:Viewing"
    entry = ModelEntry(name="viewing", tasks=("image-classification",), about="one convolution", build=target)
    monkeypatch.setitem(MODELS._entries, entry.name, entry)
    with typed(target):
        model = built(make_config(data="digits", model="viewing" if registered else target))
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 10)


class Volume(Mixer):
    """A mixer of the user's with weights that have no layout of channels, and one that it views."""

    capabilities = Capabilities(map=None, mask=False, equivariant=False, linear=True)

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.conv, self.weight = dim, nn.Conv3d(1, 1, 1), nn.Parameter(torch.ones(2, 3, 2, 2))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x * self.weight.view(6, -1).mean() + self.conv(x[:, None, None])[:, 0, 0]

    def macs(self, num_tokens: int) -> int:
        return 0


def test_a_mixer_of_the_user_keeps_its_layout():
    mixer = f"{__name__}:Volume"
    with typed(mixer):
        model = built(make_config(data="digits", model="mixer_nano", model_kwargs={"mixer": mixer}))
    assert not any(in_rows(model))
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 10)


def test_a_trained_model_can_be_saved(tmp_path: Path):
    config = make_config(
        data="digits", model="mixer_nano", limit=32, epochs=1, threads=1, device="cpu", out=tmp_path / "run"
    )
    run = tokenmix.train(config=config, quiet=True)
    safetensors.torch.save_file(run.model.state_dict(), tmp_path / "weights.safetensors")
    assert all(in_rows(run.model))


@pytest.mark.slow
def test_fsdp_trains_a_network_of_convolutions(tmp_path: Path):
    command = [sys.executable, "-m", "tokenmix", "train", "--data", "digits", "--model", "mixer_nano", "--limit", "64"]
    options = ["--epochs", "1", "--batch-size", "16", "--devices", "2", "--device", "cpu", "--threads", "1"]
    done = subprocess.run(
        [*command, *options, "--strategy", "fsdp", "--out", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "result.json").is_file()
