"""Grids: several data sets and sizes, some of the runs, and folders of several machines put together."""

import json
from pathlib import Path
from typing import Any

import pytest

from tokenmix.errors import UserError
from tokenmix.lab.cli.command import parse
from tokenmix.lab.compare.compare import compare
from tokenmix.lab.compare.grid import choose_cells, merge_settings, split_grid
from tokenmix.lab.compare.results import load_results
from tokenmix.lab.compare.variants import plan_runs, read_run
from tokenmix.lab.data.lookup import data_sets
from tokenmix.lab.train import run
from tokenmix.lab.train.config import CompareConfig, TrainConfig, comparison_config
from tokenmix.profiling.units import count
from verbs import printed, refused

SETTINGS: dict[str, Any] = {
    "data": "digits",
    "limit": 64,
    "limit_eval": 20,
    "validation": 16,
    "batch_size": 16,
    "epochs": 1,
    "device": "cpu",
    "controls": False,
    "mixers": ("self", "external"),
}
GRID = {"data": "digits,digits-again", "sizes": ("nano", "small"), "mixers": ("self",), "seeds": (0, 1)}
NAMES = ["digits-nano", "digits-small", "digits-again-nano", "digits-again-small"]


pytestmark = pytest.mark.usefixtures("few_tokens")


def small(out: Path, **changes: Any) -> CompareConfig:
    return CompareConfig().replace(**{**SETTINGS, "out": out, **changes})


@pytest.fixture
def _digits_again(own_names: None) -> None:
    import dataclasses

    from tokenmix.lab.registry import DATA_SETS

    DATA_SETS.register(dataclasses.replace(DATA_SETS["digits"], name="digits-again"))


@pytest.mark.parametrize(
    ("specs", "found"),
    [
        ("digits", ["digits"]),
        ("digits,fashion-mnist,digits", ["digits", "fashion-mnist"]),
        ("digits,fashon-mnist", ["digits", "fashon-mnist"]),
        ("folder:a,b,digits", ["folder:a,b", "digits"]),
        ("wds:/a/t-{0..3}.tar,/a/v.tar,folder:x", ["wds:/a/t-{0..3}.tar,/a/v.tar", "folder:x"]),
    ],
)
def test_commas_separate_data_sets_but_not_paths(specs: str, found: list[str]) -> None:
    assert data_sets(specs) == found


def test_one_data_set_and_size_keep_their_folder() -> None:
    out, parts = split_grid(CompareConfig().replace(data="folder:my/photos"))
    assert out == Path("runs/compare-folder-my-photos")
    assert list(parts) == [""]
    out, parts = split_grid(CompareConfig().replace(data="digits", sizes=("small",), out=Path("x")))
    assert out == Path("x")
    assert parts[""][0].model.model == "mixer_small"


def test_numbers_of_tokens_are_an_axis() -> None:
    config = parse(["compare", "--data", "digits", "--patch", "4,2", "--img-size", "16,8,8"]).config
    out, parts = split_grid(config)
    assert out == Path("runs/compare-digits")
    assert list(parts) == ["patch4-16px", "patch4-8px", "patch2-16px", "patch2-8px"]
    one, folder = parts["patch2-8px"]
    assert folder == out / "patch2-8px"
    assert (one.model.model_kwargs, one.options.img_size) == ({"patch_size": 2}, 8)
    # One value is a setting, and where several models are compared their names come first.
    ((name, (one, _)),) = split_grid(CompareConfig().replace(data="digits", patch=(2,), img_size=(8,)))[1].items()
    assert (name, one.model.model_kwargs, one.options.img_size) == ("", {"patch_size": 2}, 8)
    names = split_grid(CompareConfig().replace(data="digits", patch=(2, 4), sizes=("nano", "small")))[1]
    assert list(names) == [f"digits-{size}-patch{patch}" for size in ("nano", "small") for patch in (2, 4)]
    with pytest.raises(UserError, match="text-classification has no option"):
        split_grid(comparison_config("text-classification", data="text:x", img_sizes=(8, 16)))


