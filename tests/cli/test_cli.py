"""The command as a user types it: verbs end to end on the embedded digits, and mistakes in one line."""

import dataclasses
import errno
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

import tokenmix
from tokenmix.errors import UserError
from tokenmix.files import DISK_ERRORS
from tokenmix.lab.cli import main
from tokenmix.lab.cli.command import VERBS, parse
from tokenmix.lab.cli.listing import print_result
from tokenmix.lab.cli.parsing import EXAMPLES, OF_MIXERS, OF_RUN, OF_TASK, known_mixers
from tokenmix.lab.registry import list_tasks
from tokenmix.lab.train.config import comparison_config, default_config
from tokenmix.lab.train.run import train

BUDGET = ["--data", "digits", "--max-steps", "12", "--batch-size", "64", "--limit", "400", "--limit-eval", "100"]


def command(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tokenmix", *args], capture_output=True, text=True, cwd=cwd, timeout=120
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("cli") / "run"
    shallow = ["--model", "vit_nano", "--model-kwargs", "depth=1"]
    assert main(["train", "image-classification", *shallow, *BUDGET, "--out", str(out)]) == 0
    return out


@pytest.fixture
def picture(tmp_path) -> Path:
    path = tmp_path / "zero.png"
    Image.new("L", (8, 8), 90).save(path)
    return path


def test_help_is_quick_and_light():
    probe = "import sys; sys.argv = ['tokenmix', '--help']\nfrom tokenmix.lab.cli import main\n"
    probe += "try: main()\nexcept SystemExit: pass\nassert not {'torch', 'timm', 'lightning'} & set(sys.modules)"
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "compare" in done.stdout
    assert time.perf_counter() - start < 20  # a hang, not a slow machine: the speed itself is in dev/LOG.md


@pytest.mark.slow
def test_timm_knows_our_names_once_our_models_are_imported():
    for order in ("import tokenmix.models, timm", "import timm, tokenmix.models"):
        probe = f"{order}\nprint(timm.create_model('vit_nano', num_classes=3).num_classes)"
        done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120)
        assert done.stdout.strip() == "3", done.stderr


@pytest.mark.parametrize("what", ["mixers", "models", "tasks", "data"])
def test_list(what, capsys):
    assert main(["list", what, "--json"]) == 0
    assert all("name" in row for row in json.loads(capsys.readouterr().out))


def test_a_small_confusion_matrix_is_printed_row_by_row(capsys):
    print_result({"accuracy": 0.5, "confusion": [[3, 1], [12, 2]]})
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[1:] == [["confusion", "3,", "1"], ["12,", "2"]]


def test_numbers_of_classes_are_printed_by_name_and_what_is_long_is_said(capsys):
    classes = {f"c{i}": i / 8 for i in range(7)}
    print_result({"class_iou": classes, "all": {str(i): i for i in range(150)}, "rows": [0] * 10})
    told = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert all(f"c{i} {i / 8:.4g}" in told for i in range(7))
    assert "150 entries, printed by --json" in told
    assert "10 entries, printed by --json" in told


