"""The bias by distance of the self-attention twin."""

import math

import torch

from tokenmix.text import GMLPModel
from tokenmix.text.blocks import RelativePositions


def test_the_bias_is_a_function_of_distance_that_starts_near() -> None:
    relative = RelativePositions(2, 5)
    torch.testing.assert_close(relative(3)[0, 0], -torch.tensor([[0.0, 1, 2], [1, 0, 1], [2, 1, 0]]))
    torch.testing.assert_close(relative(5)[0, 1, 0], -0.5 * torch.arange(5.0))
    relative.weight.data[0, 4 + 2] = 7.0
    # Two steps before the query, and nowhere else.
    assert (relative(5)[0, 0] == 7).nonzero().tolist() == [[2, 0], [3, 1], [4, 2]]


def test_attention_follows_the_equation(build, ids) -> None:
    model = build(GMLPModel, "self-relative").double()
    layer = model.layers[0]
    x = layer.norm(model.embeddings(ids, None, None, None, None))
    query, key, _ = layer.mixer.qkv(x).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    expected = torch.empty(2, 2, 6, 6, dtype=torch.float64)
    for h in range(2):
        for i in range(6):
            scores = [query[:, h, i] @ key[:, h, j].T for j in range(6)]
            line = [s.diagonal() / math.sqrt(4) + layer.relative.weight[h, i - j + 9] for j, s in enumerate(scores)]
            expected[:, h, i] = torch.stack(line, -1).softmax(-1)
    maps = model(ids, output_attentions=True).attentions
    torch.testing.assert_close(maps[0], expected)


def test_a_new_model_starts_with_it() -> None:
    from tokenmix.text import create_config

    fields = {"positions": "relative", "num_hidden_layers": 1, "vocab_size": 50}
    model = GMLPModel(create_config("bert_text_nano", **fields))
    assert model.embeddings.position_embeddings is None
    assert model.layers[0].relative.weight[:, 127].abs().max() == 0
    torch.testing.assert_close(model.layers[0].relative.weight[:, 128], -torch.tensor([1.0, 0.5, 0.25, 0.125]))
