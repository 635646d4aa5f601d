"""Costs of models, what is estimated before a pass, and the paper's table."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from timm.models import save_for_hf
from torch import nn

from tokenmix import create_model
from tokenmix.errors import UserError
from tokenmix.lab.cli import main
from tokenmix.layers import ExternalAttention2d, SAGANAttention2d, SelfAttention
from tokenmix.layers.table import list_mixers
from tokenmix.profiling import cost, machine
from tokenmix.profiling.cost import cost_table
from tokenmix.profiling.cost_report import eanet_requirements, print_requirements
from tokenmix.profiling.machine import Ceilings, expected_peak, free_memory, peak_memory, too_large
from tokenmix.profiling.target import mixer_with_input, model_with_image
from tokenmix.swap.probe import model_macs

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _known_ceilings(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "SPREAD", math.inf)
    monkeypatch.setattr(cost, "measure_ceilings", lambda *_: Ceilings(1e10, 1e11, 1, "float32", 1 << 20, 64))


# Less-attention needs the scores before it and a Toeplitz gate runs by FFT: the contract's own test counts those.
@pytest.mark.parametrize("name", [name for name in list_mixers() if name not in ("less", "gating-toeplitz")])
def test_equations_of_mixers_agree_with_a_counted_unfused_run(name: str):
    built = mixer_with_input(name, 64, 64, num_heads=4)
    assert model_macs(built.module, (built.x,)) == pytest.approx(built.counts()["macs"], rel=0.01)


@pytest.mark.parametrize("name", ["mixer_nano", "gmlp_nano", "eamlp_nano", "lavit_nano", "vit_nano", "eanet_resnet50"])
def test_equations_of_models_agree_with_a_counted_unfused_run(name: str):
    built = model_with_image(name, 32)
    assert model_macs(built.module, (built.x,)) == pytest.approx(built.counts()["macs"], rel=0.01)


def test_fused_attention_of_another_model_is_counted():
    built = model_with_image("vit_tiny_patch16_224", 64)
    n, width, depth = 17, 192, 12
    block = n * (4 + 8) * width**2 + 2 * n * n * width
    assert built.counts()["macs"] == depth * block + 16 * 3 * 16**2 * width + width * 1000


def test_models_are_measured_at_the_sizes_asked_for():
    table = cost_table(["gmlp_nano", "vit_nano"], [32, 64], repeats=1)
    assert (table.axis, table.dim, table.reference) == ("pixels", None, "gmlp_nano")
    small, large = table.row("gmlp_nano", 32), table.row("gmlp_nano", 64)
    # The gates grow with the tokens: 16 times as many products among them, and more weights.
    assert (large.macs or 0) > 4 * (small.macs or 0)
    assert (large.parameters or 0) > (small.parameters or 0)
    assert table.crossovers == {}
    power = table.exponents["gmlp_nano"]
    assert power is not None
    assert small.forward is not None
    assert large.forward is not None
    assert large.forward.median / small.forward.median == pytest.approx(4**power)


def test_own_size_is_taken_if_none_is_given():
    for name in ("gmlp_small", "mobilenetv3_small_100", "torchvision:vit_b_16", "torchvision:resnet18"):
        assert model_with_image(name, device="meta").x.shape == (1, 3, 224, 224)


# Of fewer tokens self-attention writes its map in tiles, inside an operator: scratch, which is not estimated.
@pytest.mark.parametrize(
    ("name", "n"), [("self", 2048), ("self-double", 512), ("external", 512), ("gating-toeplitz", 512)]
)
def test_estimated_memory_is_about_what_is_taken(name: str, n: int):
    built = mixer_with_input(name, 32, n)
    built.step()
    weights = sum(p.nbytes for p in built.module.parameters()) + built.x.nbytes
    taken, outline = peak_memory(built.step), mixer_with_input(name, 32, n, device="meta")
    assert 0.6 * taken < expected_peak(outline.dry_run("step", CPU)) < 1.7 * (taken + weights)


def test_estimated_memory_of_a_model_holds_its_weights_and_gradients():
    outline = model_with_image("resnet18", 32, device="meta")
    weights = sum(p.nbytes for p in outline.module.parameters())
    estimated = [expected_peak(outline.dry_run(which, CPU)) for which in ("forward", "step")]
    assert weights < estimated[0] < 1.5 * weights
    assert 2 * weights < estimated[1] < 2.5 * weights


def test_nothing_is_computed_or_taken_to_estimate():
    # A gate of 10^12 numbers.
    outline = mixer_with_input("gating", 16, 1_000_000, device="meta")
    assert expected_peak(outline.dry_run("step", CPU)) > 2 * 4 * 10**12


def test_storage_is_let_go_when_nothing_holds_it():
    def build():
        x = torch.empty(1000)
        return lambda: _chain(x)

    assert expected_peak(build) == 3 * 4000


def _chain(x: torch.Tensor) -> torch.Tensor:
    y = x
    for _ in range(10):
        y = y + 1.0
    return y


def test_cell_that_does_not_fit_is_left_out_with_a_footnote(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(cost, "free_memory", lambda: 8 << 20)
    assert main(["cost", "self-double", "--tokens", "16,512", "--dim", "16"]) == 0
    out = capsys.readouterr().out
    assert "self-double at 512 tokens was not run: it needs about" in " ".join(out.split())
    assert "self at 512" not in out
    # Its parameters and multiply-adds need no memory.
    assert out.count("-*") == 4 + 5


def test_free_memory_is_that_of_the_machine():
    free = free_memory()
    assert free is None or free > 1 << 20
    assert too_large(100, None) == ""
    assert too_large(79, 100) == ""
    assert "100 B" in too_large(81, 100)


def _of(name: str):
    return SimpleNamespace(**eanet_requirements()[name])


def test_the_table_has_counts_of_ours_and_no_remembered_figures(capsys):
    attention = _of("self-attention, one head")
    assert attention.parameters == 1_048_576
    assert attention.macs / 1e9 == pytest.approx(292.06, abs=0.005)
    untied, tied = _of("external attention, untied"), _of("external attention, hard tie")
    assert (untied.parameters, tied.parameters) == (591_360, 558_592)
    assert untied.macs == tied.macs
    assert tied.macs / 1e9 == pytest.approx(9.66, abs=0.005)
    print_requirements(as_json=False)
    printed = capsys.readouterr().out
    assert "All figures are counted from our layers" in printed
    assert not any(name in printed for name in ("remembered", "[M]", "DANet", "APC", "ACF", "79.5"))


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("self-attention, one head", lambda: SelfAttention(512, num_heads=1, qkv_bias=False, device="meta")),
        ("SAGAN, compact", lambda: SAGANAttention2d(512, variant="compact", device="meta")),
        ("SAGAN, paper", lambda: SAGANAttention2d(512, variant="paper", device="meta")),
        ("SAGAN, official", lambda: SAGANAttention2d(512, device="meta").eval()),
        ("external attention, untied", lambda: ExternalAttention2d(512, device="meta").eval()),
    ],
)
def test_counts_of_the_published_table_agree_with_a_counted_run(name: str, layer: object):
    built: nn.Module = layer()  # type: ignore[operator]
    shape = (1, 128 * 128, 512) if isinstance(built, SelfAttention) else (1, 512, 128, 128)
    # Spectral norm divides weights by a product of its own, some millionths of the whole.
    assert model_macs(built, (torch.empty(shape, device="meta"),)) == pytest.approx(_of(name).macs, rel=1e-4)


def test_published_table_is_printed(capsys: pytest.CaptureFixture[str]):
    assert main(["cost", "--table", "eanet"]) == 0
    assert "591,360" in capsys.readouterr().out
    assert main(["cost", "--table", "eanet", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 2
    assert len(document["rows"]) == 6


def test_a_model_in_hand_is_measured_next_to_one_by_name():
    model = create_model("vit_nano", img_size=64, depth=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    table = cost_table({"mine": model, "vit_nano": "vit_nano"}, [32], repeats=1)
    assert [row.name for row in table.rows] == ["mine", "vit_nano"]
    assert 0.4 < table.row("mine", 32).macs / table.row("vit_nano", 32).macs < 0.6
    assert table.row("mine", 32).forward is not None
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(UserError, match="Linear: its input is no image; give a model of images"):
        cost_table({"mine": nn.Linear(3, 4)})


def test_a_model_of_a_folder_is_measured(tmp_path: Path) -> None:
    """A ResNet, which has no argument for the size of images."""
    save_for_hf(create_model("test_resnet"), tmp_path, safe_serialization=True)
    row = cost_table(f"local-dir:{tmp_path}", 32, repeats=1).rows[0]
    assert row.macs == model_with_image("test_resnet", 32).counts()["macs"]
