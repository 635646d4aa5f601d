"""What is swapped, what is left, what is refused, and that a refusal leaves the model as it was."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import tokenmix
from tokenmix.errors import UserError
from tokenmix.lab.cli import main
from tokenmix.layers import MIXERS, SelfAttention
from tokenmix.swap import AttentionLayout, SwapReport, register_adapter, registry
from tokenmix.swap.adapter import CROSS
from tokenmix.swap.probe import check_runs


def kinds(model: Any) -> list[str]:
    return [type(block.attn).__name__ for block in model.blocks]


@pytest.mark.parametrize(
    "where", ["blocks.1.*", ["blocks.1.attn"], lambda name, module: name.endswith("1.attn") and module.num_heads == 2]
)
def test_where_is_a_glob_names_or_a_function(make: Callable[..., Any], where: Any) -> None:
    model = make(depth=3)
    report = tokenmix.swap_attention(model, "external", where)
    assert [row.name for row in report.rows] == ["blocks.1.attn"]
    assert kinds(model) == ["Attention", "SwappedAttention", "Attention"]


@pytest.mark.one_fast
@pytest.mark.parametrize("name", MIXERS)
def test_every_mixer_goes_in_and_compiles_whole(make: Callable[..., Any], name: str) -> None:
    model = make(depth=1, class_token=False, global_pool="avg", num_heads=1).eval()
    report = tokenmix.swap_attention(model, name)
    assert report.rows[0].num_tokens == 16
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("mixer", "kwargs", "words"),
    [
        ("extrnal", {}, "did you mean external"),
        (nn.Linear, {}, "subclass of Mixer"),
        ("external", {"where": "layers.*"}, "blocks.0.attn"),
        ("external", {"where": []}, "matches no attention"),
        ("external", {"where": lambda name, module: False}, "the function matches no attention"),
        ("external", {"where": ["blocks.0.atn"]}, "blocks.0.attn"),
        ("external", {"mixer_kwargs": {"slots": 3}}, "no argument 'slots'"),
        ("external", {"example_inputs": (torch.zeros(1, 3, 9, 9),)}, "do not match the model"),
        ("sagan", {}, "class token"),
        ("gating", {"num_tokens": 9}, "does not run"),
    ],
)
def test_refusals_leave_the_model_as_it_was(
    make: Callable[..., Any], mixer: Any, kwargs: dict[str, Any], words: str
) -> None:
    model = make()
    before = list(model.modules())
    with pytest.raises(UserError, match=words) as refusal:
        tokenmix.swap_attention(model, mixer, **kwargs)
    assert "\n" not in str(refusal.value)
    assert list(model.modules()) == before


class Decoder(nn.Module):
    """Attention on itself, on other tokens, and on those to come."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.other, self.causal = (nn.MultiheadAttention(32, 2, batch_first=True) for _ in range(3))

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        x = x + self.own(x, x, x, need_weights=False)[0]
        x = x + self.other(x, memory, memory, need_weights=False)[0]
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return x + self.causal(x, x, x, attn_mask=future, is_causal=True, need_weights=False)[0]


def test_cross_and_causal_attention_are_left_with_the_reason() -> None:
    example = (torch.randn(1, 5, 32), torch.randn(1, 8, 32))
    report = tokenmix.swap_attention(Decoder(), "external", example_inputs=example)
    assert [row.name for row in report.rows] == ["own"]
    reasons = {skipped.name: skipped.reason for skipped in report.skipped}
    assert "not one tensor" in reasons["other"]
    assert "no causal form" in reasons["causal"]
    assert "left as it was: other" in str(report)
    with pytest.raises(UserError, match="not one tensor"):
        tokenmix.swap_attention(Decoder(), "external", ["other"], example_inputs=example)
    report = tokenmix.swap_attention(
        Decoder(), "self", ["causal"], example_inputs=example, mixer_kwargs={"causal": True}
    )
    assert report.rows[0].kept == ("query", "key", "value", "out")


def test_keys_of_another_width_are_other_tokens() -> None:
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(32, 2, kdim=16, vdim=16)})
    with pytest.raises(UserError, match="width 16"):
        tokenmix.swap_attention(model, "external")


