"""What the programs of benchmarks/ share: how they end, and the JSON file that they write."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from tokenmix.environment import environment
from tokenmix.errors import UserError
from tokenmix.files import disk_remedy, replace_file


def exit_code(run: Callable[[], int]) -> int:
    """What `run` returns. 2 and one line for a mistake on the command line; 130 for Ctrl-C."""
    try:
        return run()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; no file is written", file=sys.stderr)
        return 130


def write_rows(file: Path | None, rows: Iterable[Any], packages: Iterable[str], warning: str) -> None:
    """Write dataclasses with what was typed, whether the machine was quiet, and versions; print the warning."""
    if warning:
        print(f"warning: {warning}", file=sys.stderr)
    if file is None:
        return
    document = {
        "schema": 1,
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "quiet": not warning,
        "rows": [asdict(row) for row in rows],
        "versions": {name: found.version for name in packages for found in distributions(name=name)},
        "environment": environment(),
    }
    write_json(file, document)


def write_json(file: Path, document: Mapping[str, Any]) -> None:
    """Write the file; `UserError` with a remedy if the disk refuses."""
    try:
        replace_file(file, (json.dumps(document, indent=1) + "\n").encode())
    except OSError as error:
        raise UserError(f"{file} could not be written ({error.strerror}): {disk_remedy(error)}") from None
