"""The reference page from docstrings: in api.md a line `::: tokenmix.module.name` becomes signature and docstring."""

import importlib
import inspect
import re
from typing import Any

__all__ = ["docstring_to_markdown", "on_page_markdown", "reference"]

LISTS = ("Args", "Attributes")
SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Shape|Shapes|Paper|Papers|Cost):\s*(.*)$")
ITEM = re.compile(r"^(\*{0,2}\w[\w, *]*): (.*)$")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls this for each page."""
    return re.sub(r"^::: ([\w.]+)$", lambda match: reference(match[1]), markdown, flags=re.MULTILINE)


def reference(path: str) -> str:
    """Heading, signature and docstring of one public name."""
    module, _, name = path.rpartition(".")
    thing = getattr(importlib.import_module(module), name)
    about = docstring_to_markdown(inspect.getdoc(thing) or "")
    return f"### {name}\n\n```text\n{_signature(name, thing)}\n```\n\n{about}\n"


def _signature(name: str, thing: Any) -> str:
    try:
        signature = str(inspect.signature(thing))
    except (TypeError, ValueError):
        return name
    signature = re.sub(r"\b(?:torch|collections\.abc|typing|pathlib|tokenmix(?:\.\w+)+)\.(?=[A-Za-z])", "", signature)
    line = name + signature.removesuffix(" -> None")
    return line if len(line) <= 100 else _one_argument_a_line(line)


def _one_argument_a_line(line: str) -> str:
    """Breaks a long signature behind the commas that lie in its outermost brackets."""
    depth, out = 0, []
    for i, character in enumerate(line):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and character == ")":
            out.append("\n)" + line[i + 1 :])
            break
        out.append(character)
        if depth == 1 and (character == "(" or (character == "," and line[i + 1] == " ")):
            out.append("\n   ")
    return re.sub(r"\(\n   (?=\w|\*)", "(\n    ", "".join(out))


def docstring_to_markdown(text: str) -> str:
    """Sections become bold headings, their arguments a list; everything else is Markdown already."""
    out: list[str] = []
    section = ""
    for line in text.splitlines():
        heading = SECTION.match(line)
        if heading:
            # With text behind it, it opens a paragraph that goes on in the next lines; else a list follows.
            section = "" if heading[2] else heading[1]
            out += ["", f"**{heading[1]}.** {heading[2]}".rstrip(), *([""] if section else [])]
        elif section and line.startswith("    "):
            out.append(_in_section(section, line[4:]))
        else:
            section = section if not line.strip() else ""
            out.append(line)
    return "\n".join(out)


def _in_section(section: str, line: str) -> str:
    item = ITEM.match(line)
    if item and (section in LISTS or section == "Raises"):
        names = ", ".join(f"`{name.strip()}`" for name in item[1].split(","))
        return f"- {names}: {item[2]}"
    return f"  {line.strip()}" if section in LISTS else line.strip()
