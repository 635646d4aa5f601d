"""What the command refuses: one line, with the value and what to give instead."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenmix.errors import UserError
from tokenmix.lab.cli import main
from tokenmix.lab.cli.command import VERBS, parse
from tokenmix.lab.cli.parsing import _OURS, _VERBS
from tokenmix.lab.registry import list_tasks
from tokenmix.lab.train.config import BudgetConfig, CompareConfig, DataConfig, TrainConfig, default_config

REMEDY = re.compile(r"; |\bgive\b|\bsee\b|did you mean|must be .*, got|leave .* out|\bknown: ")
WORDS = {
    "info": ["vit_nano"],
    "eval": ["run"],
    "predict": ["run", "x.png"],
    "generate": ["run", "--out", "x"],
    "inspect": ["vit_nano"],
    "export": ["run"],
    "swap": ["vit_nano", "--to", "external"],
    "distill": ["model", "--to", "external", "--text", "x", "--out", "y"],
    "doctor": ["external"],
    "data": ["list"],
    "list": ["mixers"],
    "train-tokenizer": ["--data", "text:x", "--out", "y"],
}
BAD = ("x", "-1", "nan", "1e999", "", "~nosuchuser/x", "\x1b[31m", "9" * 200)


def options() -> Iterator[list[str]]:
    """The words in front of each option's value, each option of each verb once."""
    done = set()
    for task in list_tasks():
        for name in sorted(default_config(task).flat().keys() - {"task", *done}):
            done.add(name)
            yield ["train", task, f"--{name.replace('_', '-')}"]
    for name in CompareConfig().flat():
        yield ["compare", f"--{name.replace('_', '-')}"]
    for verb, words in WORDS.items():
        for field in dataclasses.fields(VERBS[verb]):
            name = f"--{field.name.replace('_', '-')}"
            if field.name not in ("run_folder", "inputs", "options", "json") and "Positional" not in str(field.type):
                yield [verb, *words, name]


def refusal(words: list[str]) -> str | None:
    """The message for a command that is read and not run; None if its words are right."""
    try:
        parse(words)
    except UserError as error:
        return str(error)
    return None


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_there_are_options() -> None:
    assert len(list(options())) > 170


@pytest.mark.slow
@pytest.mark.parametrize("value", BAD, ids=[repr(value[:15]) for value in BAD])
def test_a_bad_value_of_any_option_is_refused_with_a_remedy(value: str) -> None:
    told = {" ".join(words): refusal([*words, value]) for words in options()}
    without = {words: said for words, said in told.items() if said is not None and not REMEDY.search(said)}
    assert not without
    assert sum(said is not None for said in told.values()) > 40, "most options have a type"