def test_the_number_of_tokens_must_be_known_where_it_is_learned() -> None:
    def holder() -> nn.ModuleDict:
        return nn.ModuleDict({"attn": nn.MultiheadAttention(32, 2, batch_first=True)})

    with pytest.raises(UserError, match="example_inputs or num_tokens"):
        tokenmix.swap_attention(holder(), "gating", ["attn"])
    report = tokenmix.swap_attention(holder(), "gating", ["attn"], num_tokens=9)
    assert report.rows[0].num_tokens == 9
    assert report.rows[0].macs_before == 4 * 9 * 32**2 + 2 * 9**2 * 32
    assert report.macs_before is None
    assert tokenmix.swap_attention(holder(), "external", ["attn"]).rows[0].macs_before is None


def test_a_model_of_shapes_alone_is_counted(make: Callable[..., Any]) -> None:
    """Attention pooling hands a parameter to a module, which the counter must not take for the start of a graph."""
    with torch.device("meta"):
        model = make(class_token=False, global_pool="map")
    expected = tokenmix.swap_attention(make(class_token=False, global_pool="map"), "gating")
    report = tokenmix.swap_attention(model, "gating")
    assert report.macs_after is not None
    assert (report.macs_before, report.macs_after) == (expected.macs_before, expected.macs_after)


def test_one_layer_under_two_names_stays_one(make: Callable[..., Any]) -> None:
    model = make()
    model.blocks[1].attn = model.blocks[0].attn
    report = tokenmix.swap_attention(model, "external")
    assert model.blocks[1].attn is model.blocks[0].attn
    assert len(report.rows) == 1
    assert report.macs_after is not None
    assert report.macs_after - (report.macs_before or 0) == report.rows[0].macs_after - report.rows[0].macs_before  # type: ignore[operator]


def test_scores_that_are_handed_on_go_together_or_not_at_all() -> None:
    model: Any = tokenmix.create_model("mixer_nano", img_size=16, mixer="less")
    with pytest.raises(UserError, match="the swap was undone"):
        tokenmix.swap_attention(model, "external", ["blocks.0.mixer"])
    assert type(model.blocks[0].mixer) is SelfAttention
    assert model.mixer_name == "less"
    tokenmix.swap_attention(model, "external")
    assert model.mixer_name == "external"
    assert model.macs() == tokenmix.create_model("mixer_nano", img_size=16, mixer="external").macs()  # type: ignore[operator]


def test_the_report_is_plain_and_printed(make: Callable[..., Any]) -> None:
    report: SwapReport = tokenmix.swap_attention(make(), "external")
    report_rows = json.loads(json.dumps(report.to_json()))
    assert report_rows["rows"][1]["name"] == "blocks.1.attn"
    assert report_rows["parameters_after"] == report.parameters_after
    assert "whole model" in str(report)
    assert "kept query, out" in str(report)


def test_the_table_has_costs_before_and_after_and_whole_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["swap", "torchvision:vit_b_16", "--to", "multihead-external", "--img-size", "256"]) == 0
    last = "encoder.layers.encoder_layer_11.self_attention"
    (row,) = [line.strip() for line in capsys.readouterr().out.splitlines() if last in line]
    assert re.split(r"  +", row) == [last, "257", "2.36 M -> 4.73 M", "+100 %", "708 M -> 1.314 G", "+86 %"]


def test_a_name_is_no_model() -> None:
    with pytest.raises(UserError, match=r"must be an nn\.Module, got 'deit_tiny_patch16_224'"):
        tokenmix.swap_attention("deit_tiny_patch16_224", "external")  # type: ignore[arg-type]


