"""LaViT's layout: the counts of the paper, what each layer costs against counted runs, what the user is reported."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tokenmix import UserError, create_model
from tokenmix.layers import LessAttention

# Parameters (M) and GMAC at 224 px that heedless-backbones read off the paper's tables.
PAPER = {"lavit_tiny": (10.9, 1.6), "lavit_small": (22.4, 3.3), "lavit_base": (39.6, 6.1)}


@pytest.mark.parametrize(("name", "paper"), PAPER.items())
def test_counts_are_near_the_papers(name, paper):
    model = create_model(name, device="meta")
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(paper[0], rel=0.03)
    assert model.macs() / 1e9 == pytest.approx(paper[1], rel=0.08)


@pytest.mark.parametrize("name", PAPER)
def test_each_less_attention_layer_pays(name):
    model = create_model(name, device="meta")
    rows = [row for row in model.cost_table() if row.kind == "less"]
    assert len(rows) == sum(isinstance(m, LessAttention) for m in model.modules()) >= 5
    assert all(row.macs < row.vanilla for row in rows)
    assert {row.stage for row in rows} == {2, 3}
    assert model.warnings() == []


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"img_size": (28, 36)},
        {"less_mode": "dense"},
        {"residuals": (False, False, False)},
        {"num_vanilla": (1, 1, 1, 1)},
        {"num_vanilla": (1, 1, 1, 1), "less_mode": "dense"},
        {"key_reductions": (4, 2, 1, 1), "depths": (2, 3, 3, 3), "num_vanilla": (2, 3, 1, 2)},
        {"key_reductions": (1, 1, 1, 1), "depths": (2, 2, 2, 2), "num_vanilla": (1, 1, 1, 1)},
    ],
)
def test_macs_of_blocks_and_model_equal_counted(kwargs):
    model = create_model("lavit_nano", **kwargs).eval()
    with (
        FlopCounterMode(display=False) as counter,
        torch.no_grad(),
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ):
        model(torch.randn(1, 3, *model.img_size))
    assert model.macs() == counter.get_total_flops() / 2
    counts = {name: sum(flops.values()) / 2 for name, flops in counter.get_flop_counts().items()}
    for row in model.cost_table():
        block = f"LaViT.stages.{row.stage}.blocks.{row.block}"
        assert row.macs == counts[block] - counts[f"{block}.mlp"]


@pytest.mark.parametrize(
    ("kwargs", "problem", "remedy", "better"),
    [
        ({"img_size": 320}, "stage 2: 4 of 4", "num_vanilla 6 there", {"num_vanilla": (3, 2, 6, 1)}),
        ({"num_vanilla": (3, 2, 1, 1)}, "stage 2: 5 of 5", "num_vanilla 2 there ends", {"num_vanilla": (3, 2, 2, 1)}),
        ({"less_mode": "dense"}, "stage 2: 4 of 4", "less_mode='factored'", {"less_mode": "factored"}),
    ],
)
def test_what_does_not_pay_is_said(kwargs, problem, remedy, better):
    (line,) = create_model("lavit_small", device="meta", **kwargs).warnings()
    assert problem in line
    assert remedy in line
    assert create_model("lavit_small", device="meta", **{**kwargs, **better}).warnings() == []


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"depths": (1, 1, 2)}, "depths needs one number for each of the 4 stages"),
        ({"residuals": (True, True)}, "residuals needs 3 entries"),
        ({"num_vanilla": (1, 1, 0, 1)}, "stage 2 has depth 4 and num_vanilla 0"),
        ({"num_vanilla": (1, 1, 5, 1)}, "stage 2 has depth 4 and num_vanilla 5"),
        ({"depths": (2, 1, 4, 2)}, "the scores that it transforms must be square"),
        ({"key_reductions": (8, 2, 1, 1)}, "from stage 0 to 1: with key reductions 8 and 2"),
        ({"key_reductions": (8, 2, 1, 1)}, "give 4 and 2, or residuals[0] = False"),
        ({"key_reductions": (0, 2, 1, 1)}, "stage 0 has key reduction 0"),
        ({"num_heads": (1, 2, 5, 4)}, "num_heads must divide dim 96, got 5"),
        ({"less_mode": "dens"}, "did you mean dense"),
        ({"img_size": 0}, "image size 0 x 0 has no pixels"),
        ({"global_pool": "token"}, "global_pool 'token' is not supported"),
    ],
)
def test_mistakes_are_one_clear_line(kwargs, message):
    with pytest.raises(UserError) as caught:
        create_model("lavit_nano", **kwargs)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_images_of_another_size_are_refused():
    with pytest.raises(UserError, match=r"takes images \(B, 3, 32, 32\), got \(1, 3, 28, 28\)"):
        create_model("lavit_nano")(torch.randn(1, 3, 28, 28))
