"""Text that a file holds is never code, a model's place or an address; text that the user typed is."""

import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import tokenmix
from tokenmix.errors import UserError
from tokenmix.files import read_json, write_json
from tokenmix.lab.data.lookup import load_data, local_copies
from tokenmix.lab.grid import Cell, finish_cell
from tokenmix.lab.tasks.generation.features import RunFeatures
from tokenmix.lab.tasks.text.corpus import load_text
from tokenmix.lab.train.config import CompareConfig
from tokenmix.lab.train.folder import RunFolder
from tokenmix.lab.train.load import load_run
from tokenmix.lab.train.run import evaluate, train
from tokenmix.lab.train.sources import load_recipe, make_config
from tokenmix.layers import create_mixer
from tokenmix.registry import without_timm
from tokenmix.trust import FromFile, from_caller, from_file, is_typed, only_typed, typed, typed_words
from verbs import refused

EVIL = """
from torch import nn
from tokenmix.layers import Capabilities, Mixer

open("MARK", "w")


class X(Mixer):
    capabilities = Capabilities(map=None, mask=False)

    def __init__(self, dim):
        super().__init__()
        self.dim, self.value = dim, nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        return self.value(x)

    def macs(self, num_tokens):
        return num_tokens * self.dim**2
"""
NET = {"depth": 1, "embed_dim": 16, "num_heads": 2}
SMALL: dict[str, Any] = {
    "data": "digits",
    "limit": 32,
    "limit_eval": 16,
    "validation": 0,
    "batch_size": 8,
    "max_steps": 1,
    "device": "cpu",
    "threads": 1,
}
WORDS = [
    "--data",
    "digits",
    "--limit",
    "32",
    "--limit-eval",
    "16",
    "--batch-size",
    "8",
    "--max-steps",
    "1",
    "--device",
    "cpu",
    "--threads",
    "1",
]


class Reached(Exception):
    """A test has let text through to the network or to timm's loader of folders."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound run, for each test to copy."""
    out = tmp_path_factory.mktemp("sound") / "run"
    return train(make_config(model="mixer_nano", model_kwargs=NET, out=out, **SMALL), quiet=True)


