"""A recipe as a program: exit codes that run_all understands, and no traceback for Ctrl-C or a user's mistake."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

import numpy as np
import tyro

from tokenmix.environment import environment
from tokenmix.errors import UserError
from tokenmix.files import Values, write_json

Args = TypeVar("Args")

STOPPED = 3
"""Exit code of a job that has to go on another time."""


def run_program(main: Callable[[Args], bool | None], args: type[Args]) -> NoReturn:
    """Run `main` with the arguments of the command line; it returns False if it has to go on another time."""
    try:
        complete = main(tyro.cli(args))
    except KeyboardInterrupt as stop:
        print(str(stop) or "interrupted; the same command goes on", file=sys.stderr)
        sys.exit(130)
    except UserError as error:
        sys.exit(f"tokenmix: {error}")
    sys.exit(STOPPED if complete is False else 0)


def write_scores(
    file: Path,
    variants: Sequence[Values],
    samplings: Sequence[Values],
    *,
    kept: Mapping[str, np.ndarray],
    metric: str,
    note: str,
) -> None:
    """What a program measured on finished runs, in the form that the ledger reads; of covariances four digits.

    `kept` is what each run has in each test sample, and goes to an .npz file beside it.
    """
    now = environment()
    document = {key: now[key] for key in ("date", "cpu", "commit")} | {
        "metric": metric,
        "higher": True,
        "note": note,
        "minutes": None,
        "variants": variants,
        "samplings": [
            {**one, "covariance": [[float(f"{value:.4g}") for value in row] for row in one["covariance"].tolist()]}
            for one in samplings
        ],
    }
    write_json(file, document)
    np.savez_compressed(file.with_suffix(".npz"), **kept)
