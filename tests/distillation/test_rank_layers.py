"""The order of layers, and the frontier: on a model that says which of its layers matters."""

import copy
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tokenmix
from tokenmix.errors import UserError
from tokenmix.layers import SelfAttention
from tokenmix.swap import swap_attention
from tokenmix.swap.probe import model_macs


class Stack(nn.Module):
    """Three residual layers of attention, of which `c` adds next to nothing and `a` the most."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (SelfAttention(16, num_heads=2) for _ in range(3))
        with torch.no_grad():
            for layer, size in ((self.a, 8.0), (self.b, 2.0), (self.c, 0.01)):
                nn.init.normal_(layer.qkv.weight, std=0.7)
                layer.proj.weight.mul_(size)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b, self.c):
            x = x + layer(x)
        return x.mean(1)


def data(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(16, 6, 16, generator=generator) for _ in range(count)]


@pytest.fixture
def model() -> Stack:
    torch.manual_seed(0)
    return Stack()


def ranked(model: nn.Module, mixer: str = "external", **changes: Any) -> Any:
    torch.manual_seed(1)
    given: dict[str, Any] = {"held_out": data(3), "steps": 30, "example_inputs": (data(1)[0][:1],), **changes}
    return tokenmix.rank_layers(model, mixer, data(5), **given)


def test_the_layer_that_does_least_is_first(model: Stack) -> None:
    before = copy.deepcopy(model.state_dict())
    ranking = ranked(model)
    assert [layer.name for layer in ranking.layers] == ["c", "b", "a"]
    losses = [layer.fidelity.loss for layer in ranking.layers]
    assert losses == sorted(losses)
    assert losses[0] < 0.01 * losses[2]
    assert ranking.best(2) == ["b", "c"], "in the model's order"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert isinstance(model.a, SelfAttention)


def test_the_frontier_is_of_the_best(model: Stack) -> None:
    ranking = ranked(model)
    assert [point.count for point in ranking.frontier] == [0, 1, 2, 3]
    assert ranking.frontier[0].fidelity.cosine == pytest.approx(1)
    assert ranking.frontier[1].fidelity == ranking.layers[0].fidelity
    example = (data(1)[0][:1],)
    for count in range(1, 4):
        replaced = copy.deepcopy(model)
        swap_attention(replaced, "external", ranking.best(count), example_inputs=example)
        assert ranking.frontier[count].macs == model_macs(replaced, example)
    assert ranking.frontier[0].macs == model_macs(model, example)


def test_each_layer_was_fitted(model: Stack) -> None:
    """External attention with new weights can learn what external attention with others gives."""
    model.a, model.b, model.c = (tokenmix.create_mixer("external", 16, num_slots=4) for _ in range(3))
    fitted, untrained = (ranked(model, steps=steps, lr=0.01, mixer_kwargs={"num_slots": 16}) for steps in (150, 0))
    for layer in fitted.layers:
        alone = next(other for other in untrained.layers if other.name == layer.name)
        assert layer.fidelity.loss < 0.8 * alone.fidelity.loss


def test_the_same_seed_gives_the_same_ranking(model: Stack) -> None:
    assert ranked(model).layers == ranked(model).layers


def test_a_layer_that_is_used_twice_is_replaced_twice() -> None:
    torch.manual_seed(0)
    model = Stack()
    model.b = model.a
    ranking = ranked(model, steps=2)
    assert [layer.name for layer in ranking.layers] == ["c", "a"]
    assert ranking.frontier[2].fidelity.cosine < ranking.frontier[1].fidelity.cosine


def test_some_layers_only(model: Stack) -> None:
    assert [layer.name for layer in ranked(model, where="[ab]").layers] == ["b", "a"]


def test_the_ranking_is_for_people_and_programs(model: Stack) -> None:
    ranking = ranked(model, steps=2)
    lines = str(ranking).splitlines()
    assert [line.split()[0] for line in lines[1:4]] == [layer.name for layer in ranking.layers]
    assert "the best layer first; each fitted alone for 2 steps" in lines[4]
    assert "48 held-out rows" in lines[4]
    assert ranking._repr_html_().count("<tr>") == 4
    assert json.loads(json.dumps(ranking.to_json()))["frontier"][3]["count"] == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"held_out": []}, "held_out has no batch"),
        ({"where": "d"}, "where='d' matches no attention"),
        ({"loss": "cosinus"}, "unknown loss 'cosinus'"),
        ({"mixer_kwargs": {"slots": 3}}, "has no argument 'slots'"),
    ],
)
def test_what_does_not_fit_is_refused(model: Stack, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ranked(model, **changes)


def test_layers_that_take_scores_cannot_be_ranked_alone() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    with pytest.raises(UserError, match="no layer can be replaced alone; leave out residual"):
        ranked(nn.TransformerEncoder(layer, 2), "less", mixer_kwargs={"residual": True})


def test_a_held_out_batch_is_the_example(model: Stack) -> None:
    ranking = ranked(model, "gating", example_inputs=None, steps=1)
    assert ranking.frontier[0].macs == model_macs(model, (data(1)[0][:1],))
