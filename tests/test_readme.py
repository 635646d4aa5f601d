"""The two READMEs: short, alike, and in step with the code. Their code, commands and links are tested with the docs."""

import json
import re
import tomllib
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

import tokenmix
from tokenmix import layers

ROOT = Path(__file__).parents[1]
READMES = ["README.md", "README.zh.md"]


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", READMES)
def test_readme_is_short(name):
    assert len(text(name).splitlines()) <= 120


@pytest.mark.parametrize("name", READMES)
def test_links_of_a_readme_are_absolute(name):
    """So that a package index shows it whole."""
    targets = re.findall(r"\]\(([^)\s]+)\)", text(name))
    assert targets
    assert not [target for target in targets if not target.startswith("https://")]


@pytest.mark.parametrize("name", READMES)
def test_measured_results_are_the_recipes(name):
    """The table of results against the kept comparison: mean IoU and parameters row by row."""
    rows = [line.split(" | ") for line in text(name).splitlines() if re.search(r"\d ± \d", line)]
    assert len(rows) == 4
    made = json.loads((ROOT / "recipes/segmentation/compare_climates.json").read_text())["variants"]
    told = {
        (f"{variant['parameters']:,}", *(shown(scores) for scores in (scores_of(variant), variant["whole"])))
        for variant in made
    }
    for _, windows, whole, parameters, _ in rows:
        assert (parameters, windows, whole) in told


def scores_of(variant: dict[str, Any]) -> list[float]:
    return [run["score"] for run in variant["runs"]]


def shown(scores: list[float]) -> str:
    return f"{mean(scores):.3f} ± {stdev(scores):.3f}"


def test_both_languages_say_the_same():
    """Same commands and code (comments and prints apart), same links, same formulas."""
    english, chinese = map(text, READMES)
    assert code(english) == code(chinese)
    assert links(english) == links(chinese)
    assert formulas(english) == formulas(chinese)
    assert len(formulas(english)) >= 10


def code(readme: str) -> list[str]:
    blocks = "".join(re.findall(r"```\w+\n(.*?)```", readme, re.DOTALL))
    return [line.split("#")[0].rstrip() for line in blocks.splitlines() if not line.startswith("print(")]


def links(readme: str) -> list[str]:
    return sorted(link for link in set(re.findall(r"\]\(([^)]+)\)", readme)) if "/README" not in link)


def formulas(readme: str) -> list[str]:
    return re.findall(r"\| ([^|\n]*²[^|\n]*) (?=\|)", readme)


@pytest.mark.parametrize("name", READMES)
def test_costs_of_the_table(name):
    """The multiply-adds in the table, as formulas, against the layers' own count; smaller terms are left out there."""
    built = {"SelfAttention": {}, "SimplifiedSelfAttention": {}, "ExternalAttention": {}, "GatedMLP": {}}
    built |= {"MultiHeadExternalAttention": {"num_heads": 4}, "SAGANAttention2d": {}}
    built |= {"LessAttention": {"num_heads": 4, "scores_from": "previous"}, "TinyAttention": {"attention_dim": 64}}
    for kind, kwargs in built.items():
        row = next(line for line in text(name).splitlines() if f"`{kind}`" in line)
        formula = row.split("|")[3].strip()
        cls = getattr(layers, kind)
        size = (256, 1024) if kind in ("GatedMLP", "LessAttention") else (256,)
        counted = cls(*size, **kwargs, device="meta").macs(1024)
        assert _value(formula, N=1024, D=256, S=64, d=64) == pytest.approx(counted, rel=0.02), formula


def _value(formula: str, **letters: int) -> float:
    terms = []
    for term in formula.split(" + "):
        number = re.match(r"[\d.]*", term)[0]
        value = float(number or 1)
        for letter, power in re.findall(r"([NDSd])(²?)", term):
            value *= letters[letter] ** (2 if power else 1)
        terms.append(value)
    return sum(terms)


def test_version_is_the_newest_of_the_changelog():
    newest = re.search(r"^## \[(\d[\d.]*)\]", text("CHANGELOG.md"), re.MULTILINE)
    assert newest is not None
    assert newest[1] == tokenmix.__version__
    assert f'version = "{tokenmix.__version__}"' in text("pyproject.toml")


def test_the_address_is_the_same_everywhere():
    home = tomllib.loads(text("pyproject.toml"))["project"]["urls"]["Repository"]
    assert f"repo_url: {home}\n" in text("mkdocs.yml")
    assert f'repository-code: "{home}"' in text("CITATION.cff")
    assert f"version: {tokenmix.__version__}\n" in text("CITATION.cff")
    for name in READMES:
        assert {m[1] for m in re.finditer(r"(https://github\.com/\w+/\w+)", text(name))} == {home}


def test_licence_is_the_one_declared():
    assert "Apache License" in text("LICENSE")
    assert 'license = "Apache-2.0"' in text("pyproject.toml")
