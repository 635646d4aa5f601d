"""The doctor finds planted bugs by the property that is meant to find them, and a sound layer healthy."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import planted
import pytest
import strangers
import torch
from torch import nn

from tokenmix import layers
from tokenmix.errors import UserError
from tokenmix.layers import Mixer
from tokenmix.testing import PROPERTIES, Advice, Builder
from tokenmix.testing import doctor as doctor_module
from tokenmix.testing.doctor import doctor, print_report
from tokenmix.testing.harness import noise
from tokenmix.testing.properties import graphs
from tokenmix.testing.properties.graphs import best_backend, compiled
from verbs import printed, refused


@pytest.fixture(autouse=True)
def _captured_only(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor compiles for seconds: only slow tests wait for it."""
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr(graphs, "best_backend", lambda: "aot_eager")


SIZES: Any = {"dim": 32, "num_tokens": 16}


@pytest.mark.parametrize(("layer", "name"), planted.PLANTED.items(), ids=lambda v: getattr(v, "__name__", v))
def test_finds_the_planted_bug(layer: type[nn.Module], name: str) -> None:
    report = doctor(f"planted:{layer.__name__}", only={name}, **SIZES)
    assert (report.advised if {name, layer} & planted.ADVICE else report.failed) == [name]
    assert PROPERTIES[name].cause in report.verdicts[0].explanation()


