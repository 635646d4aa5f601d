"""Learning from a trained model: by logits, with labels or without, and layer by layer."""

import copy
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models import save_for_hf
from torch import Tensor, nn

import tokenmix
from tokenmix.distillation.outputs import distillation_loss, layer_loss, watched_layers
from tokenmix.errors import UserError
from tokenmix.lab.registry import get_task
from tokenmix.lab.train.checkpoint import read_weights
from tokenmix.lab.train.distillation import DistillingTask
from tokenmix.lab.train.load import load_run, load_task
from tokenmix.lab.train.run import evaluate, train
from tokenmix.lab.train.sources import make_config
from tokenmix.layers import SelfAttention
from tokenmix.swap import swap_attention

SHORT: dict[str, Any] = {
    "data": "digits",
    "epochs": 1,
    "max_steps": 3,
    "batch_size": 16,
    "limit": 64,
    "limit_eval": 32,
    "threads": 1,
    "device": "cpu",
    "augment": "none",
}
SMALL = {"model": "vit_nano", "model_kwargs": {"depth": 2}}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(make_config(**SHORT, **SMALL, seed=5, out=tmp_path_factory.mktemp("taught") / "vit"), quiet=True)


def rows(run: Path, column: str) -> list[float]:
    header, *lines = [line.split(",") for line in (run / "metrics.csv").read_text().splitlines()]
    return [float(line[header.index(column)]) for line in lines if line[header.index(column)]]


def student(teacher: Path, **changes: Any) -> tuple[Any, Any]:
    """A task with its teacher, and a batch."""
    config = make_config(**{**SHORT, "teacher": str(teacher), **changes}, **SMALL)
    kind = get_task(config.task)
    data = kind.load_data(config)
    description = json.loads(json.dumps(data.describe()))
    task = kind(kind.build_model(config, description), config, description)
    task.learn_from(load_task(teacher), data, ())
    return task, next(iter(data.train_batches(batch_size=8, epoch=0, start=0)))


def test_the_divergence_is_a_plain_sum() -> None:
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    total = 0.0
    for s, t in zip(ours.tolist(), theirs.tolist()):
        q, p = ([math.exp(v / 3) / sum(math.exp(w / 3) for w in row) for v in row] for row in (s, t))
        total += sum(b * math.log(b / a) for a, b in zip(q, p))
    assert distillation_loss(ours, theirs, 3.0).item() == pytest.approx(9 * total / 3, rel=1e-6)
    assert distillation_loss(ours, theirs, 3.0, torch.tensor(2.0)).item() == pytest.approx(9 * total / 2, rel=1e-6)
    assert distillation_loss(ours, ours + 7, 3.0).item() == pytest.approx(0, abs=1e-6)


def test_without_labels(teacher: Path) -> None:
    task, batch = student(teacher, distill=1.0)
    wrong = {**batch, "label": torch.full_like(batch["label"], -7)}
    (loss, logs), (other, _) = task.loss(batch), task.loss(wrong)
    assert torch.equal(loss, other)
    assert torch.equal(loss.detach(), logs["distillation"])
    half, _ = student(teacher, distill=0.5)
    half.model.load_state_dict(task.model.state_dict())
    alone, _ = student(teacher)
    alone.model.load_state_dict(task.model.state_dict())
    alone.teacher = None
    entropy = alone.loss(batch)[0]
    torch.testing.assert_close(half.loss(batch)[0], 0.5 * entropy + 0.5 * loss)


def test_the_teacher_sees_images_as_its_run_prepared_them(teacher: Path) -> None:
    task, batch = student(teacher)
    image = batch["image"]
    mean, std = (torch.tensor(task.data[key]).view(-1, 1, 1) for key in ("mean", "std"))
    task.teacher.data = {**task.teacher.data, "mean": [0.1], "std": [0.7]}
    wanted = task.teacher.model((image * std + mean - 0.1) / 0.7)
    torch.testing.assert_close(task.teacher_logits(task.teacher, batch), wanted)


def test_a_run_learns_its_teachers_logits_and_needs_it_no_more(teacher: Path, tmp_path: Path) -> None:
    gone = tmp_path / "teacher"
    shutil.copytree(teacher, gone)
    config = make_config(
        **{**SHORT, "max_steps": 30, "epochs": 8, "limit": 64},
        **SMALL,
        teacher=str(gone),
        distill=1.0,
        lr=3e-3,
        log_every=1,
        smoothing=0.0,
        out=tmp_path / "run",
    )
    run = train(config, quiet=True)
    divergences = rows(run, "train_distillation")
    assert sum(divergences[-4:]) < 0.3 * sum(divergences[:4])
    for name, value in read_weights(gone).items():
        assert torch.equal(value, read_weights(teacher)[name])
    shutil.rmtree(gone)
    assert evaluate(run)["accuracy"] == json.loads((run / "result.json").read_text())["metrics"]["accuracy"]


