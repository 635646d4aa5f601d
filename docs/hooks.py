"""What the site has beyond docs/*.md: the notebooks with their outputs."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter

__all__ = ["on_files", "on_page_markdown"]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """mkdocs calls this with the files of docs/."""
    root = Path(config.config_file_path).parent
    for notebook in sorted((root / "docs/notebooks").glob("*.ipynb")):
        page, resources = MarkdownExporter().from_filename(
            str(notebook), resources={"unique_key": notebook.stem, "output_files_dir": f"{notebook.stem}_files"}
        )
        page = page.replace("![png](", "![Output of the code above](")
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=page))
        for name, content in resources["outputs"].items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def on_page_markdown(markdown: str, **unused: object) -> str:
    """Commands as shell, notebooks as pages, fences without the tests' mark (`no-run`), which would end the fence."""
    markdown = re.sub(r"(notebooks/\w+)\.ipynb\)", r"\1.md)", markdown)
    unmarked = re.sub(r"^(```\w+) no-run$", r"\1", markdown, flags=re.MULTILINE)
    return re.sub(r"^```console$", "```bash", unmarked, flags=re.MULTILINE)
