"""Which names may be models of timm's, without importing it: that takes PyTorch, and seconds."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path


def may_be_timms(name: str) -> bool:
    """Whether timm may have a model of that name, which a file of its models then mentions."""
    # Once it is imported, timm itself can be asked.
    if "timm" in sys.modules or name.startswith(("hf-hub:", "local-dir:")):
        return True
    spec = find_spec("timm")
    if spec is None or spec.origin is None:
        return True
    word = re.compile(rf"\b{re.escape(name.split('.')[0])}\b")
    files = (Path(spec.origin).parent / "models").glob("*.py")
    return any(word.search(file.read_text(encoding="utf-8")) for file in files)
