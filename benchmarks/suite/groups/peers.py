"""Layers of other packages at equal shapes and with equal weights: forward, and forward and backward in training."""

import copy
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from suite.harness import Built, Case, Missing, Target, Variant, agreement
from suite.place import Place
from suite.results import Correctness
from tokenmix.layers import ExternalAttention, GatedMLP, SelfAttention

__all__ = ["CASES"]


@dataclass(frozen=True)
class Contest:
    """Our layer, and how a package's own is made with the same weights."""

    package: str
    module: str
    shape: tuple[int, int, int]
    ours: Callable[[], nn.Module]
    theirs: Mapping[str, Callable[[nn.Module], nn.Module]]
    note: str = ""
    bare: Callable[[Any], nn.Module] | None = None
    """Our equation on the same weights without any check, a floor."""


def _fightingcv(ours: nn.Module) -> nn.Module:
    from fightingcv_attention.attention.ExternalAttention import ExternalAttention as Theirs

    memory = ours.memory
    assert isinstance(memory, nn.Module)
    layer = Theirs(ours.dim, S=64)
    layer.load_state_dict({"mk.weight": memory.key_memory, "mv.weight": memory.value_memory.mT})
    return layer


class _BareExternal(nn.Module):
    """Our equation by four of PyTorch's operators. No logits turn it into NaN, for which it takes two exponentials."""

    def __init__(self, ours: ExternalAttention) -> None:
        super().__init__()
        assert ours.memory.value_memory is not None
        self.keys, self.values = ours.memory.key_memory, ours.memory.value_memory

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(torch.log_softmax(F.linear(x, self.keys), -2), -1) @ self.values


def _g_mlp(ours: nn.Module) -> nn.Module:
    from g_mlp_pytorch.g_mlp_pytorch import gMLPBlock

    assert isinstance(ours, GatedMLP)
    layer = gMLPBlock(dim=ours.dim, dim_ff=ours.hidden, seq_len=ours.num_tokens)
    state = {f"proj_in.0.{k}": v for k, v in ours.proj_in.state_dict().items()}
    state |= {f"proj_out.{k}": v for k, v in ours.proj_out.state_dict().items()}
    state |= {f"sgu.norm.{k}": v for k, v in ours.gating.norm.state_dict().items()}
    state |= {"sgu.weight": ours.gating.weight[None], "sgu.bias": ours.gating.bias[None]}
    layer.load_state_dict(state)
    return layer


def _vit(ours: nn.Module) -> nn.Module:
    from vit_pytorch.vit import Attention

    layer, state = Attention(512, heads=8, dim_head=64), ours.state_dict()
    state = {f"norm.{k.removeprefix('0.')}": v for k, v in state.items() if k.startswith("0.")}
    state |= {"to_qkv.weight": ours.state_dict()["1.qkv.weight"]}
    state |= {f"to_out.0.{k}": ours.state_dict()[f"1.proj.{k}"] for k in ("weight", "bias")}
    layer.load_state_dict(state)
    return layer


def _x_transformers(flash: str) -> Callable[[nn.Module], nn.Module]:
    def make(ours: nn.Module) -> nn.Module:
        from x_transformers.x_transformers import Attention

        layer, state = Attention(512, heads=8, dim_head=64, flash=flash == "flash"), ours.state_dict()
        parts = zip(("to_q", "to_k", "to_v"), state["qkv.weight"].chunk(3), strict=True)
        layer.load_state_dict({f"{k}.weight": v for k, v in parts} | {"to_out.weight": state["proj.weight"]})
        return layer

    return make


def _external() -> nn.Module:
    return ExternalAttention(512, query_projection=False, output_projection=False)


def _gmlp() -> nn.Module:
    layer = GatedMLP(256, 196, expansion=6)
    nn.init.normal_(layer.gating.weight, std=0.02)
    return layer


def _without_bias() -> nn.Module:
    layer = SelfAttention(512, num_heads=8, qkv_bias=False)
    nn.init.zeros_(layer.proj.bias)
    return layer