def test_info_counts_what_the_model_has(capsys):
    assert main(["info", "mixer_nano", "--img-size", "28", "--model-kwargs", "mixer=external", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["tokens"] == 49
    assert summary["mixer"] == "external"
    assert summary["macs"] > sum(block["mixer macs"] for block in summary["blocks"])


def test_eval_prints_other_metrics_of_the_same_names(run, capsys, monkeypatch):
    monkeypatch.setattr("tokenmix.lab.train.run.evaluate", lambda *_, **__: {"confusion": 0.25, "recall": 0.5})
    assert main(["eval", str(run)]) == 0
    assert re.search(r"confusion +0\.25", capsys.readouterr().out)


def test_a_run_folder_is_enough(run, picture, capsys):
    capsys.readouterr()
    assert main(["eval", str(run)]) == 0
    told = capsys.readouterr().out
    assert re.search(r"confusion +true (\w+):", told)
    assert re.search(r"img_size +\d+, \d+", told)
    assert main(["eval", str(run), "--json"]) == 0
    assert 0 <= json.loads(capsys.readouterr().out)["accuracy"] <= 1
    assert main(["predict", str(run), str(picture), "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)
    assert 0 < answer["probability"] <= 1
    assert main(["inspect", str(run), str(picture), "--out", str(picture.parent / "maps")]) == 0
    assert list((picture.parent / "maps").glob("*.png"))
    told = capsys.readouterr().out
    assert "saturation" in told
    assert "blocks.0" in told
    assert f"figures and numbers.json in {picture.parent / 'maps'}" in " ".join(told.split())


def test_export_makes_the_folder_and_refuses_one_as_the_file(run, tmp_path, capsys):
    out = tmp_path / "below" / "model.pt2"
    assert main(["export", str(run), "--format", "torch-export", "--out", str(out)]) == 0
    assert out.stat().st_size > 10_000
    assert f"{out}: torch-export, " in capsys.readouterr().out
    assert main(["export", str(run), "--format", "torch-export", "--out", str(tmp_path)]) == 2
    assert "is a folder; give a file" in capsys.readouterr().err


def test_export_to_onnx(run, tmp_path):
    out = tmp_path / "model.onnx"
    assert main(["export", str(run), "--format", "onnx", "--out", str(out)]) == 0
    assert out.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["trian"], "unknown verb 'trian'; did you mean train"),
        (["train", "image-clasification"], "image-classification"),
        (["train", "image-classification", "--model", "vit_nan", "--data", "digits"], "vit_nano"),
        (["train", "image-classification", "--data", "digts"], "digits"),
        (["train", "image-classification", "--data", "digits", "--epochs", "x"], "--epochs"),
        (["train", "image-classification", "--data", "folder:/nowhere"], "/nowhere"),
        (["compare", "--mixers", "self,extrnal", "--data", "digits"], "external"),
        (["eval", "/nowhere"], "/nowhere"),
        (["predict", "/nowhere", "x.png"], "/nowhere"),
        (["inspect", "vit_nano", "/nowhere.png"], "/nowhere.png"),
        (["doctor", "nomodule:Layer"], "nomodule"),
        (["data", "get"], "needs a name"),
        (["data", "get", "fashion"], "fashion-mnist"),
        (["cost", "externl"], "external"),
        (["info", "eamlp_nan"], "unknown model"),
        (["probe", "self,extrnal"], "extrnal"),
        (["cost", "self,extrnal"], "external"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(args, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(args) == 2
    error = capsys.readouterr().err.strip()
    assert words in error
    assert len(error.splitlines()) == 1
    assert error.startswith("tokenmix: ")


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_mistake_reads_the_same_in_every_encoding(encoding: str):
    probe = "from tokenmix.lab.cli import main; main(['cost', 'external', '--dim', 'x'])"
    done = subprocess.run(
        [sys.executable, "-c", probe],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )
    assert done.stderr == "tokenmix: --dim cannot be 'x'; give none or a whole number\n"


def test_predict_refuses_a_broken_picture(run, tmp_path, capsys):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0" * 20)
    capsys.readouterr()
    assert main(["predict", str(run), str(broken)]) == 2
    assert "broken.png" in capsys.readouterr().err


def test_a_pickle_is_not_opened(run, tmp_path, capsys):
    fake = tmp_path / "model.safetensors"
    torch.save({"weight": torch.zeros(1)}, fake)
    out = str(tmp_path / "other")
    assert main(["train", "image-classification", *BUDGET, "--init-from", str(fake), "--out", out]) == 2
    assert "safetensors" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["train", "compare", "inspect"])
def test_a_folder_that_cannot_be_made(verb, picture, capsys):
    out = ["--out", str(picture / "below-a-file")]
    words = {
        "train": ["train", "image-classification", *BUDGET],
        "compare": ["compare", *BUDGET],
        "inspect": ["inspect", "vit_nano", str(picture)],
    }
    assert main([*words[verb], *out]) == 2
    error = capsys.readouterr().err.strip()
    assert "below-a-file" in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("verb", ["train", "compare"])
@pytest.mark.parametrize(("option", "name"), [("--clip-grad", "clip_grad"), ("--ema", "ema")])
def test_what_can_be_switched_off_takes_none(verb: str, option: str, name: str) -> None:
    mixers = ["--mixers", "self"] if verb == "compare" else []
    for text, value in (("none", None), ("None", None), ("0.5", 0.5)):
        assert parse([verb, "--data", "digits", *mixers, option, text]).config.flat()[name] == value
    with pytest.raises(UserError, match=rf"{option} cannot be 'off'; give none or a number"):
        parse([verb, "--data", "digits", *mixers, option, "off"])


def test_version_and_the_bare_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"tokenmix {tokenmix.__version__}, torch ")
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 0
    assert "compare" in capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_has_three_examples(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    shown = capsys.readouterr().out
    assert len(EXAMPLES[verb]) == 3
    for example in EXAMPLES[verb]:
        assert f"{example}\n" in shown
        assert shlex.split(example)[:2] == ["tokenmix", verb]
    assert "{None}" not in shown


@pytest.mark.parametrize(
    ("line", "near"),
    [
        ("train image-classification --model vit_nan --data digits", "vit_nano"),
        ("info eamlp_nan", "eamlp_nano"),
        ("swap vit_tiny_patch16_22 --to external", "vit_tiny_patch16_224"),
        ("cost residaul", "tresnet_l"),
    ],
)
def test_a_wrong_model_name_is_told_with_the_nearest(line: str, near: str, capsys: pytest.CaptureFixture[str]) -> None:
    """timm is asked whether it has a model of that name, which takes its import."""
    assert main(line.split()) == 2
    told = capsys.readouterr().err
    assert f"did you mean {near}" in told
    assert told.count("\n") == 1


def test_mistakes_are_told_without_pytorch(tmp_path: Path) -> None:
    """In one process, by what it has imported at the end: names, options and paths of every verb."""
    words = """train image-classification --data digts
        train image-classification --data folder:/nowhere
        train detection --data coco:/nowhere
        train image-classification --lrr 1
        train --recipe nothing
        compare --mixers self,extrnal --data digits
        compare --mixers self --data digts
        inspect vit_nanoo x
        inspect vit_nano /nowhere.png
        swap vit_tiny_patch16_224 --to extrnal
        eval /nowhere
        predict /nowhere x.png
        export /nowhere
        generate /nowhere --out x
        doctor nomodule:Layer
        data get fashion
        train-tokenizer --data text:/nowhere --out x
        list mixer
        trian""".splitlines()
    probe = f"""
import sys
from tokenmix.lab.cli import main
for line in {words!r}:
    assert main(line.split()) == 2, line
    heavy = {{'torch', 'timm', 'lightning', 'transformers', 'torchvision', 'PIL'}} & set(sys.modules)
    assert not heavy, (line, heavy)
"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == len(words)
    for near in ("digits", "external", "fashion-mnist", "--lr", "train"):
        assert near in done.stderr


def options_of_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 0
    return re.findall(r"^\W*?(--[a-z][\w-]*)", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("task", list_tasks())
def test_help_shows_the_usual_options_and_the_task_s_own_first(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    own = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(default_config(task).options)}
    shown, everything = (options_of_help(["train", task, help], capsys) for help in ("--help", "--help-all"))
    assert 12 <= len(shown) <= 20
    assert {*shown} < {*everything}
    assert len(everything) > 40
    assert shown[0] in own
    assert [option in own for option in shown] == sorted((option in own for option in shown), reverse=True)
    example = f"train {task} --model {default_config(task).model.model} --data "
    with pytest.raises(SystemExit):
        main(["train", task, "--help"])
    line = next(line for line in capsys.readouterr().out.splitlines() if example in line)
    assert parse(shlex.split(line)[1:]).config.task == task
    assert {"--mixers", *shown[: shown.index("--data")]} <= {*options_of_help(["compare", task, "-h"], capsys)}


def test_every_usual_option_exists() -> None:
    assert OF_TASK.keys() == {*list_tasks()}
    for task, own in OF_TASK.items():
        assert {*own} <= {field.name for field in dataclasses.fields(default_config(task).options)}
    names = {name for task in list_tasks() for name in default_config(task).flat()}
    assert {*OF_RUN, *OF_MIXERS} <= names | {*comparison_config().flat()} | {"config"}


def test_every_help_is_light() -> None:
    """Help of every verb and of every task, in one process that must not have imported torch at the end."""
    words = [["--help"], *([verb, "--help"] for verb in VERBS)]
    words += [["train", task, shown] for task in list_tasks() for shown in ("--help", "--help-all")]
    probe = f"""
import sys
from tokenmix.lab.cli import main
for words in {words!r}:
    try:
        print(main(words), words)
    except SystemExit as stop:
        assert stop.code == 0, words
assert not {{'torch', 'timm', 'lightning', 'transformers'}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for option in ("--mixup", "--iou-loss", "--lr-g", "--votes", "--mask-prob", "--detections", "--mixers"):
        assert option in done.stdout
    assert "(required)" in done.stdout
    assert "(default: )" not in done.stdout
    assert "(default: '')" not in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "train semantic-segmentation --mixup 1",
            "semantic-segmentation has no option --mixup, which is one of image-",
        ),
        ("train detection --cropp 4", "unknown option of detection '--cropp'; did you mean --crop or"),
        ("train detection --augment rand-m9", "--augment cannot be 'rand-m9'; give one of none, light"),
        ("train --lr fast", "--lr cannot be 'fast'; give a number"),
        ("train --lr it's", '--lr cannot be "it\'s"; give a number'),
        (f"train --batch-size {'9' * 5000}", "--batch-size cannot be what it was given; give a whole number"),
        ("train --epochs 1.5", "--epochs cannot be '1.5'; give none or a whole number"),
        ("train --logger csv", "--logger cannot be 'csv'; give none or one of tensorboard, wandb, mlflow"),
        ("compare --seeds x", "--seeds: 'x' is not a whole number; separate values by commas"),
        ("train --model-kwargs depth", "--model-kwargs: 'depth' is not of the form name=value; give NAME=VALUE"),
        ("train --grad-checkpointing yes", "--grad-checkpointing takes no value, got 'yes'; leave 'yes' out"),
        ("train --data folder:my photos", "--data takes one value, got 'folder:my photos'; separate several by commas"),
        ("compare --mixers self external --data digits", "separate several by commas, as in --mixers self,external"),
        ("train detection images", "'images' belongs to no option; give --OPTION images, or leave it out"),
        ("train image-classification digits", "give --data digits, or leave it out"),
        ("compare folder:photos", "'folder:photos' is no task but data; give --data folder:photos"),
        ("train --task detection --data digits", "the task is the first word: tokenmix train detection"),
        ("list", "tokenmix list needs one of mixers, models, tasks, data"),
        ("train --distill 0.5", "distill=0.5 needs a teacher; give --teacher RUN, or leave it out"),
        ("train --lr nan", "lr must be a finite number, got nan"),
        ("train --devices 0", "devices must be at least 1, or none; got 0"),
        ("train --lr", "--lr has no value; give a number"),
        ("train --model vit_nano detection", "the task comes first: tokenmix train detection"),
        ("train detection --recipe eanet_voc", "is for semantic-segmentation, got the task detection"),
        ("predict", "tokenmix predict needs RUN"),
        ("compare --insert-kwargs num_slots=8", "give --config FILE.toml with a table [variants.NAME]"),
        ("compare --variants a", "give --config FILE.toml with a table [variants.NAME]"),
        ("compare --metric f1", "there is no option --metric; give --monitor METRIC"),
        ("cost external --import nets", "tokenmix --import MODULE_OR_FILE.py cost external"),
        ("train --model MyNet --data digits", "a function or class of yours is module:NAME"),
        ("train --model nets.py:MyNet --data digits", "a module is named without .py: nets:MyNet"),
        ("compare --lrr 1", "unknown option of image-classification '--lrr'; did you mean --lr"),
    ],
)
def test_what_the_parser_refuses_is_one_line(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    error = capsys.readouterr().err.strip()
    assert said in error
    assert len(error.splitlines()) == 1


def test_without_tyros_private_module_tyro_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmix.lab.cli.parsing.events", None)
    with pytest.raises(SystemExit) as stop:
        main(["train", "--lrr", "1"])
    assert stop.value.code == 2


def test_an_option_that_is_given_again_is_given(run: Path, tmp_path: Path) -> None:
    """A default that differs from the run's own value is refused like any other, an equal value is not."""
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    resume = ["train", "--resume", str(tmp_path / "run")]
    with pytest.raises(UserError, match=r"own batch_size=64; leave batch_size=128 out"):
        train(parse([*resume, "--batch-size", "128"]).config)
    assert parse([*resume, "--batch-size", "64"]).config == parse(resume).config
    given = parse([*resume, "--threads", "1"]).config
    assert (given.loop.threads, given.loop.batch_size) == (1, 64)


@pytest.mark.parametrize("words", [["list", "9" * 5000], ["swap", "-1", "--to", "-1"], ["info", "x" * 9000]])
def test_a_long_value_makes_no_long_line(words: list[str], capsys):
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("tokenmix: ")
    assert said.count("\n") == 1
    assert len(said) < 2100


def test_a_recipe_without_a_name_and_sizes_that_are_words(capsys):
    """What the fuzz found: `--recipe ""` and `depth={}` were tracebacks."""
    assert main(["train", "--recipe", ""]) == 2
    assert main(["info", "vit_nano", "--model-kwargs", "depth={}"]) == 2
    assert main(["info", "vit_nano", "--model-kwargs", "depth=\ufeff"]) == 2
    assert [line.partition(" ")[0] for line in capsys.readouterr().err.splitlines()] == ["tokenmix:"] * 3


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
        ImportError("libx.so: Too many open files"),
        RuntimeError("unable to open shared memory object in read-write mode: Too many open files (24)"),
        RuntimeError("received 0 items of ancdata"),
    ],
)
def test_too_many_open_files_is_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch, capsys):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("tokenmix.lab.cli.command.parse", fail)
    assert main(["train"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "raise it: ulimit -n" in said


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS])
def test_a_disk_that_refuses_a_write_is_one_line(number: int, monkeypatch: pytest.MonkeyPatch, capsys):
    """A write, unlike an opening, has no name of a file in its error."""

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("tokenmix.lab.cli.command.parse", fail)
    assert main(["train"]) == 2
    said = capsys.readouterr().err
    assert said == f"tokenmix: {os.strerror(number)}: while writing; {DISK_ERRORS[number]}\n"


def test_control_characters_of_classes_and_files_are_not_printed(capsys: pytest.CaptureFixture[str]):
    for result in ({"\x1b]0;A\x07": "\x1b[31m"}, [{"file": "a\x1b]0;B\x07.png", "top": {"\x1b[1m": 0.5}}]):
        print_result(result)
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "\x07" not in said


def test_names_of_mixers_without_pytorch_are_those_of_the_table(monkeypatch):
    names = tokenmix.list_mixers()
    monkeypatch.delitem(sys.modules, "tokenmix.layers.table")
    assert sorted(known_mixers()) == sorted(names)
