"""A disk that is full when a model is exported."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

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
