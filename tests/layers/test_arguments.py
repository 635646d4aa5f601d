"""What a layer refuses, whichever it is: constructor arguments, counts of tokens, inputs and masks of a wrong kind."""

import inspect
import math
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from cases import CASES, DIM, NUM_TOKENS, builder, example
from tokenmix.errors import UserError
from tokenmix.layers import AttentionResidual, Mixer, SpatialGatingUnit, TinyAttention, create_mixer
from tokenmix.layers.base import GridMixer
from tokenmix.testing.harness import to_tokens

WHOLE = {
    "dim",
    "num_tokens",
    "num_heads",
    "num_slots",
    "num_steps",
    "expansion",
    "reduction",
    "attention_dim",
    "kernel_size",
    "pool_size",
    "hidden_tokens",
}
LAYERS: dict[str, type[nn.Module]] = {type(builder(case)()).__name__: type(builder(case)()) for case in CASES.values()}
LAYERS |= {layer.__name__: layer for layer in (SpatialGatingUnit, TinyAttention)}


def size(layer: type[nn.Module]) -> dict[str, Any]:
    return {"dim": DIM} | ({"num_tokens": NUM_TOKENS} if "num_tokens" in inspect.signature(layer).parameters else {})


def bad_values(name: str, parameter: inspect.Parameter) -> list[Any]:
    kind = str(parameter.annotation)
    if name in WHOLE and name != "expansion":
        return [-1, 2.5, math.nan, "8", True] + ([] if name == "attention_dim" else [0])
    if name == "expansion":
        return [0, -1, math.nan, "8"]
    if name == "chunk_size":
        return [0, -1, 2.5, "8"]
    if "bool" in kind:
        return ["x", 2]
    if "dropout" in name:
        return [-0.1, 1.1, math.nan, "x"]
    if name == "backend":
        return ["x", 1]
    if name in ("scale", "init_std", "temperature"):
        return [math.nan, math.inf, "x"]
    return [] if name in ("device", "dtype", "out_dim") else ["x", 1, None]


REMEDIES = ("for example", "leave", "None does", "did you mean", "known: ", "=0 drops", "must be one of")
TRIED = [
    (layer, name, value)
    for layer in LAYERS.values()
    for name, parameter in inspect.signature(layer).parameters.items()
    if parameter.kind is not parameter.VAR_KEYWORD
    for value in bad_values(name, parameter)
]


@pytest.mark.parametrize(("layer", "name", "value"), TRIED, ids=lambda v: getattr(v, "__name__", str(v)))
def test_a_value_that_a_constructor_has_no_use_for(layer: Any, name: str, value: Any) -> None:
    with pytest.raises(UserError) as caught:
        layer(**size(layer) | {name: value})
    text = str(caught.value)
    assert name in text
    assert repr(value) in text or str(value) in text
    assert any(remedy in text for remedy in REMEDIES)


def test_every_argument_is_tried() -> None:
    tried = {(layer.__name__, name) for layer, name, _ in TRIED}
    for layer in LAYERS.values():
        missing = {name for name in inspect.signature(layer).parameters if (layer.__name__, name) not in tried}
        assert missing <= {"device", "dtype", "out_dim"}


def test_an_attention_residual_refuses_the_same() -> None:
    for given in ({"num_heads_in": 0}, {"num_heads_out": 1.5}, {"keys": "x"}, {"init_scale": math.nan}, {"eps": -1}):
        with pytest.raises(UserError, match=f"{next(iter(given))}.*"):
            AttentionResidual(**{"num_heads_in": 2, "num_heads_out": 4} | given)
    with pytest.raises(UserError, match=r"scores of AttentionResidual must be a torch.Tensor, got numpy.ndarray"):
        AttentionResidual(2, 4)(numpy.zeros((1, 2, 4, 4)), (2, 2))  # pyrefly: ignore[bad-argument-type]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("count", [0, -1, math.nan, 2.5, "16", None, True])
