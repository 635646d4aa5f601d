"""What the site has beyond docs/*.md: the repository's own documents, and the notebooks with their outputs."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter

__all__ = ["on_files"]

DOCUMENTS = ("CHANGELOG.md", "CONTRIBUTING.md", "DESIGN.md", "SECURITY.md")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """mkdocs calls this with the files of docs/."""
    root = Path(config.config_file_path).parent
    for name in DOCUMENTS:
        files.append(File.generated(config, name, content=(root / name).read_text().replace("](docs/", "](")))
    for notebook in sorted((root / "docs/notebooks").glob("*.ipynb")):
        page, resources = MarkdownExporter().from_filename(
            str(notebook), resources={"unique_key": notebook.stem, "output_files_dir": f"{notebook.stem}_files"}
        )
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=page))
        for name, content in resources["outputs"].items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files
