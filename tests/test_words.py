"""The field's words in what users read: documentation, help and error messages keep out of a dialect of our own."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src/tokenmix"
PAGES = sorted(
    [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in ("README.md", "DESIGN.md", "LOG.md", "CONTRIBUTING.md"))]
)
# The newest version; what was published under an older one stays as it was.
CHANGELOG = re.compile(r"^## \[.*?(?=^## \[0\.1\.0\])", re.MULTILINE | re.DOTALL)
GLOSSARY = {
    r"\b(is|are|was|be) told\b(?! apart| from)": "reported, given",
    r"\bforesees?n?\b": "estimate, predict",
    r"\bin the place of\b": "instead of, in place of",
    r"\b(?<!there )(is|are) no (number|file|folder|run folder|JSON|list|image|mixer|class)s?\b": "is not a ...",
    r"\bheads that talk\b": "talking heads",
    r"\bmanners\b": "conventions",
    r"\bwhoever\b": "anyone who",
    r"\bso many\b": "that many, N",
    r"\blearnt\b": "trained on, learned",
    r"\bbehind\b": "after",
    r"\bbeside\b": "next to, compared with",
    r"\bhalf types?\b": "half precision",
    r"\bclouds? of points\b": "point cloud",
    r"\btwins?\b(?!:)": "variant",
    r"\b(learned|masked|padded|labelled|all) places\b": "positions",
    r"\bhand(s|ed)? (on|out)\b": "pass on, return",
    r"\b(goes|go|going|went) on\b": "continue, carry over",
    r"\bmaker of the CPU\b": "CPU vendor",
    r"\blooks? at (images|points|squares)\b": "takes",
    r"\b(learning )?rates? of the two\b(?<!learning rates of the two)": "learning rates",
    r"\banswers? (of|for) (a|the|its|files)\b": "predictions, outputs",
    r"\bthe map is written\b|\bwrit(es|ing) the (N x N )?map\b(?<!reading and writing the map)": "materialize the map",
    r"\bwith shapes alone\b": "with shapes only",
    r"\bcomes? out (as )?0\b": "is 0 in the output",
    r"\bfrom now on\b": "set, become",
    r"\bmend(s|ed)?\b": "fix",
    r"\bgo(es)? over to\b": "carry over, be resized to",
    r"\bhands? (its|them|over)\b": "pass, return",
    r"\bwrite it again as\b": "export it again as",
    r"\b(one|a) (line|row|number|(sub-)?folder) a (?!line)[a-z]+|\bone a (line|row|class)\b": "one ... per ...",
}


def found(text: str) -> list[str]:
    """What of the glossary's left side is in the text, with the right side."""
    hits = ((match[0], better) for word, better in GLOSSARY.items() for match in re.finditer(word, text, re.IGNORECASE))
    return [f"{hit!r}: say {better}" for hit, better in hits]


def prose(page: str) -> str:
    """A page without its code, links and quoted names."""
    return re.sub(r"^```.*?^```|`[^`]*`|\]\([^)]*\)", "", page, flags=re.MULTILINE | re.DOTALL)


def messages(file: Path) -> Iterator[tuple[int, str]]:
    """The text of every UserError of a file, what is filled in left out."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("UserError", "SwapError"):
            parts = (part for argument in node.args for part in ast.walk(argument) if isinstance(part, ast.Constant))
            yield node.lineno, " ".join(str(part.value) for part in parts)


def strings(file: Path) -> Iterator[tuple[int, str]]:
    """Docstrings, from which the API reference and the help are made."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages(page: Path) -> None:
    assert found(prose(page.read_text())) == []


def test_changelog() -> None:
    newest = CHANGELOG.search((ROOT / "CHANGELOG.md").read_text())
    assert newest is not None
    assert found(prose(newest[0])) == []


def test_docstrings() -> None:
    files = sorted(SRC.rglob("*.py"))
    bad = [f"{file.name}:{line} {hit}" for file in files for line, text in strings(file) for hit in found(text)]
    assert bad == []


def test_error_messages() -> None:
    files = sorted(SRC.rglob("*.py"))
    bad = [f"{file.name}:{line} {hit}" for file in files for line, text in messages(file) for hit in found(text)]
    assert bad == []


def test_report() -> None:
    """The page of a comparison, and its sentences."""
    page = re.sub(r"\{[{%].*?[%}]\}", "", (SRC / "compare/report.html").read_text(), flags=re.DOTALL)
    assert found(page) == []
    tree = ast.parse((SRC / "compare/notes.py").read_text())
    texts = [part.value for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values
             if isinstance(part, ast.Constant)]  # fmt: skip
    assert found(" ".join(map(str, texts))) == []


@pytest.mark.parametrize(
    "sentence", ["The loss is no number.", "what is learnt", "a twin", "is told", "goes on", "one row a class"]
)
def test_the_list_finds_its_words(sentence: str) -> None:
    assert found(sentence)
