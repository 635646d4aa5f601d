"""Scenes by name, and what a name or a folder that cannot be read says."""

from pathlib import Path

import pytest

from tokenmix.errors import UserError
from tokenmix.lab.data import list_data
from tokenmix.lab.data.lookup import with_absolute_paths
from tokenmix.lab.data.scenes import load_scenes
from tokenmix.lab.registry import DATA_SETS


def test_table(tmp_path: Path):
    rows = {row.name: row for row in list_data(tmp_path)}
    assert rows["voc"].kinds == ("classes", "boxes", "masks")
    assert rows["voc"].cached


@pytest.mark.parametrize(
    ("spec", "want", "message"),
    [
        ("cityscape", "classes", "did you mean cityscapes"),
        ("cityscapes:x", "boxes", "has classes, not boxes; give one of .*voc:PATH, coco:PATH"),
        ("voc", "classes", "voc needs a path"),
        ("voc:/no/such/place", "classes", "/no/such/place is not a folder"),
        ("voc", "colours", "want is one of"),
    ],
)
def test_what_cannot_be_had(spec: str, want: str, message: str):
    with pytest.raises(UserError, match=message):
        load_scenes(spec, want=want)  # type: ignore[arg-type]


def test_a_folder_that_is_in_no_layout(tmp_path: Path):
    for name, want in (("voc", "classes"), ("ade20k", "classes"), ("cityscapes", "classes"), ("coco", "boxes")):
        with pytest.raises(UserError, match=f"{tmp_path} has no .* so it is not in the layout of"):
            load_scenes(f"{name}:{tmp_path}", want=want)
    with pytest.raises(UserError, match=f"give voc:{tmp_path}, or ade20k:, cityscapes:, masks: before it"):
        load_scenes(str(tmp_path), want="classes")


def test_paths_of_layouts_are_made_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name, row in ((entry.name, entry) for entry in DATA_SETS if entry.variant != "shards"):
        expected = f"{name}:{tmp_path / 'x'}" if row.variant == "path" else f"{name}:x"
        assert with_absolute_paths(f"{name}:x") == expected
