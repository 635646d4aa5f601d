"""Counts of the pages' sentences, for dev/words.md: `python dev/words.py [COMMIT ...]`; the checkout without a commit.

Of docs/**/*.md: words of all text but code, equations, images and addresses; sentences of running text and lists,
without tables. A relative clause is counted by its first word: which, who, whose, whom, where, what, and `that` in
mid-sentence.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)")
END = re.compile(r"(?<=[.!?:])(?:\*\*|`)?\s+(?=[A-Z*`_\[(0-9])")
CLAUSE = re.compile(r"\b(?:which|who|whose|whom|where|what)\b|(?<=[\w`)*] )that\b", re.IGNORECASE)


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def pages(commit: str | None) -> list[str]:
    """The text of each page of the site, without code and pictures."""
    if commit is None:
        found = [path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))]
    else:
        names = git("ls-tree", "-r", "--name-only", commit, "docs").splitlines()
        found = [git("show", f"{commit}:{name}") for name in names if name.endswith(".md")]
    bare = [re.sub(r"^```.*?^```$|<div.*?</div>", "", text, flags=re.MULTILINE | re.DOTALL) for text in found]
    return [LINK.sub(r"\1", re.sub(r"!\[[^\]]*\]\([^)]*\)|<[^>]+>", "", text)) for text in bare]


def sentences(page: str) -> list[str]:
    lines = [" \n" if line.lstrip().startswith(("|", "#", ":::", "--")) else line.strip() for line in page.splitlines()]
    parts = re.split(r"\n\s*\n|\n(?=- |\d+\. )", "\n".join(lines))
    cut = [sentence for part in parts for sentence in END.split(re.sub(r"^(?:- |\d+\. )", "", part).replace("\n", " "))]
    return [sentence for sentence in cut if len(sentence.split()) > 2]


def row(commit: str | None) -> str:
    texts = pages(commit)
    found = [sentence for text in texts for sentence in sentences(text)]
    lengths = [len(sentence.split()) for sentence in found]
    clauses = sum(len(CLAUSE.findall(sentence)) for sentence in found)
    cells = [
        commit or "now",
        str(len(texts)),
        f"{sum(len(text.split()) for text in texts):,}",
        f"{sum(lengths) / len(lengths):.1f}",
        str(sum(length > 30 for length in lengths)),
        f"{100 * clauses / sum(lengths):.2f}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print("| commit | pages | words | words a sentence | sentences over 30 words | relative clauses a hundred words |")
    print("|---|---:|---:|---:|---:|---:|")
    for given in sys.argv[1:] or [None]:
        print(row(given))
