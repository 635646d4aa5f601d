"""The two READMEs: short, alike, and in step with the code. Their code, commands and links are tested with the docs."""

import json
import re
import tomllib
from pathlib import Path
from statistics import mean

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


def test_a_package_index_gets_no_dead_link():
    """Links are relative in the repository; until it has a public address, a package index gets their text."""
    hook = tomllib.loads(text("pyproject.toml"))["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    shown = text("README.md")
    for rule in hook["substitutions"]:
        shown = re.sub(rule["pattern"], rule["replacement"], shown)
    targets = re.findall(r"\]\(([^)\s]+)\)", shown)
    assert len(targets) == 8  # the papers
    assert all(target.startswith("https://arxiv.org/") for target in targets)
    assert "![" not in shown


@pytest.mark.parametrize("name", READMES)
def test_measured_results_are_the_recipes(name, monkeypatch):
    """The table of results against the kept comparison: parameters, mean IoU, and the gain with its interval."""
    monkeypatch.syspath_prepend(str(ROOT))
    from recipes.claims import difference_of

    kept = json.loads((ROOT / "recipes/segmentation/compare_climates.json").read_text())
    told = []
    for variant in kept["variants"]:
        numbers = [mean(run["score"] for run in variant["runs"])]
        if variant["name"] != "none":
            gain, _ = difference_of(kept, variant["name"], "none")
            numbers += [gain.value, *gain.interval()]
        told.append((f"{variant['parameters']:,}", [f"{number:z.3f}" for number in numbers]))
    rows = [line for line in text(name).splitlines() if re.search(r"\| \d{3},\d{3} \|", line)]
    assert len(rows) == 4
    for row in rows:
        parameters = re.search(r"\d{3},\d{3}", row)
        assert parameters is not None
        assert (parameters[0], re.findall(r"-?0\.\d{3}", row)) in told


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
    return sorted(link for link in set(re.findall(r"\]\(([^)]+)\)", readme)) if not link.startswith("README"))


def formulas(readme: str) -> list[str]:
    return re.findall(r"\| ([^|\n]*²[^|\n]*) (?=\|)", readme)


@pytest.mark.parametrize("name", READMES)
def test_costs_of_the_table(name):
    """The multiply-adds in the table, as formulas, against the layers' own count; smaller terms are left out there."""
    built = {"SelfAttention": {}, "SimplifiedSelfAttention": {}, "ExternalAttention": {}, "GatedMLP": {}}
    built |= {"MultiHeadExternalAttention": {"num_heads": 4}, "SAGANAttention2d": {}}
    built |= {"LessAttention": {"num_heads": 4, "scores_from": "previous"}}
    built |= {"LinearAttention": {"num_heads": 4}, "EMAttention": {}}
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


def test_an_address_stands_in_one_place():
    """No repository of ours is public yet: no page names one. Where it goes is said in pyproject.toml."""
    assert "urls" not in tomllib.loads(text("pyproject.toml"))["project"]
    assert f"version: {tokenmix.__version__}\n" in text("CITATION.cff")
    pages = [ROOT / "mkdocs.yml", *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert not [page for page in pages if "github.com/tokenmix" in page.read_text(encoding="utf-8")]


def test_licence_is_the_one_declared():
    assert "Apache License" in text("LICENSE")
    assert 'license = "Apache-2.0"' in text("pyproject.toml")