def test_macs_of_no_number_of_tokens(name: str, count: Any) -> None:
    with pytest.raises(UserError, match=rf"num_tokens must be .*got {count!r}; for example num_tokens=196"):
        builder(CASES[name])().macs(count)  # pyrefly: ignore[not-callable]


class Mean(Mixer):
    """A mixer of a user's own, which checks nothing but by the base class."""

    capabilities = SpatialGatingUnit.capabilities

    def __init__(self) -> None:
        super().__init__()
        self.dim = DIM

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x, mask = self.checked(x, mask)
        return x


def layers() -> dict[str, tuple[nn.Module, Tensor]]:
    ours = {name: (builder(case)(), example(case)) for name, case in CASES.items()}
    tokens = example(CASES["self"])
    grid = GridMixer(create_mixer("sagan", DIM), (4, 4))
    return ours | {"on a grid": (grid, tokens), "of a user's own": (Mean(), tokens)}


@pytest.mark.parametrize("name", [*CASES, "on a grid", "of a user's own"])
def test_inputs_that_are_no_tensors(name: str) -> None:
    layer, x = layers()[name]
    wrong = {
        r"got numpy.ndarray; convert it with torch.from_numpy": x.numpy(),
        r"got list; convert it with torch.tensor": x.tolist(),
        r"got tuple; convert it with torch.tensor\(x\), or torch.stack": tuple(x),
        r"got None; pass": None,
        r"got float; convert it": 1.0,
    }
    for message, given in wrong.items():
        with pytest.raises(UserError, match=f"the input of .* must be a torch.Tensor, {message}"):
            layer(given)
    full = numpy.ones(to_tokens(x).shape[:2], dtype=bool)
    for mask in (full, full.tolist()):
        with pytest.raises(UserError, match=r"mask must be a torch\.Tensor, got"):
            layer(x, mask)


@pytest.mark.parametrize("name", [*CASES, "on a grid", "of a user's own"])
def test_inputs_without_tokens_or_of_another_type(name: str) -> None:
    layer, x = layers()[name]
    for empty in [x[:, :0]] if x.dim() == 3 else [x[:, :, :0], x[..., :0]]:
        with pytest.raises(UserError, match="mixes at least 1 token"):
            layer(empty)
    if any(True for _ in layer.parameters()):
        for device in ("cpu", "meta"):
            with pytest.raises(UserError, match=r"torch\.float32 weights and got torch\.float64"):
                layer.to(device)(x.double().to(device))


@pytest.mark.parametrize("name", CASES)
def test_the_advice_on_a_mask_names_every_convention(name: str) -> None:
    layer, x = layers()[name]
    tokens = to_tokens(x).shape[:2]
    additive = torch.zeros(tokens).masked_fill(torch.arange(tokens[1]) > 3, -torch.inf)
    for mask in (additive, torch.ones(tokens), torch.ones(tokens, dtype=torch.long)):
        with pytest.raises(UserError) as caught:
            layer(x, mask)
        text = str(caught.value)
        assert "True = the token takes part" in text
        assert "mask == 0 for an additive mask (0 takes part, -inf does not)" in text
        assert "mask.bool() for one of 1 and 0 (1 takes part)" in text
        assert "~mask.bool() for a key_padding_mask of torch (True = ignore)" in text
    # What the message says to do gives what the mask meant.
    torch.testing.assert_close(layer.eval()(x, additive == 0), layer(x, torch.arange(tokens[1]).expand(tokens) <= 3))


def test_a_mask_of_pairs_is_told_from_one_of_tokens() -> None:
    layer, x = layers()["self"]
    pairs = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().expand(len(x), -1, -1)
    with pytest.raises(UserError, match=r"mask must be \(B, N\) = .*; give one bool for each token; pairs of tokens"):
        layer(x, pairs)


@pytest.mark.parametrize("name", CASES)
def test_without_a_mask_the_input_is_not_touched(name: str) -> None:
    layer, x = layers()[name]
    assert layer.checked(x)[0] is x  # pyrefly: ignore[not-callable]