@pytest.mark.parametrize("target", ["vit_tiny_patch16_224", "torchvision:vit_b_16", "vit_nano", "lavit_nano"])
def test_the_command_shows_what_would_change(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--img-size", "32"] if target != "lavit_nano" else []
    code = main(["swap", target, "--to", "external", *size, "--json"])
    out, error = capsys.readouterr()
    if target == "lavit_nano":
        assert code == 2
        assert "pass scores" in error
        return
    report_rows = json.loads(out)
    assert code == 0
    assert report_rows["parameters_after"] < report_rows["parameters_before"]
    assert report_rows["macs_after"] != report_rows["macs_before"]


def test_the_command_takes_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path / "run")
    budget = ["--data", "digits", "--max-steps", "2", "--limit", "64", "--limit-eval", "32", "--batch-size", "32"]
    assert main(["train", "image-classification", "--model", "vit_nano", *budget, "--out", run]) == 0
    capsys.readouterr()
    assert main(["swap", run, "--to", "gating", "--where", "blocks.[12].*", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["blocks.1.mixer", "blocks.2.mixer"]
    assert main(["swap", run, "--to", "gating", "--img-size", "32"]) == 2
    assert "omit --img-size" in capsys.readouterr().err


def test_the_commands_take_a_run_of_a_network_that_does_not_tell_its_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    module = tmp_path / "small_net.py"
    module.write_text(
        """from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 2, 2)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
        self.head = nn.Linear(8, num_classes)

    def forward(self, x):
        return self.head(self.encoder(self.stem(x).flatten(2).mT).mean(1))
"""
    )
    budget = ["--data", "digits", "--max-steps", "1", "--limit", "32", "--limit-eval", "32", "--batch-size", "32"]
    own = ["--import", str(module)]
    train = ["train", "image-classification", "--model", "small_net:Net", "--img-size", "8"]
    assert main([*own, *train, *budget, "--out", run]) == 0
    capsys.readouterr()
    factory = [*own, "swap", "small_net:Net", "--to", "external", "--json"]
    assert main([*factory, "--img-size", "8"]) == 0
    assert json.loads(capsys.readouterr().out)["macs_after"] > 0
    assert main(factory) == 0
    assert "give img_size (--img-size in a command)" in capsys.readouterr().out
    assert main([*own, "swap", run, "--to", "external", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert 0 < report["macs_after"] != report["macs_before"] > 0
    assert main([*own, "cost", run, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["name"], row["parameters"]) == (run, report["parameters_before"])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["vit_nan", "--to", "external"], "vit_nano"),
        (["torchvision:vit_b_61", "--to", "external"], "vit_b_16"),
        (["vit_nano", "--to", "extrnal"], "external"),
        (["resnet18", "--to", "external"], "no attention that can be swapped"),
        (["resnet18", "--to", "external", "--img-size", "64"], "--img-size"),
        (["torchvision:resnet18", "--to", "external", "--img-size", "64"], "--img-size"),
        (["eva02_tiny_patch14_224", "--to", "external"], "EvaAttention"),
    ],
)
def test_mistakes_of_the_command(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["swap", *args]) == 2
    error = capsys.readouterr().err.strip()
    assert words in error
    assert len(error.splitlines()) == 1


def test_an_error_without_words_says_where_it_arose() -> None:
    class Silent(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError

    undone: list[int] = []
    with pytest.raises(UserError, match=r"the swap was undone: AssertionError: in forward\(\);"):
        check_runs(Silent(), (torch.zeros(1, device="meta"),), lambda: undone.append(1))
    assert undone == [1]


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_cross_attention_that_no_pass_shows_is_left() -> None:
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 2, 64, batch_first=True), 1)
    report = tokenmix.swap_attention(decoder, "external")
    assert [row.name for row in report.rows] == ["layers.0.self_attn"]
    assert [(s.name, s.reason) for s in report.skipped] == [("layers.0.multihead_attn", CROSS)]
    whole = tokenmix.swap_attention(nn.Transformer(32, 2, 1, 1, 64), "external")
    assert [s.name for s in whole.skipped] == ["decoder.layers.0.multihead_attn"]
    with pytest.raises(UserError, match="not one tensor"):
        tokenmix.swap_attention(nn.Transformer(32, 2, 1, 1, 64), "external", ["decoder.layers.0.multihead_attn"])


class Unused(nn.Module):
    """Attention on itself, and one that the forward pass leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.never = (nn.MultiheadAttention(32, 2, batch_first=True) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(x, x, x, need_weights=False)[0]


def test_attention_that_no_pass_shows_must_be_named() -> None:
    model = Unused()
    with pytest.raises(UserError, match=r"tokens is unknown .* name it in a list where=.* \(and 1 more\)"):
        tokenmix.swap_attention(model, "external")
    assert type(model.own) is nn.MultiheadAttention
    assert [row.name for row in tokenmix.swap_attention(model, "external", ["own"]).rows] == ["own"]


def test_attention_that_the_pass_does_not_call_is_left() -> None:
    report = tokenmix.swap_attention(Unused(), "external", example_inputs=(torch.zeros(1, 5, 32),))
    assert [row.name for row in report.rows] == ["own"]
    assert "the forward pass does not call it" in report.skipped[0].reason


@pytest.mark.parametrize(
    ("name", "example"),
    [
        ("pct_cls_nano", (torch.zeros(1, 64, 3),)),
        ("eapct_part_nano", (torch.zeros(1, 64, 3), torch.zeros(1, dtype=torch.long))),
        ("gmlp_nano", None),
    ],
)
def test_models_tell_the_new_mixer(name: str, example: Any) -> None:
    """Also where a property of the model reads it from a part, and after a swap that was undone."""
    model = tokenmix.create_model(name)
    old = model.mixer_name
    with pytest.raises(UserError, match="does not run"):
        tokenmix.swap_attention(model, "gating", num_tokens=9, example_inputs=example)
    assert model.mixer_name == old
    tokenmix.swap_attention(model, "external", example_inputs=example)
    assert model.mixer_name == "external"


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_a_decoder_s_cross_attention_is_seen_to_be_one() -> None:
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 2, 64, batch_first=True), 1)
    report = tokenmix.swap_attention(decoder, "external", example_inputs=(torch.zeros(1, 5, 32), torch.zeros(1, 7, 32)))
    assert [(row.name, row.num_tokens) for row in report.rows] == [("layers.0.self_attn", 5)]
    assert [(s.name, s.reason) for s in report.skipped] == [("layers.0.multihead_attn", CROSS)]


class Rotating(nn.Module):
    """A user's attention: fused projections, a padding mask, positions by argument and two results more."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"qkv": nn.Linear(32, 96), "out": nn.Linear(32, 32)})
        self.heads = 2

    def forward(
        self, angle: torch.Tensor | None, tokens: torch.Tensor, *, keep: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, None, None]:
        q, k, v = self.inner["qkv"](tokens).unflatten(2, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        mask = None if keep is None else keep[:, None, None]
        if angle is not None:
            q, k = q * angle.cos(), k * angle.cos()
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.inner["out"](out.transpose(1, 2).flatten(2)), None, None


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> AttentionLayout:
    monkeypatch.setattr(registry, "ADAPTERS", [*registry.ADAPTERS])
    layout = AttentionLayout(
        classes=["*.Rotating"],
        about="a user's own",
        qkv="inner.qkv",
        out="inner.out",
        num_heads="heads",
        tokens="tokens",
        mask="keep",
        positions=("angle",),
        extra_outputs=2,
    )
    assert register_adapter(layout) is layout
    return layout


@pytest.mark.usefixtures("known")
@torch.no_grad()
def test_an_adapter_of_the_user_s_own() -> None:
    torch.manual_seed(0)
    model, x, keep = nn.ModuleDict({"a": Rotating()}), torch.randn(2, 5, 32), torch.arange(5) < torch.tensor([[5], [3]])
    before = model["a"](None, x, keep=keep)[0]
    with pytest.raises(UserError, match=r"tokens is unknown .* name it in a list where="):
        tokenmix.swap_attention(model, "self")
    row = tokenmix.swap_attention(model, "self", ["a"], num_tokens=5).rows[0]
    assert row.kept == ("query", "key", "value", "out")
    after = model["a"](None, x, keep=keep)
    assert after[1:] == (None, None)
    torch.testing.assert_close(after[0][keep], before[keep], rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="angle brings positions"):
        model["a"](torch.ones(()), x)
    tokenmix.swap_attention(dropped := nn.ModuleDict({"a": Rotating()}), "self", ["a"], drop="positions")
    assert dropped["a"](torch.ones(()), x)[0].shape == x.shape


class Fused(nn.Module):
    """Attention with a fused projection, in the order of the three or of the heads."""

    def __init__(self, heads_first: bool) -> None:
        super().__init__()
        self.qkv, self.o, self.heads, self.heads_first = nn.Linear(32, 96), nn.Linear(32, 32), 4, heads_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = (4, 3, 8) if self.heads_first else (3, 4, 8)
        parts = self.qkv(x).unflatten(-1, sizes)
        q, k, v = parts.permute(3, 0, 2, 1, 4) if self.heads_first else parts.permute(2, 0, 3, 1, 4)
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("heads_first", [False, True])
def test_projections_that_an_adapter_misreads_are_noted(heads_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "ADAPTERS", [*registry.ADAPTERS])
    torch.manual_seed(0)
    register_adapter(AttentionLayout(classes=[Fused], qkv="qkv", out="o", num_heads="heads"))
    model, x = nn.Sequential(Fused(heads_first)), torch.randn(1, 6, 32)
    notes = tokenmix.swap_attention(model, "self", example_inputs=x).notes
    assert [note.startswith("softmax attention with the projections of 0") for note in notes] == [True] * heads_first


def test_a_mixer_that_was_swapped_in_keeps_its_weights() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=2)
    tokenmix.swap_attention(model, "external", ["blocks.0.attn"])
    before = {name: value.clone() for name, value in model.blocks[0].state_dict().items()}
    report = tokenmix.swap_attention(model, "external")
    assert [row.name for row in report.rows] == ["blocks.1.attn"]
    assert all(torch.equal(value, before[name]) for name, value in model.blocks[0].state_dict().items())
    with pytest.raises(UserError, match=r"it is this external already.*\(and 1 more\)"):
        tokenmix.swap_attention(model, "external")
    assert len(tokenmix.swap_attention(model, "external", mixer_kwargs={"num_slots": 5}).rows) == 2


def test_a_bracket_holds_no_range_of_numbers() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=12)
    with pytest.raises(UserError, match="a bracket of a glob holds single characters"):
        tokenmix.swap_attention(model, "external", "blocks.[6-11].*")
    assert len(tokenmix.swap_attention(model, "external", "blocks.[6-9].*").rows) == 4


