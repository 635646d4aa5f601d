"""From a command line to a verb, and from an exception to an exit code.

A user's mistake gives one line on stderr and 2, an interrupted run 130. Other exceptions are bugs, with a traceback.
"""

import platform
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Protocol

from tokenmix import __version__
from tokenmix.errors import UserError, missing_extra, printable
from tokenmix.files import DISK_ERRORS
from tokenmix.lab.cli.names import Cost, Data, Distill, Doctor, Info, List, Probe, Swap
from tokenmix.lab.cli.parsing import parse_into, parse_verb
from tokenmix.lab.cli.runs import Compare, Eval, Export, Generate, Inspect, Predict, Train, TrainTokenizer
from tokenmix.lab.train.launch import launch, processes_to_start
from tokenmix.registry import load_plugin
from tokenmix.trust import only_typed

MOST_SHOWN = 2000
ABOUT = (
    "Token mixing beyond self-attention: drop one in, train it, see what it costs. "
    "tokenmix --import MODULE_OR_FILE.py VERB ... imports your own tasks, models or mixers first. "
    "tokenmix --version prints the version; tokenmix VERB --help has examples."
)


class Verb(Protocol):
    """A verb with its options."""

    def run(self) -> int | None:
        """Run the verb; return the exit code if it is not 0."""


VERBS: dict[str, type[Verb]] = {
    "list": List,
    "info": Info,
    "train": Train,
    "eval": Eval,
    "predict": Predict,
    "generate": Generate,
    "compare": Compare,
    "cost": Cost,
    "inspect": Inspect,
    "export": Export,
    "swap": Swap,
    "distill": Distill,
    "probe": Probe,
    "doctor": Doctor,
    "data": Data,
    "train-tokenizer": TrainTokenizer,
}


def parse(argv: Sequence[str]) -> Verb:
    """The command of argv; `UserError` for a mistake. `run_command` reads `--import` in front of the verb."""
    _, argv = split_imports(argv)
    if sum(word.startswith("wds:") for word in argv) > 1:
        raise UserError("the shell has expanded the pattern of shards; quote it: --data 'wds:PATTERN'")
    if not argv or argv[0] not in VERBS:
        return parse_verb(VERBS, argv, ABOUT)
    verb, prog, rest = VERBS[argv[0]], f"tokenmix {argv[0]}", list(argv[1:])
    # The options of some verbs depend on the task, the recipe or the run.
    return verb.parse(prog, rest) if hasattr(verb, "parse") else parse_into(verb, prog, rest)


def split_imports(argv: Sequence[str]) -> tuple[list[str], Sequence[str]]:
    """Modules and files of each `--import` in front of the verb, and the words from the verb on."""
    named = []
    while argv and argv[0].partition("=")[0] == "--import":
        word, equals, value = argv[0].partition("=")
        if not equals:
            argv, value = argv[1:], argv[1] if len(argv) > 1 else ""
        if not value:
            raise UserError(f"{word} needs a module or a file: tokenmix --import MODULE_OR_FILE.py VERB ...")
        named.append(value)
        argv = argv[1:]
    return named, argv


def run_command(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    arguments, command = list(sys.argv[1:] if argv is None else argv) or ["--help"], None
    if arguments[0] == "--version":
        print(f"tokenmix {__version__}, torch {version('torch')}, Python {platform.python_version()}")
        return 0
    try:
        with only_typed(frozenset(arguments)):
            for module in split_imports(arguments)[0]:
                load_plugin(module)
            command = parse(arguments)
            processes = processes_to_start(command.config) if isinstance(command, Train) else 1
            return command.run() or 0 if processes == 1 else launch(processes, arguments)
    except UserError as error:
        return _fail(str(error).replace("VERB ...", shlex.join(_without_imports(arguments))))
    except ImportError as error:
        missing = missing_extra(" ".join(["tokenmix", *arguments[:1]]), error)
        if missing is None:
            raise
        return _fail(str(missing))
    except KeyboardInterrupt as stop:
        print(printable(str(stop)) or "tokenmix: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.errno not in DISK_ERRORS and error.filename is None:
            raise
        # A failed write, unlike a failed open, does not name the file.
        place = str(error.filename or getattr(command, "out", None) or "while writing")
        shown = place if len(place) < 300 else f"{place[:300]}..."
        return _fail(f"{error.strerror}: {shown}; {DISK_ERRORS.get(error.errno or 0, 'give another path')}")


def _without_imports(words: Sequence[str]) -> list[str]:
    """The words of a command but `--import` and its value, wherever they stand."""
    kept, left = [], iter(words)
    for word in left:
        if word == "--import":
            next(left, None)
        elif not word.startswith("--import="):
            kept.append(word)
    return kept


def _fail(message: str) -> int:
    line = printable(" ".join(message.split()))
    # A value, or a list of known names, may be of any length; the remedy is at the end.
    shown = line if len(line) <= MOST_SHOWN else f"{line[: MOST_SHOWN // 2]} ... {line[-MOST_SHOWN // 2 :]}"
    print(f"tokenmix: {shown}", file=sys.stderr)
    return 2
