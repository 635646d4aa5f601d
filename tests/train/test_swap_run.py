"""A run whose model has a mixer swapped in: it starts from another run's weights, and its folder rebuilds it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from runs import Killed, stopped_at
from tokenmix.errors import UserError
from tokenmix.lab.cli import main
from tokenmix.lab.train.checkpoint import read_weights
from tokenmix.lab.train.config import SwapConfig
from tokenmix.lab.train.export import export, export_to_hub
from tokenmix.lab.train.load import freeze_all_but, load_run
from tokenmix.lab.train.run import evaluate, predict, train
from tokenmix.lab.train.sources import make_config
from tokenmix.layers import ExternalAttention, GatedMLP
from tokenmix.layers.offset_attention import MaskedBatchNorm
from tokenmix.swap.adapter import SwappedAttention

SHORT: dict[str, Any] = {
    "data": "digits",
    "epochs": 1,
    "max_steps": 3,
    "batch_size": 16,
    "limit": 64,
    "limit_eval": 32,
    "threads": 1,
    "device": "cpu",
}
STILL = {"lr": 1e-12, "min_lr": 0.0, "weight_decay": 0.0}
TIMM = {"model": "vit_tiny_patch16_224", "model_kwargs": {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(make_config(**SHORT, **TIMM, out=tmp_path_factory.mktemp("swap") / "vit"), quiet=True)


def swapped(teacher: Path, out: Path, **changes: Any) -> Path:
    values = {**SHORT, "swap": "external", "swap_kwargs": {"num_slots": 8}, "out": out, **changes}
    return train(make_config(init_from=teacher, **values), quiet=True)


def test_weights_carry_over_and_the_folder_rebuilds_the_model(teacher: Path, tmp_path: Path) -> None:
    run = swapped(teacher, tmp_path / "run", swap_where="blocks.1.*", **STILL)
    model, config, _ = load_run(run)
    assert config.model.model == TIMM["model"], "the model is that of --init-from"
    with pytest.raises(
        UserError, match="loads a model of vit_tiny_patch16_224 with external swapped in or inserted; upload the run"
    ):
        export_to_hub(run)
    layer = model.get_submodule("blocks.1.attn")
    assert isinstance(layer, SwappedAttention)
    assert isinstance(layer.mixer, ExternalAttention)
    assert layer.mixer.macs(4) == 4 * 2 * (32 * 32 + 32 * 8)
    before, after = read_weights(teacher), read_weights(run)
    torch.testing.assert_close(after["blocks.1.attn.mixer.query.weight"], before["blocks.1.attn.qkv.weight"][:32])
    for name in set(before) & set(after):
        torch.testing.assert_close(after[name], before[name])
    assert not [name for name in set(before) - set(after) if not name.startswith("blocks.1.attn.")]
    picture = tmp_path / "one.png"
    Image.new("L", (8, 8), 90).save(picture)
    assert len(predict(run, [picture])) == 1
    assert evaluate(run)["accuracy"] == json.loads((run / "result.json").read_text())["metrics"]["accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize("file_format", ["onnx", "torch-export"])
def test_a_swapped_run_is_exported(teacher: Path, tmp_path: Path, file_format: Any) -> None:
    assert export(swapped(teacher, tmp_path / "run"), file_format).is_file()


def test_a_stopped_run_goes_on_bit_for_bit(teacher: Path, tmp_path: Path) -> None:
    whole = swapped(teacher, tmp_path / "whole", checkpoint_every=1)
    end = stopped_at(3, error=UserError("stopped"))
    with end, pytest.raises(UserError, match="the checkpoint of step 2 is kept"):
        swapped(teacher, tmp_path / "run", checkpoint_every=1)
    run = train(make_config(resume=tmp_path / "run"), quiet=True)
    found, wanted = read_weights(run), read_weights(whole)
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_a_swapped_run_is_where_another_starts(teacher: Path, tmp_path: Path) -> None:
    first = swapped(teacher, tmp_path / "first", swap="gating", swap_kwargs={}, train_only="mixers")
    second = train(make_config(**SHORT, **STILL, init_from=first, out=tmp_path / "second"), quiet=True)
    assert load_run(second)[1].swap == SwapConfig(swap="gating"), "its model, not what of it was trained"
    for name, value in read_weights(first).items():
        torch.testing.assert_close(read_weights(second)[name], value)
    with pytest.raises(UserError, match=r"was trained with --swap gating --swap-where '\*'; give the same"):
        swapped(first, tmp_path / "third")


def test_only_the_mixers_are_trained(teacher: Path, tmp_path: Path) -> None:
    run = swapped(teacher, tmp_path / "run", train_only="mixers", lr=0.01)
    before, after = read_weights(teacher), read_weights(run)
    rest = [name for name in after if ".attn." not in name]
    assert all(torch.equal(after[name], before[name]) for name in rest)
    changed = after["blocks.1.attn.mixer.query.weight"] - before["blocks.1.attn.qkv.weight"][:32]
    assert changed.abs().max() > 1e-3
    with pytest.raises(UserError, match="simplified has no weights"):
        swapped(teacher, tmp_path / "none", swap="simplified", swap_kwargs={}, train_only="mixers")


@pytest.mark.parametrize("mixer", ["external", "gating"])
def test_a_text_model_is_swapped_too(tmp_path: Path, mixer: str) -> None:
    (tmp_path / "tiny.txt").write_text("the old cat sees the red dog .\nthe small king loves the great ship .\n" * 200)
    shared: dict[str, Any] = {
        "data": f"text:{tmp_path / 'tiny.txt'}",
        "seq_len": 16,
        "vocab_size": 270,
        "batch_size": 4,
        "max_steps": 2,
        "limit_eval": 4,
        "threads": 1,
        "device": "cpu",
        "epochs": 1,
    }
    small = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    first = make_config("masked-lm", model="bert_text_nano", model_kwargs=small, out=tmp_path / "bert", **shared)
    start = train(first, quiet=True)
    config = make_config("masked-lm", init_from=start, swap=mixer, swap_where="*.1.*", out=tmp_path / "run", **shared)
    run = train(config, quiet=True)
    layers = [layer.mixer for layer in load_run(run)[0].base_model.layers]  # type: ignore[union-attr]
    assert isinstance(layers[1], {"external": ExternalAttention, "gating": GatedMLP}[mixer])
    assert type(layers[0]) is not type(layers[1])
    wanted = json.loads((run / "result.json").read_text())["metrics"]["perplexity"]
    assert evaluate(run)["perplexity"] == pytest.approx(wanted)
    assert predict(run, ["the old [MASK] sees"])[0]["mask"] == 1
    with pytest.raises(UserError, match=r"output_attentions=True, and swapped layers"):
        load_run(run)[0](input_ids=torch.zeros(1, 4, dtype=torch.long), output_attentions=True)
    with pytest.raises(UserError, match=r"output_attentions=True, and .* replaced the attention"):
        load_run(run)[0].base_model(input_ids=torch.zeros(1, 4, dtype=torch.long), output_attentions=True)


def test_from_the_command_line(teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "train",
        "image-classification",
        "--data",
        "digits",
        "--max-steps",
        "1",
        "--batch-size",
        "16",
        "--limit",
        "32",
        "--limit-eval",
        "16",
        "--device",
        "cpu",
        "--init-from",
        str(teacher),
    ]
    out = ["--out", str(tmp_path / "run")]
    assert main([*words, "--swap", "external", "--swap-where", "blocks.[1-9]*", *out]) == 0
    told = capsys.readouterr().err
    assert "external in place of Attention in 1 layer (blocks.1.attn); projections kept: query, out" in told
    for more, message in (
        (["--swap", "externl"], "unknown mixer 'externl'; did you mean external"),
        (["--swap", "external", "--swap-where", "x*"], "where='x*' matches no attention"),
        (["--swap-where", "blocks.*"], "swap_where='blocks.*' needs a mixer; give --swap MIXER"),
        (["--train-only", "mixers"], "train_only='mixers' needs a mixer"),
        (["--swap", "external", "--swap-kwargs", "num_slot=3"], "has no argument 'num_slot'"),
    ):
        assert main([*words, *more, "--out", str(tmp_path / "none")]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1
    assert not (tmp_path / "none").exists()


class Statistics(torch.nn.Module):
    """Every kind of layer that moves its statistics in training mode, and one that is swapped."""

    def __init__(self) -> None:
        super().__init__()
        norms = [torch.nn.BatchNorm1d(8, affine=affine) for affine in (True, False)]
        spectral = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(8, 8))
        self.frozen = torch.nn.Sequential(*norms, torch.nn.Dropout(0.5), MaskedBatchNorm(8), spectral)
        self.new = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8, affine=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.frozen:
            x = layer(x.unsqueeze(1)).squeeze(1) if isinstance(layer, MaskedBatchNorm) else layer(x)
        return self.new(x)


def test_frozen_layers_keep_their_statistics() -> None:
    model = Statistics().train()
    freeze_all_but(SimpleNamespace(model=model), ["new"])  # type: ignore[arg-type]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        model(torch.randn(16, 8) + 3)
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {"new.1.running_mean", "new.1.running_var", "new.1.num_batches_tracked"}
    assert model.frozen[2].training, "dropout stays"
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["new.0.weight", "new.0.bias"]


def test_a_run_of_new_layers_alone_moves_no_statistic(tmp_path: Path) -> None:
    """Although each epoch is evaluated, which switches modes."""
    short = {**SHORT, "epochs": 2, "max_steps": 4, "limit": 32}
    config = make_config(**short, model="mobilevit_xxs", img_size=32, swap="external", train_only="mixers")
    run = train(config.replace(out=tmp_path / "run"), quiet=True)
    means = [value for name, value in read_weights(run).items() if name.endswith("running_mean")]
    assert len(means) > 20
    assert not any(mean.any() for mean in means)


def test_a_block_is_inserted_and_the_folder_rebuilds_the_model(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(**SHORT, model="resnet18", insert="external", insert_after="layer[12]", out=tmp_path / "run")
    config = config.replace(insert_kwargs={"num_slots": 4})
    run = train(config)
    assert "tokenmix: the output (1, 128, 1, 1) of layer2 is one token" in capsys.readouterr().err
    assert not any("one token" in str(warning.message) for warning in recwarn), "a note, not a warning of Python"
    model, loaded, _ = load_run(run)
    assert loaded.swap.insert_after == "layer[12]"
    assert {n for n, _ in model.named_parameters() if "inserted.gamma" in n} == {
        "layer1.inserted.gamma",
        "layer2.inserted.gamma",
    }
    result = json.loads((run / "result.json").read_text())
    assert evaluate(run, device="cpu")["loss"] == pytest.approx(result["metrics"]["loss"])
    again = train(config.replace(init_from=run, train_only="mixers", out=tmp_path / "again"), quiet=True)
    before, after = (read_weights(folder) for folder in (run, again))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert all(".inserted." in name for name in moved)
    with pytest.raises(UserError, match=r"was trained with --insert external --insert-after 'layer\[12\]'"):
        train(config.replace(insert_after="layer1", init_from=run, out=tmp_path / "other"), quiet=True)


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "resnet18", "insert": "external", "insert_after": "layer[12]", "insert_kwargs": {"num_slots": 4}},
        {"model": "vit_tiny_patch16_224", "swap": "less", "swap_kwargs": {"residual": True}, "img_size": 32},
    ],
)
def test_resume_of_a_changed_model_is_bit_equal_and_inspect_shows_its_maps(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    more: dict[str, Any] = {} if "insert" in changed else {"model_kwargs": {**TIMM["model_kwargs"], "patch_size": 8}}
    config = make_config(**{**SHORT, "max_steps": 6, "checkpoint_every": 2, **changed, **more})
    whole = train(config.replace(out=tmp_path / "whole"), quiet=True)
    with stopped_at(4, "advance"), pytest.raises(Killed):
        train(config.replace(out=tmp_path / "run"), quiet=True)
    resumed = train(make_config(resume=tmp_path / "run"), quiet=True)
    one, two = read_weights(whole), read_weights(resumed)
    assert one.keys() == two.keys()
    assert any(value.any() for name, value in one.items() if name.endswith(("inserted.gamma", "residual_scale")))
    assert all(torch.equal(one[name], two[name]) for name in one)
    Image.new("L", (8, 8), 99).save(tmp_path / "digit.png")
    main(["inspect", str(whole), str(tmp_path / "digit.png"), "--out", str(tmp_path / "maps")])
    blocks = json.loads((tmp_path / "maps" / "numbers.json").read_text())["blocks"]
    places = ["layer1.inserted", "layer2.inserted"] if "insert" in changed else ["blocks.0.attn", "blocks.1.attn"]
    assert [block["name"].removesuffix(".mixer") for block in blocks] == places
    assert len(list((tmp_path / "maps").glob("block-*.png"))) == 2


def test_positions_are_dropped_by_consent_and_the_run_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rotary = {**TIMM, "model": "eva02_tiny_patch14_224"}
    start = train(make_config(**SHORT, **rotary, out=tmp_path / "start"), quiet=True)
    with pytest.raises(UserError, match="rope adds positions"):
        swapped(start, tmp_path / "refused")
    config = make_config(init_from=start, **SHORT, swap="external", swap_drop="positions", out=tmp_path / "run")
    run = train(config)
    assert "positions dropped: rope" in capsys.readouterr().err
    assert json.loads((run / "config.json").read_text())["config"]["swap"]["swap_drop"] == "positions"
