"""EAMLP: the counts of the released models, the authors' checkpoint layout, the equations in plain loops."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tokenmix import create_model
from tokenmix.checkpoints import convert
from tokenmix.models.eamlp import StemSelfAttention

COUNTS = {"eamlp_7": (6.096, 1.47), "eamlp_14": (29.801, 6.45), "eamlp_19": (54.471, 11.60)}
KEYS = Path(__file__).parents[2] / "tests" / "fixtures" / "eamlp_keys.json"


@pytest.mark.parametrize(("name", "counts"), COUNTS.items())
def test_counts_of_the_released_models(name, counts):
    model = create_model(name, device="meta")
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(counts[0], rel=0.002)
    assert model.macs() / 1e9 == pytest.approx(counts[1], rel=0.01)


@pytest.mark.one_fast
@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("name", COUNTS)
def test_authors_layout_loads(name, prefix):
    model = create_model(name)
    theirs = {prefix + key: torch.zeros(shape) for key, shape in json.loads(KEYS.read_text())[name].items()}
    model.load_state_dict(convert(theirs, "eamlp", to=model))
    assert all(not value.any() for value in model.state_dict().values())


def published(state: dict[str, torch.Tensor], images: torch.Tensor, heads: int, depth: int) -> torch.Tensor:
    """The network as published, from the authors' keys: two-step normalisation, Conv-free, one line a step."""

    def norm(x, key):
        return F.layer_norm(x, x.shape[-1:], state[f"{key}.weight"], state[f"{key}.bias"])

    def linear(x, key):
        return F.linear(x, state[f"{key}.weight"], state.get(f"{key}.bias"))

    def double(logits):
        shares = logits.softmax(-2)
        return shares / shares.sum(-1, keepdim=True)

    x = images
    for i, (kernel, stride, padding) in enumerate([(7, 4, 2), (3, 2, 1), (3, 2, 1)]):
        side = (x.shape[-1] + 2 * padding - kernel) // stride + 1
        x = F.unfold(x, kernel, stride=stride, padding=padding).transpose(1, 2)
        if i < 2:
            key = f"tokens_to_token.attention{i + 1}"
            h = linear(norm(x, f"{key}.norm1"), f"{key}.attn.q_linear")
            y = h + linear(
                linear(double(linear(h, f"{key}.attn.linear_0")), f"{key}.attn.linear_1"), f"{key}.attn.proj"
            )
            y = y + linear(F.gelu(linear(norm(y, f"{key}.norm2"), f"{key}.mlp.fc1")), f"{key}.mlp.fc2")
            x = y.transpose(1, 2).reshape(len(y), -1, side, side)
    x = linear(x, "tokens_to_token.project")
    x = torch.cat([state["cls_token"].expand(len(x), -1, -1), x], 1) + state["pos_embed"]
    for i in range(depth):
        key = f"blocks.{i}"
        h = linear(norm(x, f"{key}.norm1"), f"{key}.attn.trans_dims")
        h = h.reshape(*h.shape[:2], heads, -1).transpose(1, 2)
        h = linear(double(linear(h, f"{key}.attn.linear_0")), f"{key}.attn.linear_1")
        x = x + linear(h.transpose(1, 2).flatten(2), f"{key}.attn.proj")
        x = x + linear(F.gelu(linear(norm(x, f"{key}.norm2"), f"{key}.mlp.fc1")), f"{key}.mlp.fc2")
    return linear(norm(x, "norm")[:, 0], "head")


def test_gives_what_the_published_equations_give():
    torch.manual_seed(0)
    shapes = json.loads(KEYS.read_text())["eamlp_7"]
    state = {key: torch.randn(shape, dtype=torch.float64) * 0.05 for key, shape in shapes.items()}
    model = create_model("eamlp_7", dtype=torch.float64).eval()
    model.load_state_dict(convert(state, "eamlp", to=model))
    images = torch.randn(2, 3, 224, 224, dtype=torch.float64)
    with torch.no_grad():
        assert torch.allclose(model(images), published(state, images, heads=16, depth=7), atol=1e-9)


def test_positions_are_those_of_the_checkpoint():
    table = create_model("eamlp_nano").pos_embed
    assert table.shape == (1, 65, 64)
    assert torch.allclose(table[0, :, 0], torch.arange(65.0).sin(), atol=1e-6)
    assert torch.allclose(table[0, :, 1], torch.arange(65.0).cos(), atol=1e-6)


@pytest.mark.parametrize("size", [28, (28, 44), 64])
def test_any_size(size):
    model = create_model("eamlp_nano", img_size=size)
    height, width = (size, size) if isinstance(size, int) else size
    assert model(torch.randn(2, 3, height, width)).shape == (2, 10)


def test_batch_norm_form_trains():
    model = create_model("eamlp_7_bn", img_size=64, num_classes=3)
    loss = model(torch.randn(4, 3, 64, 64)).square().sum()
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert any(isinstance(m, torch.nn.BatchNorm1d) for m in model.modules())


@pytest.mark.parametrize(("name", "millions"), [("t2t_vit_7", 4.3), ("t2t_vit_14", 21.5), ("t2t_vit_19", 39.2)])
@pytest.mark.parametrize("normalization", ["softmax", "double"])
def test_t2t_vit_has_the_published_parameters(name: str, millions: float, normalization: str) -> None:
    """The released code counts its fixed positions as well."""
    model = create_model(name, attention=normalization, device="meta")
    assert model.pos_embed is not None
    count = sum(p.numel() for p in model.parameters()) + model.pos_embed.numel()
    assert round(count / 1e6, 1) == millions


@pytest.mark.parametrize("normalization", ["softmax", "double"])
def test_a_block_of_the_t2t_stem_is_its_equation(normalization: str) -> None:
    block = StemSelfAttention(6, 4, normalization, dropout=0.0, dtype=torch.float64).eval()
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    for sample, given in zip(block(x), x, strict=True):
        normed = [(t - t.mean()) / (t.var(unbiased=False) + 1e-5).sqrt() for t in given]
        query, key, value = (
            [part @ t + bias for t in normed]
            for part, bias in zip(block.qkv.weight.chunk(3), block.qkv.bias.chunk(3), strict=True)
        )
        weights = torch.tensor([[float(q @ k) / 2 for k in key] for q in query], dtype=torch.float64).exp()
        if normalization == "double":
            weights = weights / weights.sum(0, keepdim=True)
        weights = weights / weights.sum(1, keepdim=True)
        for i in range(5):
            y = value[i] + block.proj(sum(weights[i, j] * value[j] for j in range(5)))
            assert torch.allclose(sample[i], y + block.mlp(block.norm2(y)), atol=1e-12)
