"""The documentation is true: its commands exist, its links lead somewhere, the site builds offline; docs/ runs it."""

import functools
import importlib
import inspect
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import timm
import torch

from test_public_names import NAMES as PUBLIC
from tokenmix import layers
from tokenmix.errors import UserError
from tokenmix.lab.cli import runs
from tokenmix.lab.cli.command import VERBS, parse
from tokenmix.lab.data import list_data
from tokenmix.lab.registry import list_tasks
from tokenmix.lab.train import sources
from tokenmix.lab.train.config import CompareConfig, comparison_config
from tokenmix.lab.train.folder import RunFolder
from tokenmix.lab.train.sources import make_config
from tokenmix.registry import MODELS

ROOT = Path(__file__).parents[1]
DOCS, SRC = ROOT / "docs", ROOT / "src"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
MECHANISMS = sorted(p for p in (DOCS / "mechanisms").glob("*.md") if p.stem != "index")
SECTIONS = [
    "Equation",
    "Cost",
    "Options",
    "Pitfalls",
    "When not to use it",
    "Differences from the paper",
    "Reference",
]
FENCE = re.compile(r"^```(\S+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def identifier(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> Iterator[tuple[int, str, str]]:
    """Line, language with what follows it, and text of each fenced block in one of the languages."""
    text = page.read_text()
    for match in FENCE.finditer(text):
        if match[1] in languages:
            yield text.count("\n", 0, match.start()) + 2, (match[1] + match[2]).strip(), match[3]


def split_words(command: str) -> list[str]:
    """As a shell splits it: `#` in the middle of a word is no comment, as shlex would have it."""
    return shlex.split(re.sub(r"(^|\s)#.*", "", command))


def commands(page: Path) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The tokenmix commands of a page, in its console blocks and in its running text."""
    text = page.read_text()
    shell = [(line, block.replace("\\\n", " ")) for line, _, block in blocks(page, "console", "bash")]
    found = [(line, part) for line, block in shell for part in block.splitlines()]
    found += [
        (text.count("\n", 0, m.start()) + 1, " ".join(m[1].replace("\\\n", " ").split()))
        for m in re.finditer(r"`(tokenmix [a-z][^`]*)`", FENCE.sub("", text))
    ]
    for line, command in found:
        words = split_words(command)
        if words and words[0] == "tokenmix":
            yield line, tuple(words[1:])


@pytest.mark.parametrize("page", [p for p in PAGES if any(commands(p))], ids=identifier)
def test_commands_exist(page):
    """Their verbs, options and values by the command's own parser; their models, mixers and data by name."""
    own = {"...", *re.findall(r'name="([\w-]+)"', page.read_text())}  # a task that the page's own block registers
    for line, words in commands(page):
        if own.isdisjoint(words):
            assert not misuse(words), f"{page}:{line} tokenmix {' '.join(words)}: {misuse(words)}"
            assert not unknown(words), f"{page}:{line} tokenmix {' '.join(words)}: unknown {unknown(words)}"


def unknown(words: tuple[str, ...]) -> set[str]:
    """The names of models, mixers and data sets in a command that do not exist, and of models of another task."""
    mixers, tasks = {*layers.MIXERS, "none"}, {*list_tasks()} & {*words}
    ours = {entry.name: entry.tasks for entry in MODELS}
    models = {name for name, of in ours.items() if tasks <= {*of}} | {*timm.list_models()} - {*ours}
    data = {entry.name for entry in list_data()}
    found = set()
    for option, value in itertools.pairwise(words):
        names = value.split(",")
        if option in ("--mixers", "--swap", "--insert", "--to"):
            found |= {name for part in names for name in part.split("+") if ":" not in name} - mixers
        if option in ("--model", "--teacher") and ":" not in value and not value.startswith("runs/"):
            found |= {value} - models
        if option == "--data":
            found |= {name.partition(":")[0] for name in re.sub(r"(:[^,]*,.*)", "", value).split(",")} - data
        if option in ("probe", "cost") and not value.startswith(("-", "runs/")) and ":" not in value:
            found |= {*value.split("+")} - mixers - models
    return {name for name in found if not name.isupper()}  # MODEL stands for the reader's


def shown_comparison(name: str, task: str | None = None) -> CompareConfig:
    """A comparison by name, and for a file that a page shows the usual one."""
    return comparison_config("image-classification") if name.endswith(".toml") else sources.load_comparison(name)


@functools.cache
def misuse(words: tuple[str, ...]) -> str:
    """What the command's own parser says against it; a run folder that a page names may be of any task."""
    said = ""
    for task in list_tasks():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RunFolder, "config", make_config(task))
            patch.setattr(runs, "load_comparison", shown_comparison)
            try:
                parse(list(words))
            except UserError as error:
                said = str(error)
            except SystemExit as stop:
                return "" if stop.code == 0 else f"exit code {stop.code}"
            else:
                return ""
    # A verb alone, in running text, names it and leaves its arguments out.
    return "" if not words[1:] and words[0] in VERBS else said


@pytest.mark.parametrize("page", PAGES, ids=identifier)
def test_links_lead_somewhere(page):
    text = FENCE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page}: {target}"
        if anchor:
            assert anchor in anchors(file), f"{page}: {target}"


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=identifier)
def test_files_and_names_in_the_text_exist(page):
    text = FENCE.sub("", page.read_text())
    for name in re.findall(r"`((?:src|docs|tests|benchmarks|recipes)/[\w./-]+)`", text):
        assert (ROOT / name).exists() or "my_" in name, f"{page}: {name}"
    for module, name in re.findall(r"`tokenmix\.(layers|ops|losses|models|swap)\.(\w+)", text):
        package = __import__(f"tokenmix.{module}", fromlist=[name])
        assert hasattr(package, name), f"{page}: tokenmix.{module}.{name}"


