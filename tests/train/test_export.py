"""A disk that is full when a model is exported, and how far the file's answers may be off."""

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from tokenmix.errors import UserError
from tokenmix.lab.cli import main
from tokenmix.lab.train import export


def test_a_full_disk_is_an_error_that_can_be_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """torch.export.save into the file itself ends the process there (seen on a full tmpfs)."""

    def full(path: Path, data: bytes) -> None:
        assert len(data) > 1000
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(export, "write_bytes", full)
    example = {"x": torch.zeros(2, 2)}
    with pytest.raises(OSError, match="No space left"):
        export._write_torch(torch.nn.Linear(2, 2), example, example, tmp_path / "model.pt2")


def test_a_write_that_fails_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tokenmix.lab.train.run.predict", full)
    (tmp_path / "config.json").write_text(json.dumps({"config": {"task": "image-classification"}}))
    image = tmp_path / "a.png"
    Image.new("L", (8, 8)).save(image)
    assert main(["predict", str(tmp_path), str(image), "--out", str(tmp_path / "answers")]) == 2
    told = capsys.readouterr().err
    assert told == f"tokenmix: No space left on device: {tmp_path / 'answers'}; free space on the disk\n"


@pytest.mark.parametrize(("size", "error"), [(1.0, 3e-5), (600.0, 3e-4), (0.01, 3e-5)])
def test_errors_are_relative_to_large_outputs(
    size: float, error: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Boxes in pixels have seven digits in float32: two kernels of one CPU differ by 1e-4."""
    task = SimpleNamespace(inference_module=torch.nn.Identity, example=lambda: {"x": torch.full((2, 2), size)})
    task.config = SimpleNamespace(model=SimpleNamespace(model="vit_nano"))
    monkeypatch.setattr(export, "load_task", lambda _: task)
    monkeypatch.setattr(export.RunFolder, "of", lambda _: SimpleNamespace(path=tmp_path))

    def written(model: Any, example: Any, three: Any, path: Path) -> torch.Tensor:
        path.write_bytes(b"x")
        return three["x"] + error

    monkeypatch.setattr(export, "_write_torch", written)
    assert export.export(tmp_path, "torch-export").read_bytes() == b"x"
    # A score beside boxes in pixels is no large output.
    task.example = lambda: {"x": torch.tensor([[size, 0.5]]).repeat(2, 1)}
    error = 1.2e-4
    with pytest.raises(UserError, match=r"differs from PyTorch's by 1\.2e-04"):
        export.export(tmp_path, "torch-export")