@pytest.fixture
def strange(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the run in the current folder, where a module evil lies as well."""
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    (tmp_path / "evil.py").write_text(EVIL)
    (folder / "evil.py").write_text(EVIL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    yield folder
    assert not (tmp_path / "MARK").exists()
    for name in ("evil", "run", "run.evil"):
        sys.modules.pop(name, None)


def edit(run: Path, part: str, **values: Any) -> None:
    held = read_json(run / "config.json")
    held["config"][part] |= values
    write_json(run / "config.json", held)


def hub_folder(place: Path, mixer: str, **config: Any) -> Path:
    place.mkdir()
    args = {"mixer": mixer, **NET, "img_size": 8, "in_chans": 1}
    held = {"architecture": "mixer_nano", "num_classes": 10, "model_args": args, "pretrained_cfg": {}}
    (place / "config.json").write_text(json.dumps({**held, **config}))
    return place


@pytest.mark.parametrize(
    ("part", "values", "named"),
    [
        ("model", {"model_kwargs": {**NET, "mixer": "evil:X"}}, "code, evil:X"),
        ("model", {"model_kwargs": {**NET, "mixer": "run.evil:X"}}, "code, run.evil:X"),
        ("swap", {"swap": "evil:X"}, "code, evil:X"),
        ("model", {"model": "local-dir:ld", "model_kwargs": {}}, "a model's place, local-dir:ld"),
        ("model", {"model": "hf-hub:me/net", "model_kwargs": {}}, "a model's place, hf-hub:me/net"),
    ],
)
def test_a_run_folder_names_no_code(strange: Path, capsys, part: str, values: dict[str, Any], named: str) -> None:
    hub_folder(Path("ld"), "evil:X")
    edit(strange, part, **values)
    student = ["train", "image-classification", "--model", "vit_nano", *WORDS, "--out", "student", "--teacher", "run"]
    for words in (["eval", "run"], ["inspect", "run", "x.png"], ["export", "run"], student):
        if words[0] == "inspect":
            Path("x.png").touch()
        assert named in refused(capsys, *words), words
    assert named in refused(capsys, "swap", "run", "--to", "self")
    for load in (load_run, RunFeatures):
        with pytest.raises(UserError, match=named.partition(", ")[2]):
            load(strange)


def test_a_resumed_run_names_no_code_and_no_teacher(strange: Path, capsys) -> None:
    (strange / "result.json").unlink()
    edit(strange, "swap", swap="evil:X")
    assert "is not as it was when the run was started" in refused(capsys, "train", "--resume", "run")
    recipe = 'model = "mixer_nano"\nswap = "evil:X"\n[options]\nteacher = "local-dir:ld"\n'
    Path("r.toml").write_text(recipe)
    hub_folder(Path("ld"), "evil:X")
    assert "names code, evil:X" in refused(capsys, "train", "--recipe", "r.toml", *WORDS, "--out", "o")
    Path("r.toml").write_text(recipe.replace('swap = "evil:X"\n', ""))
    told = refused(capsys, "train", "--recipe", "r.toml", *WORDS, "--out", "o")
    assert "a model's place, local-dir:ld" in told
    Path("r.toml").write_text('init_from = "hf-hub:me/net"\n')
    assert "hf-hub:me/net" in refused(capsys, "train", "--recipe", "r.toml", *WORDS, "--out", "o")


def test_a_comparison_names_no_code(strange: Path, capsys) -> None:
    settings = CompareConfig().replace(mixers=("self", "evil:X"), **SMALL).flat()
    write_json(strange / "compare.json", json.loads(json.dumps(settings, default=str)))
    assert "names code, evil:X" in refused(capsys, "compare", "--merge", "run", "--out", "merged")


@pytest.mark.parametrize("build", [timm.create_model, tokenmix.create_model])
def test_a_folder_for_timm_names_no_code(strange: Path, build: Any) -> None:
    hub_folder(Path("ld"), "evil:X")
    hub_folder(Path("tagged"), "evil:X", pretrained_cfg={"tag": "evil:X", "hf_hub_id": "evil:X"})
    for name in ("local-dir:ld", "local-dir:tagged"):
        with pytest.raises(UserError, match="names code, evil:X"):
            build(name, num_classes=3)
    assert build(f"local-dir:{hub_folder(Path('good'), 'self')}").num_classes == 10
    with pytest.raises((RuntimeError, UserError), match="Unknown model"):
        build(f"local-dir:{hub_folder(Path('chain'), 'self', architecture='local-dir:ld')}")


def test_a_backbone_and_its_weights_are_typed() -> None:
    with typed("fpn_seg_resnet50"):
        with pytest.raises(UserError, match="unknown backbone 'local-dir:ld'"):
            tokenmix.create_model("fpn_seg_resnet50", backbone="local-dir:ld")
        for name in ("local-dir:ld", "hf-hub:me/net"):
            with pytest.raises(UserError, match=f"a model's place, {name}"):
                tokenmix.create_model(name)
    overlay = {"hf_hub_id": "me/net", "url": "https://host/w.pth"}
    with typed("vit_tiny_patch16_224"), pytest.raises(UserError, match="a place of weights, pretrained_cfg_overlay"):
        tokenmix.create_model("vit_tiny_patch16_224", pretrained=True, pretrained_cfg_overlay=overlay)


@pytest.mark.parametrize(
    "spec",
    [
        "wds:https://host/a-{0..2}.tar",
        "csv:s3://bucket/a.csv#text,label",
        "text:memory://a",
        "hf:me/set#text",
        "csv:zip://a::https://host/b.zip",
        "wds:a.tar,gs://bucket/b.tar",
        "hf:hf://datasets/me/set",
    ],
)
def test_a_file_names_no_address(strange: Path, capsys, monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    def reach(*args: Any, **kwargs: Any) -> None:
        raise Reached(*args)

    monkeypatch.setattr("datasets.load_dataset", reach)
    # After datasets, whose import copies the name.
    monkeypatch.setattr("fsspec.core.url_to_fs", reach)
    kind = "images" if spec.startswith("wds") else "corpus"
    with typed(FromFile(spec)), pytest.raises(UserError, match="a file names a place on the network"):
        load_data(spec, kind)
    if kind == "images":
        edit(strange, "data", data=spec)
        assert "a file names a place on the network" in refused(capsys, "eval", "run")
        with pytest.raises(UserError, match="a file names a place on the network"):
            evaluate(strange)


def test_the_data_card_of_a_folder_names_no_address(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text\n" + "a word\n" * 20)
    settings = 'configs:\n- config_name: default\n  data_files:\n  - split: train\n    path: ["{}"]\n'
    for address in ("http://127.0.0.1:1/x.csv", "memory\\x3a//x.csv", "zip://x::y", "/etc/passwd", "../*/train.csv"):
        for card, text in (("README.md", f"---\n{settings}---\n"), (".huggingface.yaml", settings)):
            (tmp_path / card).write_text(text.format(address))
            with pytest.raises(UserError, match=r"the data card of .* names .*, outside of the folder"):
                load_text(f"hf:{tmp_path}#text", root=tmp_path / "cache")
            (tmp_path / card).unlink()
    (tmp_path / "README.md").write_text(f"---\n{settings.format('train.csv')}---\n")
    assert set(load_text(f"hf:{tmp_path}#text", root=tmp_path / "cache").train) == {"a word"}


@pytest.mark.parametrize("scheme", ["local", "file", "memory", "github", "ftp", "http", "s3a", "zip"])
def test_other_schemes_are_refused_though_typed(tmp_path: Path, scheme: str) -> None:
    with pytest.raises(UserError, match=f"{scheme}:// is not read; give a path, or a URL that begins with one of ht"):
        local_copies([f"{scheme}://{'host' * (scheme != 'local')}{tmp_path}/a.csv"], tmp_path)
    for chained in (f"{scheme}://a::s3://bucket/b", f"s3://bucket/b::{scheme}://a"):
        with pytest.raises(UserError, match="is not a plain URL"):
            local_copies([chained], tmp_path)


def test_a_copy_stays_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Store:
        def info(self, path: str) -> dict[str, Any]:
            return {"type": "file", "size": 3, "ETag": "1"}

        def get_file(self, path: str, copy: str) -> None:
            Path(copy).write_text("new")

        def invalidate_cache(self) -> None:
            pass

    importlib.import_module("datasets")  # Its import would copy what is patched here.
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda url, **options: (Store(), url))
    file, cache = tmp_path / "file.csv", tmp_path / "cache"
    file.write_text("old")
    for url in (f"s3://{file}", f"https:///{file}"):
        with pytest.raises(UserError, match="leaves the folder"):
            local_copies([url], cache)
    (copy,) = local_copies(["s3://bucket/a.csv"], cache)
    copy.unlink()
    copy.symlink_to(file)
    with pytest.raises(UserError, match="leaves the folder"):
        local_copies(["s3://bucket/a.csv"], cache)
    copy.unlink()
    copy.symlink_to(copy.with_name("b.csv"))
    mark = copy.with_name(".a.csv.version")
    mark.unlink()
    mark.symlink_to(file)
    assert local_copies(["s3://bucket/a.csv"], cache)[0].read_text() == "new"
    assert not copy.is_symlink()
    assert not mark.is_symlink()
    assert file.read_text() == "old"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A mixer in a module of the current folder, which nothing has imported."""
    (tmp_path / "mine.py").write_text(EVIL.replace('open("MARK", "w")\n', ""))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "mine:X"
    sys.modules.pop("mine", None)


def test_a_python_caller_is_trusted(own: str, tmp_path: Path) -> None:
    def forget() -> None:
        assert sys.modules.pop("mine")

    assert create_mixer(own, 8).dim == 8
    forget()
    assert timm.create_model("mixer_nano", mixer=own, **NET).num_classes == 10
    forget()
    hub_folder(Path("ld"), "self")
    assert tokenmix.create_model("local-dir:ld", mixer=own).num_classes == 10
    forget()
    with pytest.raises(UserError, match="names code, mine:X"):
        create_mixer(FromFile(own), 8)
    config = make_config(model="mixer_nano", model_kwargs={**NET, "mixer": own}, out=tmp_path / "a", **SMALL)
    trained = train(config, quiet=True)
    forget()
    assert finish_cell(Cell("b", config.replace(out=tmp_path / "b"))) == ""
    forget()
    with pytest.raises(UserError, match="names code, mine:X"):
        evaluate(trained)
    Path("r.toml").write_text('model = "mixer_nano"\nmodel_kwargs = {mixer = "mine:X"}\n')
    with pytest.raises(UserError, match="names code, mine:X"):
        train(load_recipe("r.toml").replace(out=tmp_path / "c", **SMALL))
    import mine  # type: ignore[import-not-found]  # pyrefly: ignore[missing-import]

    assert mine.X
    assert evaluate(trained)["samples"] == 16


def test_a_cell_carries_what_was_typed(own: str, tmp_path: Path) -> None:
    config = make_config(model="mixer_nano", model_kwargs={**NET, "mixer": FromFile(own)}, out=tmp_path / "a", **SMALL)
    assert "names code, mine:X" in str(finish_cell(Cell("a", config)))
    with only_typed(frozenset(["--mixers", f"self,{own}"])):
        cell = Cell("a", config)
    assert cell.typed == {"--mixers", "self,mine:X"}
    assert finish_cell(cell) == ""
    assert typed_words() is None


def test_the_folder_of_an_own_module_is_searched_last(own: str, tmp_path: Path) -> None:
    for name in ("wave", "colorsys"):
        sys.modules.pop(name, None)
        Path(f"{name}.py").write_text("raise SystemExit(7)\n")
    create_mixer(own, 8)
    assert sys.path[-1] == str(tmp_path)
    import colorsys

    assert Path(colorsys.__file__).parent != tmp_path
    with pytest.raises(UserError, match="unknown class in module 'wave'"):
        create_mixer("wave:X", 8)
    before = len(sys.path)
    create_mixer(own, 8)
    assert len(sys.path) == before


def test_what_is_typed() -> None:
    words = ["mixer=my:A", "self,my:B", "--data=wds:s3://b/x.tar,s3://b/y.tar", "{'mixer': 'my:C'}", "csv:s3://b/t#a,b"]
    with typed(*words, FromFile("my:D"), {"a": ["my:E", FromFile("my:F")]}):
        for text in ("my:A", "my:B", "my:C", "my:E", "s3://b/x.tar", "s3://b/y.tar", "s3://b/t"):
            assert is_typed(text), text
        for text in ("my:D", "my:F", "y:A", "my:", "s3://b/x", "s3://b", "b/x.tar", "my:A2"):
            assert not is_typed(text), text
        with typed("my:D"):
            assert not is_typed("my:D")
    assert not is_typed("my:A")
    assert from_caller(is_typed)("my:A")
    assert not from_caller(is_typed)(FromFile("my:A"))
    marked = from_file({"a": ["x", {"b": "y"}], "c": 1})
    assert marked == {"a": ["x", {"b": "y"}], "c": 1}
    assert type(marked["a"][1]["b"]) is FromFile


def test_what_an_opened_run_folder_has_read_is_not_typed(strange: Path) -> None:
    folder = RunFolder(strange)
    assert folder.setup["config"]["data"]
    with typed(folder, [folder], {"run": folder}):
        assert typed_words() == frozenset()


def test_no_value_of_a_file_is_lost_in_a_config(strange: Path) -> None:
    config = make_config(resume=strange)
    assert {type(text) for text in (config.model.model, config.data.data, config.replace(seed=1).model.model)} == {
        FromFile
    }
    assert torch.equal(*(load_run(strange)[0].state_dict()[key] for key in ["head.weight"] * 2))


@pytest.mark.parametrize("name", ["timm:resnet18", "resnet18", "hf-hub:a/b"])
def test_a_name_without_its_library_is_still_of_its_file(name: str) -> None:
    assert isinstance(without_timm(FromFile(name)), FromFile)
    assert make_config(model=FromFile(name)).model.model == name.removeprefix("timm:")
    assert isinstance(make_config(model=FromFile(name)).model.model, FromFile)