def described(page: Path) -> set[str]:
    """The layers that a page of a mechanism introduces, in front of its first code."""
    names = re.findall(r"`(?:tokenmix\.layers\.)?(\w+)`", page.read_text().partition("```python")[0])
    return {name for name in names if isinstance(getattr(layers, name, None), type)}


def test_every_mechanism_has_its_page():
    """Each layer is introduced by one page, alone or with its family."""
    introduced = [name for page in MECHANISMS for name in described(page)]
    public = {name for name in layers.__all__ if isinstance(getattr(layers, name), type)}
    modules = {name for name in public if issubclass(getattr(layers, name), torch.nn.Module)} - {"Mixer"}
    assert sorted(introduced) == sorted(modules)


@pytest.mark.parametrize("page", MECHANISMS, ids=lambda p: p.stem)
def test_mechanism_page_is_complete(page):
    text = page.read_text()
    sections = re.findall(r"^## (.+)$", FENCE.sub("", text), re.MULTILINE)
    assert sections == [section for section in SECTIONS if section in sections]
    assert set(SECTIONS) - set(sections) <= {"Pitfalls"}
    assert text.index("```python") < text.index("## Equation"), "the code comes first"
    assert 'class="equation"' in text
    assert re.search(r"arXiv:\d{4}\.\d{5}", text)


@pytest.mark.parametrize("page", MECHANISMS, ids=lambda p: p.stem)
def test_mechanism_page_names_every_argument(page):
    """The table of options holds the arguments of the page's layers, no fewer and no others."""
    section = page.read_text().split("## Options")[1].split("\n## ")[0]
    rows = [row.split("|")[2] for row in section.splitlines() if row.startswith("|")]
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    classes = [getattr(layers, name) for name in described(page)]
    expected = {name for c in classes for name in inspect.signature(c).parameters} - {"device", "dtype"}
    assert documented == expected


def test_pictures_are_used_and_small():
    pictures = {p.name for p in (DOCS / "images").iterdir()}
    used = set(re.findall(r"!\[[^\]]*\]\([^)]*images/(\w+\.\w+)", "".join(page.read_text() for page in PAGES)))
    assert pictures == used
    assert all(p.stat().st_size < 100_000 for p in (DOCS / "images").iterdir())


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("site")
    # Not --quiet, which hides the warnings from --strict as well.
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.slow
def test_site_needs_no_network(site):
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|link|iframe)[^>]*(?:src|href)="(https?:[^"]+)"', page.read_text())
        assert not [url for url in loaded if "canonical" not in url], page


@pytest.mark.slow
def test_pages_have_titles_of_their_own_and_notebooks_their_outputs(site):
    titles = [re.search(r"<title>(.*?)</title>", page.read_text())[1] for page in site.rglob("*.html")]
    assert len(titles) == len(set(titles))
    for notebook in NOTEBOOKS:
        page = (site / "notebooks" / f"{notebook.stem}.html").read_text()
        assert "language-python" in page
        assert "_files/" in page or notebook.stem == "compare"
    index = (site / "search" / "search_index.js").read_text()
    assert "DESIGN" not in index


@pytest.mark.slow
def test_every_fence_is_a_block(site):
    assert not [page for page in site.rglob("*.html") if "<p>```" in page.read_text()]


def test_reference_is_complete():
    """Every public name has its entry, and every op an example in front of the next entry."""
    source = "".join(page.read_text() for page in sorted((DOCS / "api").glob("*.md")))
    entries = re.split(r"^::: ([\w.]+)$", source, flags=re.MULTILINE)[1:]
    documented = dict(zip(entries[::2], entries[1::2], strict=True))
    for module in PUBLIC:
        names = set(importlib.import_module(module).__all__) - {"__version__"}
        if module == "tokenmix":
            assert {n for n in names if f"`tokenmix.{n}`" not in source and f"`{n}`" not in source} == set()
            continue
        # Where a module has the name of its function, the entry names both: tokenmix.ops.attention.attention.
        shorter = {re.sub(r"\.(\w+)\.\1$", r".\1", entry) for entry in documented}
        assert {name for name in names if f"{module}.{name}" not in shorter} == set(), module
        assert not [entry for entry in documented if (SRC / f"{entry.replace('.', '/')}.py").is_file()], "a module"
    examples = {name for name, text in documented.items() if "```python" in text}
    home = importlib.import_module("tokenmix.ops")
    wanted = {n for n in home.__all__ if inspect.isfunction(getattr(home, n))}
    shown = "".join(text for name, text in documented.items() if name.startswith("tokenmix.ops"))
    assert {n for n in wanted if f"tokenmix.ops.{n}" not in examples and f"{n}(" not in shown} == set()


def test_the_page_on_weights_names_the_models_that_have_them() -> None:
    have = {entry.name for entry in MODELS if (entry.pretrained_cfg or {}).get("hf_hub_id")}
    text = (DOCS / "models/index.md").read_text().partition("## Pretrained weights")[2]
    said = text[: text.index("For the others")]
    assert {name for name in re.findall(r"`([a-z0-9_]+)`", said) if name in MODELS} == have


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(notebook, tmp_path, monkeypatch):
    """From top to bottom in an empty folder; what is stored has outputs and no error either."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    stored = nbformat.read(notebook, as_version=4)
    outputs = [output for cell in stored.cells for output in cell.get("outputs", [])]
    assert outputs
    assert not [output for output in outputs if output.output_type == "error"]
    nbclient.NotebookClient(stored, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