CONTESTS = {
    "external attention, N 196": Contest(
        "fightingcv-attention",
        "fightingcv_attention",
        (8, 196, 512),
        _external,
        {"fightingcv": _fightingcv},
        "ours checks its input and calls five modules, 0.02 ms, or 0.09 ms where the products emptied the cache",
        _BareExternal,
    ),
    "external attention, N 4096": Contest(
        "fightingcv-attention",
        "fightingcv_attention",
        (1, 4096, 512),
        _external,
        {"fightingcv": _fightingcv},
        "no slower than fightingcv's, whose normalisation divides 0 by 0 where a token's exponentials underflow; where "
        "our equation's bare operations alone are slower than that, 1.15 x these",
        _BareExternal,
    ),
    "gMLP block": Contest("g-mlp-pytorch", "g_mlp_pytorch", (8, 196, 256), _gmlp, {"g-mlp-pytorch": _g_mlp}),
    "self-attention with norm": Contest(
        "vit-pytorch",
        "vit_pytorch",
        (8, 196, 512),
        lambda: nn.Sequential(nn.LayerNorm(512), SelfAttention(512, num_heads=8, qkv_bias=False)),
        {"vit-pytorch": _vit},
    ),
    "self-attention": Contest(
        "x-transformers",
        "x_transformers",
        (8, 196, 512),
        _without_bias,
        {"x-transformers": _x_transformers("plain"), "x-transformers, flash": _x_transformers("flash")},
        "no biases; ours adds one of zeros behind the output projection",
    ),
}


def _build(contest: Contest, kind: str) -> Callable[[Place], Built]:
    def build(place: Place) -> Built:
        ours = contest.ours()
        there = importlib.util.find_spec(contest.module) is not None
        theirs = {name: place.put(make(ours)) for name, make in contest.theirs.items()} if there else {}
        place.put(ours)
        x, grad = place.randn(*contest.shape, grad=True), place.randn(*contest.shape)
        run = _forward(x) if kind == "forward" else _training(x, grad)
        variants: dict[str, Variant | Missing] = {
            name: Missing(f"{contest.package} is not installed") for name in contest.theirs
        }
        variants |= {name: Variant("peer", lambda m=m: run(m)) for name, m in theirs.items()}
        variants = {"tokenmix": Variant("ours", lambda: run(ours)), **variants}
        if contest.bare is not None:
            bare = contest.bare(ours)
            variants["bare operations"] = Variant("floor", lambda: run(bare))

        def check() -> Correctness:
            reference = next(iter(theirs.values()), ours)
            wide = copy.deepcopy(reference).double()
            with torch.enable_grad():
                inside = x.detach().double().requires_grad_()
                out = wide(inside)
                expected = (out, *torch.autograd.grad(out, inside, grad.double()))
                found = ours(x)
                found = (found, *torch.autograd.grad(found, x, grad))
            against = f"{contest.package if theirs else 'itself'} in float64, same weights, with the input's gradient"
            return agreement(found, expected, place, against)

        return Built(variants, check)

    return build


def _forward(x: Tensor) -> Callable[[nn.Module], Tensor]:
    @torch.no_grad()
    def run(layer: nn.Module) -> Tensor:
        return layer(x)

    return run


def _training(x: Tensor, grad: Tensor) -> Callable[[nn.Module], tuple[Tensor, ...]]:
    def run(layer: nn.Module) -> tuple[Tensor, ...]:
        return torch.autograd.grad(layer(x), (x, *layer.parameters()), grad, allow_unused=True)

    return run


CASES = [
    Case(
        name=f"{name}, {kind}",
        group="peers",
        shapes=dict(zip("BND", contest.shape, strict=True)),
        build=_build(contest, kind),
        targets=tuple(Target("at most", 1.0, other=other, floor="bare operations") for other in contest.theirs),
        note=contest.note,
    )
    for name, contest in CONTESTS.items()
    for kind in ("forward", "training")
]