class LaterFused(Fused):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def test_every_adapter_of_a_model_is_looked_at_and_the_modules_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "ADAPTERS", [*registry.ADAPTERS])
    torch.manual_seed(0)
    for kind in ("Fused", "LaterFused"):
        register_adapter(AttentionLayout(classes=[f"*.{kind}"], qkv="qkv", out="o", num_heads="heads"))
    later = LaterFused(True).train()
    later.o.eval()
    model = nn.Sequential(Fused(False), later)
    (note,) = tokenmix.swap_attention(model, "external", example_inputs=torch.randn(1, 6, 32)).notes
    assert note.startswith("softmax attention with the projections of 1")
    assert (later.training, later.qkv.training, later.o.training) == (True, True, False)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"qkv": "to_qkv", "num_heads": "heads"}, "its projections are not to_qkv, o, .* it has qkv, o"),
        ({"qkv": "qkv"}, "it has no num_heads; let num_heads in its adapter name the number of heads"),
    ],
)
def test_an_adapter_of_wrong_names_is_one_line(layout: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "ADAPTERS", [*registry.ADAPTERS])
    register_adapter(AttentionLayout(classes=["*.Fused"], out="o", **layout))
    with pytest.raises(UserError, match=message):
        tokenmix.swap_attention(nn.Sequential(Fused(False)), "self", example_inputs=torch.zeros(1, 6, 32))


