"""A mechanism is its layer, its row in the table and its page; they are there and agree."""

import inspect
from pathlib import Path

import pytest
import torch

from cases import CASES, PARTS, VARIANTS
from tokenmix import layers
from tokenmix.layers import MIXERS, Mixer, create_mixer

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "mechanisms"
CLASSES = {
    name: value
    for name, value in vars(layers).items()
    if name in layers.__all__ and inspect.isclass(value) and issubclass(value, torch.nn.Module) and value is not Mixer
}


def test_variants_are_of_rows() -> None:
    assert not set(CASES) & set(VARIANTS)
    assert {case.mixer for case in VARIANTS.values() if isinstance(case.mixer, str)} <= set(MIXERS)


def test_every_public_layer_is_a_row_or_a_part_of_one() -> None:
    rows = {spec.layer.__name__ for spec in MIXERS.values()}
    assert rows.isdisjoint(PARTS)
    assert rows | set(PARTS) == set(CLASSES)
    assert set(PARTS.values()) <= set(MIXERS)


@pytest.mark.parametrize("name", MIXERS)
def test_the_page_that_introduces_the_layer_names_the_row(name: str) -> None:
    introductions = [page.read_text().partition("```python")[0] for page in PAGES.glob("*.md") if page.stem != "index"]
    (mine,) = [text for text in introductions if f"`{MIXERS[name].layer.__name__}`" in text]
    assert f"`{name}`" in mine


@pytest.mark.parametrize("name", MIXERS)
def test_every_row_is_built_with_defaults_and_says_what_it_can_do(name: str) -> None:
    layer = create_mixer(name, 64, num_tokens=16)
    assert isinstance(layer, MIXERS[name].layer)
    assert layer.dim == 64
    assert layer.macs(16) >= 0
    assert layer.capabilities.layout == ("2d" if type(layer).__name__.endswith("2d") else "tokens")


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_constructors_take_sizes_by_place_and_the_rest_by_name(name: str) -> None:
    parameters = inspect.signature(CLASSES[name]).parameters
    assert {"device", "dtype"} <= set(parameters)
    by_place = [p for p in parameters.values() if p.kind is not p.KEYWORD_ONLY]
    assert all(p.default is p.empty for p in by_place), "an argument with a default is given by name"
    for dropout in (p for p in parameters if "dropout" in p):
        assert parameters[dropout].default == 0.0