class Rounded(nn.Module):
    """A gate without dimensions, of levels with a straight-through gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate * (x + (x.round() - x).detach())


def test_slopes_of_a_scalar_and_of_a_straight_through_layer() -> None:
    PROPERTIES["slopes"].check(Rounded, torch.randn(3, 8, 8))


def test_an_ignored_mask_is_not_blamed_on_its_polarity() -> None:
    masks = {"mask-polarity", "mask-padding", "mask-zero", "mask-empty"}
    for layer, sizes in (("IgnoredMask", SIZES), ("IgnoredMaskOfAStranger", {})):
        report = doctor(f"planted:{layer}", only=masks, **sizes)
        assert set(report.failed) == masks - {"mask-empty"}
        for verdict in report.verdicts:
            if verdict.status == "FAIL":
                assert verdict.explanation() == (
                    "the mask changes nothing. Cause: forward takes a mask and never uses it."
                )


def test_a_pass_does_not_claim_zeros_that_were_not_seen() -> None:
    """A layer that is finite for a sample without any token need not give 0."""
    report = doctor("planted:IgnoredMaskOfAStranger", only={"mask-empty"})
    assert report.named("pass") == ["mask-empty"]
    assert "finite" in report.verdicts[0].explanation()
    assert " 0" not in report.verdicts[0].explanation()


def test_a_mixer_that_states_no_map_is_not_asked_for_one() -> None:
    report = doctor("sound:SoundWithoutMap", only={"map-shape", "map-rows", "map-used"}, **SIZES)
    assert (report.failed, len(report.named("skipped"))) == ([], 3)


def test_a_module_that_exits_is_not_healthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "exits_on_import.py").write_text("raise SystemExit(0)\n")
    (tmp_path / "exits_when_built.py").write_text(
        "import torch\nclass Layer(torch.nn.Module):\n    def __init__(self, dim):\n        raise SystemExit(0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="importing 'exits_on_import' fails with SystemExit: 0"):
        doctor("exits_on_import:Layer")
    with pytest.raises(UserError, match=r"exits_when_built:Layer calls sys.exit\(0\)"):
        doctor("exits_when_built:Layer")


def test_every_property_finds_something() -> None:
    assert set(planted.PLANTED.values()) == set(PROPERTIES)


CAPTURE = {"compile", "export", "onnx"}


def test_finds_nothing_in_a_sound_layer() -> None:
    report = doctor("sound:Sound", only=set(PROPERTIES) - CAPTURE, **SIZES)
    assert (report.failed, report.advised, report.named("skipped")) == ([], [], [])
    assert report.notes == ()
    assert report.layer == "Sound(dim=32)"


MIXERS = [
    name for name in layers.__all__ if issubclass(type(c := getattr(layers, name)), type) and issubclass(c, Mixer)
]


@pytest.mark.parametrize("name", sorted({*MIXERS} - {"Mixer", "SpatialGatingUnit"}))
def test_finds_nothing_in_our_own_layers(name: str) -> None:
    # Of what test_contract.py checks for all of them, what depends on how the doctor builds them.
    report = doctor(f"tokenmix.layers:{name}", only={"shape", "lengths", "bad-input", "device-dtype", "macs"}, **SIZES)
    assert report.failed == []


def test_layers_with_state_are_no_failures() -> None:
    report = doctor("strangers:RunningMean", only={"batch-training", "eval-stable"}, **SIZES)
    assert (report.failed, report.advised) == ([], ["batch-training"])
    assert "and so does mean" in report.verdicts[0].detail
    (verdict,) = doctor("strangers:Recurrent", only={"causality"}, **SIZES).verdicts
    assert (verdict.status, verdict.detail.endswith("measured: causal")) == ("skipped", True)


def test_says_why_it_skips_what_a_strangers_layer_does_not_offer() -> None:
    report = doctor("sound:SoundMemory", only=set(PROPERTIES) - CAPTURE)
    assert (report.failed, report.advised) == ([], [])
    assert "derive it from tokenmix.layers.Mixer" in report.notes[0]
    reasons = {v.property: v.detail for v in report.verdicts if v.status == "skipped"}
    assert reasons["mask-padding"] == "takes no mask"
    assert reasons["equivariance"] == "declares nothing; measured: equivariant"
    assert {"macs", "bad-input", "device-dtype"} <= set(reasons)
    assert len(report.named("pass")) + len(report.named("skipped")) == len(PROPERTIES) - len(CAPTURE)


def test_takes_a_map_where_tokens_do_not_fit() -> None:
    layer = "torch.nn:Conv2d"
    report = doctor(layer, dim=8, num_tokens=12, out_channels=8, kernel_size=3, padding=1, only={"shape", "lengths"})
    assert report.input == (3, 8, 3, 4)
    assert report.failed == []


def test_takes_a_function_that_builds_the_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_factory.py").write_text(
        "from torch import nn\n\ndef build():\n    return nn.Linear(20, 20)\n\nnumber = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    report = doctor("my_factory:build", only={"shape", "arguments"})
    assert report.input == (3, 16, 20)
    assert report.named("pass") == ["shape"]
    with pytest.raises(UserError, match="my_factory:number is a int"):
        doctor("my_factory:number")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("extrnal", "unknown mixer 'extrnal'; did you mean external.*; a layer of yours is module:Class"),
        ("no_such_module:Layer", "cannot import 'no_such_module': no module 'no_such_module'"),
        ("sound:Soundd", r"unknown class in module 'sound': 'Soundd'; did you mean Sound"),
        ("torch.nn:Bilinear", "needs the argument 'in1_features', which the doctor cannot guess"),
        ("torch.nn:Flatten", r"takes neither \(B, N, D\) nor .*; tokens \(3, 16, 32\): the output is \(3, 512\)"),
        ("json:dumps", "needs the argument 'obj'"),
        ("collections:Counter", "gives a Counter, not a torch.nn.Module"),
    ],
)
def test_a_users_mistake_is_one_line_with_the_remedy(target: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        doctor(target)
    assert "\n" not in str(caught.value)


def test_a_layer_that_cannot_be_built_or_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_layer.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(UserError, match="importing 'broken_layer' fails with ZeroDivisionError"):
        doctor("broken_layer:Layer")
    with pytest.raises(UserError, match=r"sound:Sound\(dim=30\).* fails with|takes neither \(B, N, D\) nor"):
        doctor("sound:Sound", dim=30, num_heads=7)
    with pytest.raises(UserError, match="unknown property 'shap'; did you mean shape"):
        doctor("sound:Sound", only={"shap"})


def test_exit_code_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_report("planted:UnusedKey", 32, 16, json=True) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["failed"] == ["gradients"]
    assert {v["status"] for v in report["verdicts"]} >= {"pass", "FAIL"}


def test_the_table_names_property_reason_and_usual_cause(capsys: pytest.CaptureFixture[str]) -> None:
    doctor("planted:InvertedMask", only={"shape", "mask-polarity"}, **SIZES).print()
    text = " ".join(capsys.readouterr().out.split())
    assert "mask-polarity" in text
    assert "FAIL" in text
    assert "1 passed, 1 failed, 0 skipped: mask-polarity" in text


def test_as_a_command_in_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    (tmp_path / "users_layers.py").write_text((Path(__file__).parent / "sound.py").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert "MissingLayer" in refused(capsys, "doctor", "users_layers:MissingLayer")
    assert "did you mean simplified" in refused(capsys, "doctor", "simplfied")
    assert json.loads(printed(capsys, "doctor", "simplified", "--json"))["failed"] == []


def test_leaves_the_callers_random_state_alone() -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    doctor("sound:Sound", only={"seeds", "gradients", "copies", "finite"}, **SIZES)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("layer", ["TakesAnything", "BiasAfterTheMask", "FoldsTheBatch"])
def test_advice_is_no_failure(layer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    only = {planted.PLANTED[getattr(planted, layer)], "shape"}
    monkeypatch.setattr(doctor_module, "doctor", partial(doctor, only=only))
    assert print_report(f"planted:{layer}", 32, 16) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"advice, which does not count as a failure: {(only - {'shape'}).pop()}" in text
    assert print_report(f"planted:{layer}", 32, 16, json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["failed"], report["advised"]) == ([], [*only - {"shape"}])


@pytest.mark.parametrize("layer", ["Gated", "Wrapped"])
def test_a_strangers_right_layer_is_healthy(layer: str) -> None:
    report = doctor(f"strangers:{layer}", only=set(PROPERTIES) - CAPTURE - {"trace"})
    assert (report.failed, report.advised) == ([], [])


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["Gated", "Wrapped", "DependsOnNumbers"])
def test_a_strangers_right_layer_is_healthy_where_it_is_captured(layer: str) -> None:
    assert doctor(f"strangers:{layer}", only={*CAPTURE, "trace", "vmap"}).failed == []


def test_a_layer_that_compiles_in_parts_is_right() -> None:
    x, build = noise(3, 16, 32), Builder(strangers.DependsOnNumbers, {"dim": 32})
    with pytest.raises(
        Advice, match=r"compiles in parts, not with fullgraph=True: .*([Dd]ata-dependent|capture_scalar_outputs)"
    ):
        compiled(build, x, backend="aot_eager")


def test_what_only_inductor_cannot_compile_is_not_blamed_on_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(_: object, __: object, backend: str, **___: object) -> str | None:
        return "RuntimeError: no such header" if backend == "inductor" else None

    monkeypatch.setattr(graphs, "_stopped", stopped)
    with pytest.raises(Advice, match="is captured, but not compiled by inductor: RuntimeError: no such") as caught:
        compiled(Builder(strangers.Gated, {"dim": 32}), noise(3, 16, 32), backend="inductor")
    assert caught.value.cause == "a limit of PyTorch's inductor"


def test_dropout_is_no_difference_under_inductor() -> None:
    options: Any = {}

    def seen(layer: nn.Module, **given: Any) -> nn.Module:
        options.update(given)
        return layer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", seen)
        compiled(Builder(strangers.Gated, {"dim": 32}), noise(3, 16, 32), backend="inductor")
    assert options["options"] == {"fallback_random": True}
    assert options["backend"] == "inductor"


def test_the_best_backend_is_one_that_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no C++ compiler")

    for compiles, backend in ((broken, "aot_eager"), (lambda f, **_: f, "inductor")):
        monkeypatch.setattr(torch, "compile", compiles)
        assert best_backend.__wrapped__() == backend


def test_attention_of_queries_keys_and_values_is_called_with_x() -> None:
    only = {"shape", "batch", "mask-polarity", "mask-full", "arguments", "gradients"}
    report = doctor("torch.nn:MultiheadAttention", only=only)
    assert (report.failed, report.named("skipped")) == ([], [])
    assert report.layer == "MultiheadAttention(embed_dim=32, num_heads=4, batch_first=True)"
    assert report.notes[0].startswith("called as MultiheadAttention(x, x, x, key_padding_mask=~mask)")
    report = doctor("torch.nn:TransformerEncoderLayer", only={"shape", "mask-polarity"})
    assert report.named("pass") == ["shape", "mask-polarity"]
    assert report.notes[0].startswith("called as TransformerEncoderLayer(x, src_key_padding_mask=~mask)")


def test_a_layer_of_other_inputs_is_told_how_to_be_wrapped() -> None:
    with pytest.raises(UserError, match=r"write an nn.Module whose forward\(x\) calls it"):
        doctor("strangers:TwoStreams")


def test_what_a_layer_prints_is_not_in_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor_module, "doctor", partial(doctor, only={"shape"}))
        print_report("strangers:Prints", json=True)
    assert json.loads(capsys.readouterr().out)["failed"] == []


class NotANumber(nn.Linear):
    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.nan


class MeanOfTokens(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1, keepdim=True).expand_as(x)


def test_an_output_that_is_not_finite_is_told_once() -> None:
    report = doctor(f"{__name__}:NotANumber")
    assert list(report.failed) == ["shape"]
    assert {verdict.status for verdict in report.verdicts[1:]} == {"skipped"}


def test_a_layer_without_weights_and_one_token_are_no_failures() -> None:
    assert not doctor(f"{__name__}:MeanOfTokens", only={"arguments"}).failed
    assert not doctor(f"{__name__}:MeanOfTokens", num_tokens=1, only={"lengths"}).failed
    for size in ("dim", "num_tokens"):
        with pytest.raises(UserError, match=f"{size} must be at least 1, got 0"):
            doctor(f"{__name__}:MeanOfTokens", **{size: 0})