def test_each_number_of_tokens_has_its_costs_in_the_table(tmp_path: Path) -> None:
    out = tmp_path / "tokens"
    compare(config=small(out, patch=(4, 2), mixers=("self",), max_steps=1), quiet=True)
    found = [load_results(out / name / "results.json") for name in ("patch4", "patch2")]
    assert [one.skeleton["num_tokens"] for one in found] == [4, 16]
    few, many = (one.variants[0].macs for one in found)
    assert 0 < few < many  # type: ignore[operator]
    table = (out / "results.md").read_text()
    assert "| tokens | 4 | 16 |" in table
    assert f"| self | {count(few)} | {count(many)} |" in table
    assert f"<td>{count(many)}</td>" in (out / "report.html").read_text()
    merged = tmp_path / "merged"
    compare(config=CompareConfig().replace(merge=(out,), out=merged), quiet=True)
    assert [load_results(merged / name / "results.json").skeleton["num_tokens"] for name in ("patch4", "patch2")] == [
        4,
        16,
    ]
    with pytest.raises(UserError, match="patch_size=4"):
        compare(config=small(tmp_path / "x", model="resnet18", insert_after="layer3", patch=(4, 2)), quiet=True)
    assert not (tmp_path / "x").exists()


@pytest.mark.usefixtures("_digits_again")
def test_a_grid_has_a_report_for_each_pair_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "grid"
    compare(config=small(out, **GRID, only=("digits-nano/*", "*-again-*/self-seed1")))
    lines = capsys.readouterr().out
    assert "[1/4] digits-nano, self, seed 0: accuracy" in lines
    assert sorted(file.parent.name for file in out.glob("*/report.html")) == sorted({*NAMES} - {"digits-small"})
    assert [run.seed for run in load_results(out / "digits-again-small/results.json").variants[0].runs] == [1]
    # What was left out is trained by the same command without --only; what there is, is not trained again.
    compare(config=small(out, **GRID))
    lines = capsys.readouterr().out
    assert lines.count("done before") == 4
    assert "[8/8] " in lines
    table = (out / "results.md").read_text()
    assert all(f"[{name}]({name}/results.md)" in table for name in NAMES)
    score = load_results(out / "digits-small/results.json").variants[0].score
    assert f"{score:.4f} ± " in table
    assert '<a href="digits-small/report.html">digits-small</a>' in (out / "report.html").read_text()
    widths = [load_results(out / name / "results.json").skeleton["dim"] for name in NAMES]
    assert widths == [64, 128, 64, 128]
    with pytest.raises(UserError, match=r"digits-nano holds a comparison with epochs 1 instead of 2"):
        compare(config=small(out, **GRID, epochs=2), quiet=True)
    with pytest.raises(UserError, match="holds a grid of comparisons; give another --out, then join"):
        compare(config=small(out), quiet=True)


@pytest.mark.parametrize(
    ("only", "chosen"),
    [
        ("*1", ["self-seed1", "ext-1-seed1"]),
        ("*[!1]", ["self-seed0", "ext-1-seed0"]),
        ("ext-1", ["ext-1-seed0", "ext-1-seed1"]),
        ("self-seed1", ["self-seed1"]),
    ],
)
def test_a_name_without_its_seed_is_taken_if_no_run_has_it(only: str, chosen: list[str]) -> None:
    config = CompareConfig().replace(mixers=("self",), controls=False, variants={"ext-1": {}}, seeds=(0, 1))
    cells = plan_runs(config, Path())
    assert sorted(cell.name for cell in choose_cells(cells, [only])) == sorted(chosen)


