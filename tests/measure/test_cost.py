import json

import pytest
import torch

from tokenmix.errors import UserError
from tokenmix.layers.table import list_mixers
from tokenmix.measure.cost import cost_table, exponent, run
from tokenmix.measure.crossover import Crossover, find_crossover, measured_crossover
from tokenmix.measure.specimen import grid_of, layer_for, make_specimen


@pytest.mark.parametrize("name", list_mixers())
def test_every_mixer_can_be_measured(name: str):
    specimen = make_specimen(name, 16, 64, num_heads=2)
    assert specimen.forward().shape == specimen.x.shape
    specimen.step()
    assert all(p.grad is None for p in specimen.layer.parameters())


def test_less_attention_is_taken_as_it_stands_in_a_stack():
    assert make_specimen("less", 16, 9).carry is not None
    assert make_specimen("self", 16, 9).carry is None


def test_grid_is_the_squarest():
    assert [grid_of(n) for n in (196, 12, 7, 1)] == [(14, 14), (3, 4), (1, 7), (1, 1)]


@pytest.mark.parametrize("dim", [64, 192])
def test_multihead_external_crosses_at_two_widths_and_256(dim: int):
    crossover = find_crossover("multihead-external", dim)
    assert crossover == Crossover(((2 * dim + 257, None),))
    n = 2 * dim + 256
    assert layer_for("multihead-external", dim, n).macs(n) == layer_for("self", dim, n).macs(n)


def test_less_attention_is_cheaper_up_to_about_its_width():
    ((first, last),) = find_crossover("less", 64, num_heads=4).ranges

    def macs(name: str, n: int) -> int:
        return layer_for(name, 64, n, num_heads=4).macs(n)

    cheaper = [n for n in range(1, 100) if macs("less", n) < macs("self", n)]
    assert cheaper == list(range(first, (last or 0) + 1))
    assert 50 < cheaper[-1] < 64


@pytest.mark.parametrize(
    ("ranges", "text"),
    [
        ((), "never"),
        (((1, None),), "always"),
        (((1, 63),), "up to N = 63"),
        (((768, None),), "from N = 768"),
        (((5, 9), (1000, None)), "N = 5 to 9, from N = 1,000"),
    ],
)
def test_crossover_reads_well(ranges: tuple[tuple[int, int | None], ...], text: str):
    assert str(Crossover(ranges)) == text


def test_exponent_and_measured_crossover_of_known_curves():
    linear, square = ({n: factor * n**power for n in (64, 256, 1024)} for factor, power in ((100.0, 1), (1.0, 2)))
    assert exponent(square) == pytest.approx(2)
    assert exponent({64: 1.0}) is None
    assert measured_crossover(linear, square) == 100
    assert measured_crossover(linear, linear | {64: 1.0, 256: 1.0, 1024: 1.0}) is None


def test_table_has_self_attention_beside_what_was_asked():
    table = cost_table(["external"], [32, 16, 32], dim=16, repeats=1, num_heads=2)
    assert [(r.mixer, r.num_tokens) for r in table.rows] == [
        ("self", 16),
        ("self", 32),
        ("external", 16),
        ("external", 32),
    ]
    layer = layer_for("external", 16, 32)
    row = table.rows[-1]
    assert (row.macs, row.parameters) == (layer.macs(32), sum(p.numel() for p in layer.parameters()))
    assert row.step_memory > row.forward_memory >= 32 * 16 * 4
    assert json.loads(json.dumps(table.to_json()))["schema"] == 1


@pytest.mark.parametrize(("names", "tokens", "message"), [(["externl"], [16], "external"), (["self"], [0], r"\[0\]")])
def test_mistakes_are_told_at_once(names: list[str], tokens: list[int], message: str):
    with pytest.raises(UserError, match=message):
        cost_table(names, tokens)


def test_command_prints_table_and_sentences(capsys: pytest.CaptureFixture[str]):
    torch.manual_seed(0)
    assert run(["multihead-external"], [16], 16) == 0
    out = capsys.readouterr().out
    assert "from N = 289" in out
    assert run(["external"], [16], 16, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["rows"]