def test_an_image_size_that_the_model_does_not_take_changes_nothing() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1)
    before = repr(model)
    with pytest.raises(UserError, match="img_size=48 does not match the model"):
        tokenmix.swap_attention(model, "external", img_size=48)
    assert repr(model) == before


def test_adapters_and_drops_that_are_none() -> None:
    with pytest.raises(UserError, match="takes an object of AttentionAdapter"):
        register_adapter(AttentionLayout)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="drop='rope' is unknown"):
        tokenmix.swap_attention(Unused(), "external", ["own"], drop="rope")  # type: ignore[arg-type]


def test_inputs_may_be_named_or_one_tensor() -> None:
    inputs = {"x": torch.zeros(1, 5, 32)}
    for given in (inputs, inputs["x"]):
        assert tokenmix.swap_attention(Unused(), "external", example_inputs=given).rows[0].num_tokens == 5
    with pytest.raises(UserError, match="example_inputs do not match the model"):
        tokenmix.swap_attention(Unused(), "external", example_inputs={"y": torch.zeros(1, 5, 32)})


def test_the_command_drops_positions(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["swap", "eva02_tiny_patch14_224", "--to", "external"]
    assert main(args) == 2
    assert "drop='positions'" in capsys.readouterr().err
    assert main([*args, "--drop", "positions"]) == 0
    assert "positions dropped: rope" in capsys.readouterr().out


def test_a_module_under_two_names_keeps_its_weights() -> None:
    """A pass on the meta device lends the model other tensors and takes them back."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = SelfAttention(8, num_heads=2)
            self.second, self.read = self.first, nn.Linear(8, 8)
            self.write = nn.Linear(8, 8)
            self.write.weight = self.read.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.write(self.second(x + self.first(self.read(x))))

    model = Twice()
    report = tokenmix.swap_attention(model, "external", example_inputs=(torch.zeros(1, 5, 8),))
    assert model.first is model.second
    assert model.write.weight is model.read.weight
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert report.macs_after == 2 * 5 * 64 + 2 * model.first.macs(5)
    assert model(torch.randn(2, 5, 8)).isfinite().all()


def test_attention_of_unknown_classes_is_listed(make: Callable[..., Any]) -> None:
    class MyAttention(nn.Linear):
        pass

    model = make(depth=2)
    model.blocks[1].attn = MyAttention(32, 32)
    report = tokenmix.swap_attention(model, "external")
    assert [row.name for row in report.rows] == ["blocks.0.attn"]
    assert [(one.name, "its class is unknown" in one.reason) for one in report.skipped] == [("blocks.1.attn", True)]


def test_what_a_user_changed_on_an_attention_is_told(make: Callable[..., Any]) -> None:
    hooked, scaled, patched = make(depth=2), make(depth=2), make(depth=2)
    hooked.blocks[0].attn.qkv.register_forward_hook(lambda module, args, out: 0.5 * out)
    assert "forward hooks on blocks.0.attn are gone" in tokenmix.swap_attention(hooked, "self").notes[0]
    scaled.blocks[0].attn.scale *= 4
    rows = tokenmix.swap_attention(scaled, "self").rows
    assert [row.kept for row in rows] == [("value", "out"), ("query", "key", "value", "out")]
    assert "not 1 / sqrt(d)" in rows[0].why
    patched.blocks[0].attn.forward = lambda x, **kwargs: x
    report = tokenmix.swap_attention(patched, "self")
    assert "forward was replaced" in report.skipped[0].reason
    assert [row.name for row in report.rows] == ["blocks.1.attn"]


@torch.no_grad()
def test_heads_that_do_not_divide_the_width() -> None:
    layer = timm.layers.Attention(34, num_heads=4, attn_head_dim=8)
    report = tokenmix.swap_attention(nn.Sequential(layer), "self", example_inputs=(torch.randn(1, 5, 34),))
    assert report.model[0].mixer.num_heads == 2  # type: ignore[index,union-attr]


def test_a_swap_leaves_no_meta_tensors_in_a_model_s_caches() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache: dict[int, Tensor] = {}
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] not in self.cache:
                self.cache[x.shape[1]] = torch.ones(x.shape[1], 16, device=x.device)
            out: Tensor = self.layer(x + self.cache[x.shape[1]])
            return out

    x, model = torch.randn(1, 5, 16), Cached().eval()
    model(x[:, :3])
    tokenmix.swap_attention(model, "external", example_inputs=(x,))
    assert [*model.cache] == [3]
    assert torch.isfinite(model(x)).all()


def test_parts_of_our_models_are_no_unknown_attention() -> None:
    model = tokenmix.create_model("eamlp_nano")
    report = tokenmix.swap_attention(model, "external")
    assert not report.skipped
    assert model.mixer_name == "external"


@torch.no_grad()
def test_a_scale_that_divides_keeps_query_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    class Divided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads, self.scale = 2, 8**0.5
            self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            out = (q @ k.mT / self.scale).softmax(-1) @ v
            return self.proj(out.transpose(1, 2).flatten(2))

    monkeypatch.setattr(registry, "ADAPTERS", [*registry.ADAPTERS])
    register_adapter(AttentionLayout(classes=[Divided], qkv="qkv", out="proj"))
    model, x = nn.Sequential(Divided()), torch.randn(2, 5, 16)
    expected = model(x)
    report = tokenmix.swap_attention(model, "self", example_inputs=(x,))
    assert report.rows[0].kept == ("query", "key", "value", "out")
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