def test_folders_of_two_machines_are_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, whole = (tmp_path / name for name in ("one", "two", "whole"))
    compare(config=small(one, mixers=("self",), seeds=(0, 1), only=("self-seed1",)), quiet=True)
    compare(config=small(two, only=("self", "external-seed?")), quiet=True)
    # What says it was trained here and not copied.
    assert not (one / "runs/self-seed0").exists()
    printed(capsys, "compare", "--merge", str(one), str(two), "--out", str(whole))
    merged = load_results(whole / "results.json")
    assert [[run.seed for run in variant.runs] for variant in merged.variants] == [[0, 1], [0]]
    for source, name in ((one, "self-seed1"), (two, "self-seed0"), (two, "external-seed0")):
        files = [(folder / "runs" / name / "model.safetensors").read_bytes() for folder in (source, whole)]
        assert files[0] == files[1]
    assert json.loads((whole / "compare.json").read_text())["mixers"] == ["self", "external"]

    (tmp_path / "empty").mkdir()
    for words, message in (
        (["--merge", str(one), str(tmp_path / "empty")], "empty holds no comparison"),
        (["--merge"], "--merge needs folders"),
        (["--merge", str(one), "--lr", "0.1"], "--merge takes the settings of the folders; leave --lr out"),
        (["--mixers", "self", "--data", "digits", "--only", "self-sed0"], "unknown run 'self-sed0'; did you mean"),
        (["--sizes", "smal", "--data", "digits"], "unknown size of mixer 'smal'; did you mean small"),
        (["--data", "digits,digts"], "unknown data set 'digts'; did you mean digits"),
        (["--engine", "rai"], "give one of local, ray, slurm"),
    ):
        out = [] if "--merge" in words else ["--out", str(tmp_path / "new")]
        assert message in refused(capsys, "compare", *words, *out)
    assert not (tmp_path / "new").exists()
    (tmp_path / "secret").write_text("of another folder")
    (two / "runs/self-seed0/more").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=r"more is a link to .*secret, which is not copied"):
        compare(config=CompareConfig().replace(merge=(one, two), out=tmp_path / "new"), quiet=True)
    (two / "runs/self-seed0/more").unlink()
    data = two / "runs/self-seed0/data.json"
    data.write_text(json.dumps({**(described := json.loads(data.read_text())), "classes": ["of other data"]}))
    with pytest.raises(UserError, match=r"the data changed since .*self-seed0 \(classes differ\); give another --out"):
        compare(config=CompareConfig().replace(merge=(one, two), out=tmp_path / "new-data"), quiet=True)
    data.write_text(json.dumps(described))
    settings = json.loads((two / "compare.json").read_text())
    (two / "compare.json").write_text(json.dumps({**settings, "lr": 0.5}))
    with pytest.raises(UserError, match=r"two holds a comparison with lr 0.5, .*one one with 0.002"):
        compare(config=CompareConfig().replace(merge=(one, two), out=tmp_path / "new"), quiet=True)
    (two / "compare.json").write_text(json.dumps({**settings, "controls": True}))
    assert [merge_settings(CompareConfig(), pair).controls for pair in ((one, one), (one, two))] == [False, True]
    (two / "compare.json").write_text(json.dumps({**settings, "model": "vit_nano"}))
    with pytest.raises(UserError, match=r"two holds a comparison of vit_nano, .*one one of mixer_nano"):
        merge_settings(CompareConfig(), (one, two))
    for folder, name in ((one, "resnet18"), (two, "alexnet")):
        (folder / "compare.json").write_text(json.dumps({**settings, "model": f"torchvision:{name}"}))
    with pytest.raises(UserError, match=r"two holds a comparison of torchvision:alexnet, "):
        merge_settings(CompareConfig(), (one, two))


@pytest.mark.usefixtures("_digits_again")
def test_a_data_set_without_a_finished_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = run.train

    def train(config: TrainConfig, *, quiet: bool = False) -> Path:
        if config.data.data == "digits-again":
            raise UserError("the loss is nan")
        return real(config, quiet=quiet)

    monkeypatch.setattr(run, "train", train)
    with pytest.raises(UserError, match=r"no run of digits-again-nano finished.*the loss is nan"):
        compare(config=small(tmp_path / "out", data="digits,digits-again", mixers=("self",)), quiet=True)
    assert "digits-nano" in (tmp_path / "out/results.md").read_text()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"accuracy": "<b>"}, "accuracy='<b>' must be a number"),
        ({"accuracy": 7.0}, "accuracy must be in"),
        ({"confusion": "x"}, "confusion='x' must be a whole number"),
        ({"confusion": [[-1]]}, "confusion must be at least 0"),
    ],
)
def test_an_edited_result_is_refused(tmp_path: Path, changed: dict[str, Any], named: str) -> None:
    (cell,) = plan_runs(small(tmp_path, mixers=("self",)), tmp_path)
    cell.folder.mkdir(parents=True)
    result = {"seconds": 1.0, "images_per_second": 9.0, "metrics": {"accuracy": 0.5, "confusion": [[1, 2], [0, 3]]}}
    (cell.folder / "config.json").write_text("{}")
    (cell.folder / "result.json").write_text(json.dumps(result))
    assert read_run(cell, "", "accuracy", tmp_path).confusion == [[1, 2], [0, 3]]
    result["metrics"] |= changed
    (cell.folder / "result.json").write_text(json.dumps(result))
    with pytest.raises(UserError, match=named):
        read_run(cell, "", "accuracy", tmp_path)
