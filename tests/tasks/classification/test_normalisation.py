"""Initial weights bring the mean and standard deviation that they were trained with."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from PIL import Image
from torch import nn

from tokenmix.errors import UserError
from tokenmix.lab.tasks.classification.task import ImageClassification
from tokenmix.lab.train.run import train
from tokenmix.lab.train.sources import make_config
from tokenmix.trust import typed

SHORT: dict[str, Any] = {"batch_size": 4, "epochs": 1, "device": "cpu", "validation": 0, "img_size": 16}
TINY: dict[str, Any] = {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
OWN = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}


class OwnNet(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 8, 8), nn.Linear(4, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(images).mean((2, 3)))


@pytest.fixture
def dark(tmp_path: Path) -> str:
    for name in ("cat", "dog"):
        (tmp_path / "set" / name).mkdir(parents=True)
        for i in range(4):
            pixels = np.random.default_rng(i).integers(0, 40, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "set" / name / f"{i}.png")
    return f"folder:{tmp_path / 'set'}"


def stats(run: Path) -> dict[str, Any]:
    data = json.loads((run / "data.json").read_text())
    return {name: pytest.approx(data[name], abs=1e-6) for name in OWN}


def test_weights_bring_their_normalisation(dark: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    fresh = {**SHORT, "data": dark, "model": "vit_tiny_patch16_224", "model_kwargs": TINY}
    own = train(make_config(**fresh, out=tmp_path / "own"), quiet=True)
    assert json.loads((own / "data.json").read_text())["mean"][0] < 0.1
    given = train(make_config(**fresh, **OWN, out=tmp_path / "given"), quiet=True)
    assert stats(given) == {name: list(values) for name, values in OWN.items()}
    # Those of a run, even in another run's data; a run that continues keeps them without the source.
    start = tmp_path / "given"
    second = train(make_config(**SHORT, data=dark, init_from=start, out=tmp_path / "second"))
    assert stats(second) == {name: list(values) for name, values in OWN.items()}
    assert f"with mean 0.1,0.2,0.3 and std 0.4,0.5,0.6, as in {start}" in capsys.readouterr().err
    start.rename(tmp_path / "moved")
    again = ImageClassification.load_data(make_config(resume=second)).describe()
    assert {name: tuple(again[name]) for name in OWN} == OWN
    # A file for a timm model.
    file = tmp_path / "weights.safetensors"
    file.write_bytes((own / "model.safetensors").read_bytes())
    half = {"mean": [0.5] * 3, "std": [0.5] * 3}
    from_file = train(make_config(**fresh, init_from=file, out=tmp_path / "file"), quiet=True)
    assert stats(from_file) == half
    # A folder of transformers.
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    theirs = transformers.ViTConfig(image_size=16, patch_size=8, **small)
    transformers.ViTForImageClassification(theirs).save_pretrained(tmp_path / "vit")
    (tmp_path / "vit/preprocessor_config.json").write_text(json.dumps({f"image_{k}": v for k, v in OWN.items()}))
    folder = {**SHORT, "data": dark, "model": f"transformers:{tmp_path / 'vit'}", "pretrained": True}
    third = train(make_config(**folder, out=tmp_path / "third"), quiet=True)
    assert stats(third) == {name: list(values) for name, values in OWN.items()}


def test_weights_of_an_own_model_keep_the_data_s(dark: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    safetensors.torch.save_file(OwnNet(2).state_dict(), tmp_path / "own.safetensors")
    with typed(f"{__name__}:OwnNet"):
        config = make_config(**SHORT, data=dark, model=f"{__name__}:OwnNet", init_from=tmp_path / "own.safetensors")
        train(config.replace(out=tmp_path / "run"))
    assert (
        "those of the data; if the weights were trained with others, give --mean and --std" in capsys.readouterr().err
    )


def test_given_statistics_are_checked(dark: str, tmp_path: Path):
    with pytest.raises(UserError, match="give mean and std together"):
        make_config(**SHORT, data=dark, mean=(0.5, 0.5, 0.5))
    with pytest.raises(UserError, match="mean has 1 numbers, and the images 3 channels"):
        train(make_config(**SHORT, data=dark, mean=(0.5,), std=(0.5,), out=tmp_path / "run"), quiet=True)