@pytest.mark.parametrize(
    "words",
    [
        ["train", "image-classification", "--lr"],
        ["train", "image-classification", "--epochs"],
        ["train", "image-classification", "--ema"],
        ["train", "image-classification", "--schedule"],
        ["train", "image-classification", "--logger"],
        ["compare", "--seeds"],
        ["compare", "--clip-grad"],
        ["train", "semantic-segmentation", "--scales"],
        ["train", "image-classification", "--model-kwargs"],
        ["cost", "external", "--tokens"],
        ["info", "vit_nano", "--img-size"],
        ["compare", "--run-gpus"],
    ],
)
def test_a_bad_value_of_each_type_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("x", "\x1b[31m"):
        assert main([*words, value]) == 2
        said = capsys.readouterr().err
        assert re.fullmatch(r"tokenmix: \S[^\n\x1b]*\n", said)
        assert REMEDY.search(said)
        assert not re.search("could not convert|invalid literal|does not match", said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train --mixer external", "give --swap MIXER, or --model mixer_nano --model-kwargs mixer=MIXER"),
        ("compare --mixer external", "give --mixers A,B,C"),
        ("swap vit_nano --mixer external", "give --to MIXER"),
        ("train --learning-rate 1", "give --lr RATE"),
        ("train --learning_rate=1", "give --lr RATE"),
        ("compare --learning-rate 1", "give --lr RATE"),
        ("train --dropout 0.1", "give --model-kwargs drop_rate=P"),
        ("train --gpus 2", "give --device cuda --devices N"),
        ("train --pretrained-weights", "did you mean --pretrained"),
        ("train --patch-size 8", "give --model-kwargs patch_size=N"),
        ("train -b 8", "give --batch-size N"),
        ("compare --mixers self external", "separate several by commas, as in --mixers self,external"),
        ("tran", "unknown verb 'tran'; did you mean train?"),
        ("test runs/first", "unknown verb 'test'; give tokenmix eval"),
        ("help", "give tokenmix --help"),
    ],
)
def test_words_of_other_libraries_get_ours(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_what_is_advised_exists() -> None:
    train = {name for task in list_tasks() for name in default_config(task).flat()}
    verbs = {field.name for verb in VERBS.values() for field in dataclasses.fields(verb)}
    names = {name.replace("_", "-") for name in train | verbs | CompareConfig().flat().keys()}
    for ours, theirs in _OURS.items():
        assert {option[2:] for option in re.findall(r"--[a-z-]+", ours)} <= names, ours
        assert not [word for word in theirs if len(word) > 1 and f"--{word}" == ours.split()[0]], ours
    for ours in _VERBS.values():
        assert ours in VERBS or ours.startswith("--")
    assert not _VERBS.keys() & VERBS.keys()


def test_a_comparison_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "compared" / "runs" / "gating-seed3"
    run.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    (tmp_path / "compared" / "compare.json").write_text("{}")
    for verb in (["eval"], ["export"], ["predict"]):
        assert main([*verb, "compared", *(["x.txt"] if verb == ["predict"] else [])]) == 2
        assert "compared is a comparison, not a run; give one of its runs, such as compared/runs/gating-seed3" in (
            capsys.readouterr().err
        )


@pytest.mark.parametrize(
    "words",
    [
        "train --out ~nosuchuser/x",
        "train --init-from ~nosuchuser/x",
        "train --resume ~nosuchuser/x",
        "train --recipe ~nosuchuser/x",
        "train --data folder:~nosuchuser/x",
        "train masked-lm --tokenizer ~nosuchuser/x",
        "compare --out ~nosuchuser/x",
        "compare --merge a ~nosuchuser/x",
        "eval ~nosuchuser/x",
        "export ~nosuchuser/x",
        "export run --out ~nosuchuser/x",
        "predict ~nosuchuser/x y.png",
        "generate ~nosuchuser/x --out y",
        "inspect ~nosuchuser/x",
        "inspect vit_nano ~nosuchuser/x.png",
        "swap ~nosuchuser/x --to self",
        "cost self --out ~nosuchuser/x",
        "train-tokenizer --data text:~nosuchuser/x --out y",
    ],
)
def test_nobodys_home_is_one_line(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert "~nosuchuser/x" in error
    assert "no such user's home; give the whole path" in error
    assert error.count("\n") == 1


@pytest.mark.slow
def test_a_teacher_in_nobodys_home_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--data", "digits", "--teacher", "~nosuchuser/x"]) == 2
    assert "no such user's home; give the whole path" in capsys.readouterr().err


def test_paths_of_configs_are_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert TrainConfig().replace(out="~/run").loop.out == tmp_path / "run"
    assert parse(["compare", "--out", "~/run"]).config.out == tmp_path / "run"
    with pytest.raises(UserError, match="no such user's home"):
        TrainConfig().replace(out=Path("~nosuchuser/run"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"data": "digits"}, r"data='digits' is not a DataConfig.* give CompareConfig\(\)\.replace\(data='digits'\)"),
        ({"optim": {"lr": 1.0}}, "optim=.* is not a Section"),
        ({"loop": DataConfig()}, "loop=.* is not a BudgetConfig"),
        ({"options": None}, "options=None is not a Section"),
        ({"seeds": ("a",)}, "seeds='a' must be a whole number"),
        ({"task": 3}, "task=3 must be text"),
    ],
)
def test_a_config_is_refused_where_it_is_built(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        CompareConfig(mixers=("self", "external"), **given)


def test_a_config_takes_parts_and_single_values() -> None:
    config = CompareConfig(mixers="self", seeds=[1, 2], data=DataConfig(data="digits"), loop=BudgetConfig(epochs=1))
    assert (config.mixers, config.seeds, config.data.data, config.loop.epochs) == (("self",), (1, 2), "digits", 1)
    assert CompareConfig().replace(mixers=("self", "external"), data="digits").data.data == "digits"
