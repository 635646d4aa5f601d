"""Blocks in YOLO's YAML files: widths at each scale, training, a new process, export."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import tokenmix
from tokenmix.errors import UserError
from tokenmix.layers import list_mixers
from tokenmix.layers.table import get_spec
from tokenmix.swap.ultralytics import TokenMix, register, transfer_weights

YAML = """
nc: 2
scales:
  n: [0.33, 0.25, 1024]
  s: [0.33, 0.50, 1024]
  m: [0.67, 0.75, 768]
backbone:
  - [-1, 1, Conv, [64, 3, 2]]
  - [-1, 1, Conv, [128, 3, 2]]
  - [-1, 3, C2f, [128, True]]
  - [-1, 1, Conv, [256, 3, 2]]
  - [-1, 1, TokenMix, [ch, f, {mixer}]]
  - [-1, 1, Conv, [512, 3, 2]]
  - [-1, 1, SPPF, [512, 5]]
head:
  - [-1, 1, nn.Upsample, [None, 2, nearest]]
  - [[-1, 4], 1, Concat, [1]]
  - [-1, 1, C2f, [256]]
  - [[9, 6], 1, Detect, [nc]]
"""


def written(folder: Path, mixer: str = "external", scale: str = "n") -> Path:
    file = folder / f"yolo99{scale}.yaml"  # Ultralytics reads the scale from the name
    file.write_text(YAML.replace("{mixer}", mixer))
    return file


@pytest.mark.parametrize("name", [name for name in list_mixers() if get_spec(name).layer.capabilities.length == "any"])
def test_a_block_is_the_identity_at_the_start(name: str):
    torch.manual_seed(0)
    given = {"spectral_norm": False} if name == "sagan" else None
    block, x = TokenMix([8, 32, 16], -2, name, given).eval(), torch.randn(2, 32, 4, 6)
    assert torch.equal(block(x), x)


def test_a_yolo_is_more_than_its_network():
    whole = type("YOLO", (nn.Module,), {"__module__": "ultralytics.models.yolo.model", "predictor": None})()
    for change in (tokenmix.insert, tokenmix.swap_attention):
        with pytest.raises(UserError, match=r"a YOLO of Ultralytics is more than its network; give its \.model"):
            change(whole, "model.4", "external")


def test_refusals():
    with pytest.raises(UserError, match="gating has weights for one size"):
        TokenMix([8], -1, "gating")
    with pytest.raises(UserError, match="did you mean external"):
        TokenMix([8], -1, "extrnal")
    with pytest.raises(UserError, match=r"sagan has spectral norm, .* give \{spectral_norm: false\}"):
        TokenMix([8], -1, "sagan")


@pytest.mark.parametrize(
    "given",
    [(["external"],), ("external",), ([8], "external"), ([8], -1, 64), ([8], -1, "external", 64), (128, "external")],
)
def test_a_wrong_row_shows_a_right_one(given: tuple[Any, ...]):
    with pytest.raises(UserError, match=r"a row is - \[-1, 1, TokenMix, \[ch, f, external"):
        TokenMix(*given)


class Rows(nn.Module):
    def __init__(self, *rows: nn.Module) -> None:
        super().__init__()
        self.model = nn.Sequential(*rows)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def test_weights_of_the_same_rows_move_past_the_block():
    def convs() -> tuple[nn.Module, ...]:
        return nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)

    plain, (first, norm, last) = Rows(*convs()).eval(), convs()
    mixed = Rows(first, TokenMix([8], -1), norm, TokenMix([8], -1, "pool"), last).eval()
    assert transfer_weights(mixed, plain) == len(plain.state_dict())
    x = torch.randn(1, 3, 9, 9)
    assert torch.equal(mixed(x), plain(x))
    # As Ultralytics' YOLO objects hold them; and a head for other classes stays as it is.
    other = Rows(*convs()[:2], nn.Conv2d(8, 7, 3))
    assert transfer_weights(SimpleNamespace(model=mixed), other.state_dict()) == len(plain.state_dict()) - 2
    wide = Rows(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), TokenMix([16], -1), nn.Conv2d(16, 4, 3))
    narrow = Rows(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3))
    with pytest.warns(UserWarning, match=r"^4 of 9 tensors were loaded; rows 1, 3 of the YAML do not fit .* add 1"):
        assert transfer_weights(wide, narrow) == 4
    with pytest.raises(UserError, match="no TokenMix row"):
        transfer_weights(plain, mixed)
    with pytest.raises(UserError, match="no tensor of the source fits"):
        transfer_weights(mixed, {"a": x})


def test_without_ultralytics_it_is_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ultralytics.nn.tasks", None)
    with pytest.raises(UserError, match="pip install ultralytics"):
        register()


@pytest.mark.parametrize(("scale", "width"), [("n", 64), ("s", 128), ("m", 192)])
def test_widths_follow_the_scale(tmp_path: Path, scale: str, width: int):
    tasks = pytest.importorskip("ultralytics.nn.tasks")
    register()
    model = tasks.DetectionModel(str(written(tmp_path, scale=scale)), verbose=False)
    assert model.model[4].block.mixer.dim == width


@pytest.mark.slow
def test_it_trains_reloads_in_a_new_process_and_exports(tmp_path: Path):
    ultralytics = pytest.importorskip("ultralytics")
    register()
    for part in ("train", "val"):
        for kind in ("images", "labels"):
            (tmp_path / kind / part).mkdir(parents=True)
        for i in range(4):
            Image.new("RGB", (64, 64), (60 * i, 90, 30)).save(tmp_path / "images" / part / f"{i}.png")
            (tmp_path / "labels" / part / f"{i}.txt").write_text(f"{i % 2} 0.5 0.5 0.4 0.4\n")
    data = tmp_path / "data.yaml"
    data.write_text(f"path: {tmp_path}\ntrain: images/train\nval: images/val\nnames: {{0: a, 1: b}}\n")
    yolo = ultralytics.YOLO(str(written(tmp_path)))
    quick = {"imgsz": 64, "batch": 2, "epochs": 1, "device": "cpu", "workers": 0, "plots": False, "amp": False}
    yolo.train(data=str(data), project=str(tmp_path / "runs"), name="one", **quick)
    best = tmp_path / "runs" / "one" / "weights" / "last.pt"
    code = f"""
import torch
from ultralytics import YOLO
from tokenmix.swap.ultralytics import TokenMix
yolo = YOLO({str(best)!r})
assert isinstance(yolo.model.model[4], TokenMix)
yolo.predict({str(tmp_path / "images" / "val" / "0.png")!r}, imgsz=64, device="cpu", verbose=False)
print(yolo.export(format="onnx", imgsz=64, simplify=False))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert best.with_suffix(".onnx").is_file()