class Residual(nn.Module):
    """Two layers that know each other's output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SelfAttention(8, num_heads=2), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first.mix(x)[0]
        return x + self.second(x, x, x, need_weights=False)[0]


def test_each_layer_gets_the_teachers_input() -> None:
    torch.manual_seed(0)
    teacher, model, x = Residual(), Residual(), torch.randn(2, 5, 8)
    swap_attention(model, "external", example_inputs=(x,))
    first = teacher.first(x)
    y = x + first
    second = teacher.second(y, y, y)[0]
    wanted = [((model.first(x) - first) ** 2).sum() / (first**2).sum()]
    given = model.second(y, y, y)[0]
    wanted.append(((given - second) ** 2).sum() / (second**2).sum())
    with watched_layers(teacher, ["first", "second"]) as calls:
        teacher(x)
    loss = layer_loss(model, calls)
    torch.testing.assert_close(loss, torch.stack(wanted).mean())
    assert "mix" not in vars(teacher.first)
    loss.backward()
    assert all(p.grad is None for p in teacher.parameters())


def test_layers_that_pass_scores_take_those_of_the_student() -> None:
    torch.manual_seed(0)
    teacher = tokenmix.create_model("vit_nano", img_size=8, depth=2)
    model, x = copy.deepcopy(teacher), torch.randn(2, 3, 8, 8)
    names = [row.name for row in swap_attention(model, "less", mixer_kwargs={"residual": True}).rows]
    for p in model.parameters():
        nn.init.normal_(p, std=0.1)
    with watched_layers(teacher, names) as calls:
        teacher(x)
    first, second = (model.get_submodule(name) for name in names)
    outs, carry = [], None
    for layer, call in zip((first, second), calls, strict=True):
        out, carry = layer.mix(call.args[0], carry)  # type: ignore[operator]
        outs.append((out - call.out).square().sum() / call.out.square().sum())
    torch.testing.assert_close(layer_loss(model, calls), torch.stack(outs).mean())
    layer_loss(model, calls).backward()
    assert second.residual_scale.grad.abs().sum() > 0  # type: ignore[union-attr, operator]


def test_layers_are_learned_without_labels(teacher: Path, tmp_path: Path) -> None:
    config = make_config(
        **{**SHORT, "max_steps": 24, "epochs": 8},
        validation=16,
        init_from=teacher,
        teacher=str(teacher),
        swap="external",
        distill_from="layers",
        lr=5e-3,
        out=tmp_path / "run",
    )
    run = train(config, quiet=True)
    losses = rows(run, "val_layer_loss")
    result = json.loads((run / "result.json").read_text())
    assert losses[-1] < 0.8 * losses[0]
    assert result["monitor"] == "layer_loss"
    assert result["validation"]["layer_loss"] == min(losses)
    assert 0 < result["metrics"]["layer_loss"] < 1, "of the test samples"
    before, after = read_weights(teacher), read_weights(run)
    assert all(torch.equal(after[name], before[name]) for name in after if ".mixer." not in name)
    assert "layer_loss" not in evaluate(run)


def test_layers_first_and_then_logits(teacher: Path, tmp_path: Path) -> None:
    layers = make_config(
        **SHORT,
        init_from=teacher,
        swap="external",
        teacher=str(teacher),
        distill_from="layers",
        out=tmp_path / "layers",
    )
    start = train(layers, quiet=True)
    tuned = make_config(**SHORT, init_from=start, teacher=str(teacher), distill=1.0, out=tmp_path / "tuned")
    run = train(tuned, quiet=True)
    assert load_run(run)[1].swap.swap == "external", "the second run takes the swap of the first"
    weights, before = read_weights(run), read_weights(start)
    assert weights.keys() == before.keys()
    assert any(not torch.equal(weights[name], before[name]) for name in weights if ".mixer." not in name)
    assert 0 <= evaluate(run)["accuracy"] <= 1


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_model_of_timms_by_name(tmp_path: Path) -> None:
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=4, in_chans=1, num_classes=10, embed_dim=32, depth=1, num_heads=2
    )
    arguments = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 32, "depth": 1, "num_heads": 2}
    save_for_hf(model, str(tmp_path / "kept"), model_args=arguments, safe_serialization=True)
    config = make_config(**SHORT, **SMALL, teacher=f"local-dir:{tmp_path / 'kept'}", out=tmp_path / "run")
    run = train(config, quiet=True)
    assert rows(run, "train_distillation")
    assert len(load_run(run)[0].blocks) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher": "runs/nowhere"}, "no run folder runs/nowhere to distill from, and no timm model of that name"),
        ({"teacher": "vit_nano"}, "vit_nano has no pretrained weights"),
        ({"img_size": 12}, r"was trained with img_size=\[8, 8\] and this run has \[12, 12\]; give another --img-size"),
        ({"distill_from": "layers"}, "distill_from=layers trains the layers that are swapped in; give --swap MIXER"),
        ({"distill_from": "layers", "swap": "external", "strategy": "fsdp"}, "give --strategy ddp"),
        ({"distill_from": "layers", "swap": "external", "mixup": 0.2}, "leave mixup out"),
        ({"teacher": "vit/model.safetensors"}, "give the folder of a run, a name of timm's"),
        (
            {"teacher": "local-dir:nowhere"},
            "local-dir:nowhere could not be read .*: give local-dir:FOLDER of its config",
        ),
        ({"teacher": None, "distill": 0.2}, r"distill=0\.2 needs a teacher; give --teacher RUN"),
        ({"distill": 0.0}, "distill must be"),
        ({"temperature": 0.0}, "temperature must be a positive number"),
    ],
)
def test_what_does_not_fit_is_one_line(teacher: Path, tmp_path: Path, changes: Any, message: str) -> None:
    values = {**SHORT, **SMALL, "teacher": str(teacher), "out": tmp_path / "run", **changes}
    with pytest.raises(UserError, match=message) as error:
        train(make_config(**values), quiet=True)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_teacher_of_other_classes_or_another_task(teacher: Path, tmp_path: Path) -> None:
    task, _ = student(teacher)
    task.data = {**task.data, "classes": ["a", "b"]}
    with pytest.raises(UserError, match="knows other classes"):
        task.check_teacher(task.teacher, None)
    (tmp_path / "tiny.txt").write_text("the old cat sees the red dog .\n" * 200)
    shared: dict[str, Any] = {"data": f"text:{tmp_path / 'tiny.txt'}", "seq_len": 16, "vocab_size": 270, "epochs": 1}
    with pytest.raises(UserError, match=r"is a run of image-classification; give one of masked-lm"):
        train(make_config("masked-lm", teacher=str(teacher), out=tmp_path / "run", **shared), quiet=True)


TEXT: dict[str, Any] = {
    "batch_size": 4,
    "max_steps": 3,
    "limit_eval": 4,
    "threads": 1,
    "device": "cpu",
    "epochs": 1,
    "seq_len": 16,
    "vocab_size": 270,
    "log_every": 1,
}
TINY = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64}


def test_masked_words_are_learned_from_a_teacher_at_the_masked_places(tmp_path: Path) -> None:
    (tmp_path / "tiny.txt").write_text("the old cat sees the red dog .\nthe small king loves the great ship .\n" * 200)
    shared = {**TEXT, "data": f"text:{tmp_path / 'tiny.txt'}"}
    heads = {**TINY, "num_attention_heads": 2}
    start = train(
        make_config("masked-lm", model="bert_text_nano", model_kwargs=heads, out=tmp_path / "bert", **shared),
        quiet=True,
    )
    config = make_config(
        "masked-lm",
        model="gmlp_text_nano",
        model_kwargs=TINY,
        teacher=str(start),
        distill=1.0,
        out=tmp_path / "run",
        **{**shared, "vocab_size": 280},
    )
    run = train(config, quiet=True)
    task = load_task(run)
    saved, data = task.config, task.data
    assert data["vocab_size"] == load_task(start).data["vocab_size"], "the tokenizer is the teacher's"
    assert rows(run, "train_distillation") == rows(run, "train_loss")
    assert isinstance(task, DistillingTask)
    assert task.teacher is None
    other = tmp_path / "other.txt"
    other.write_text("a different text of other words altogether\n" * 300)
    own = train(config.replace(teacher=None, distill=0.5, data=f"text:{other}", out=tmp_path / "own"), quiet=True)
    with pytest.raises(UserError, match=r"has another tokenizer; give --tokenizer .*bert/tokenizer"):
        train(config.replace(tokenizer=own / "tokenizer", out=tmp_path / "none"), quiet=True)
    with pytest.raises(UserError, match="takes 16 tokens; give --seq-len 16"):
        train(config.replace(seq_len=32, out=tmp_path / "none"), quiet=True)
    assert saved.options.teacher == str(start)


def test_labelled_texts(tmp_path: Path) -> None:
    for part in ("train", "test"):
        (tmp_path / f"{part}.csv").write_text("text,label\n" + "the cat is good,yes\nthe dog is bad,no\n" * 40)
    shared = {**TEXT, "data": f"csv:{tmp_path}", "model": "gmlp_text_nano", "model_kwargs": TINY}
    start = train(make_config("text-classification", out=tmp_path / "start", **shared), quiet=True)
    run = train(make_config("text-classification", out=tmp_path / "run", teacher=str(start), **shared), quiet=True)
    assert len(rows(run, "train_distillation")) == 3
