import json
from pathlib import Path

import pytest
from PIL import Image

from tokenmix.errors import UserError
from tokenmix.lab.inspect import inspect


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    file = tmp_path / "gradient.png"
    Image.linear_gradient("L").resize((40, 30)).save(file)
    return file


def test_a_model_by_name_with_random_weights(tmp_path: Path, picture: Path):
    out = inspect("vit_nano", picture).write(tmp_path / "out")
    told = json.loads((out / "numbers.json").read_text())
    assert told["trained"] is False
    assert told["answer"] is None
    pictures = sorted(p.name for p in out.glob("*.png"))
    assert pictures == [*(f"block-{i:02d}.png" for i in range(len(told["blocks"]))), "depth.png"]
    with Image.open(out / "block-00.png") as drawn:
        assert len(drawn.convert("RGB").getcolors(1 << 20) or []) > 50


def test_neither_run_nor_model(tmp_path: Path, picture: Path):
    with pytest.raises(UserError, match=r"neither a run folder nor a model; give a run folder or one of .*vit_nano"):
        inspect("vit_nanoo", picture).write(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_unreadable_image_leaves_nothing(tmp_path: Path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"")
    with pytest.raises(UserError, match=r"broken\.png"):
        inspect("vit_nano", broken).write(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("error")
def test_a_name_is_neither_a_formula_nor_a_control_sequence(tmp_path: Path, picture: Path):
    for name in ("a$x^{$.png", "\x1b]0;x\x07\x9b.png"):
        out = inspect("vit_nano", picture.rename(tmp_path / name)).write(tmp_path / "out")
        assert (out / "depth.png").exists()
        picture = tmp_path / name
