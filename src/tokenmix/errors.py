"""Error types for user mistakes and for missing packages.

The command line prints a `UserError`'s one line, value and remedy, and exits with code 2; others are bugs.
"""

import difflib
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

EXTRAS = {
    "vision": ("PIL", "huggingface_hub", "timm", "torchvision", "yaml"),
    "train": (
        "filelock",
        "jinja2",
        "matplotlib",
        "pooch",
        "requests",
        "rich",
        "scipy",
        "sklearn",
        "threadpoolctl",
        "tyro",
    ),
    "text": ("datasets", "pyarrow", "tokenizers", "transformers"),
    "points": ("trimesh",),
    "detection": ("pycocotools",),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "streaming": ("fsspec", "gcsfs", "s3fs"),
    "fid": ("torch_fidelity",),
    "pandas": ("pandas",),
    "lightning": ("lightning",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "ray": ("ray",),
    "slurm": ("submitit",),
}
"""Modules of other packages that each extra of pyproject.toml installs, in addition to the extras that it includes."""


class UserError(ValueError):
    """A user's mistake: the offending value and the remedy, in one line."""


class OwnMixerError(UserError):
    """An error in a mixer of the user's own."""


class MissingMethod(OwnMixerError, NotImplementedError):
    """A user's layer lacks a required method."""


class MissingExtra(UserError, ImportError):
    """A package is not installed; the message names the extra of tokenmix that installs it."""


@contextmanager
def needs(what: str) -> Iterator[None]:
    """Raise `MissingExtra` if an import in the block fails for a package of an extra; `what` needs the package."""
    try:
        yield
    except ImportError as error:
        missing = missing_extra(what, error)
        if missing is None:
            raise
        raise missing from None


def missing_extra(what: str, error: ImportError) -> MissingExtra | None:
    """The error naming the extra for a missing or outdated package; None if no extra has the package."""
    module = error.name or ""
    package = module.partition(".")[0]
    extra = next((extra for extra, modules in EXTRAS.items() if package in modules), None)
    if extra is None or isinstance(error, MissingExtra):
        return None
    if package == module and isinstance(error, ModuleNotFoundError):
        return MissingExtra(f"{what} needs {package}: pip install 'tokenmix[{extra}]'")
    return MissingExtra(f"{what} needs a newer {package} ({error}): pip install --upgrade 'tokenmix[{extra}]'")


def unknown_name(kind: str, name: str, known: Iterable[str], otherwise: str = "") -> UserError:
    """The error for an unknown name, with the nearest known names; `otherwise` replaces a list of all of them."""
    names = sorted(known)
    inner = [one for one in names if one.endswith(f".{name}")][:3]
    # With one near name, distant names would only distract.
    close = (difflib.get_close_matches(name, names, n=3, cutoff=c) for c in (0.8, 0.6, 0.45))
    near = inner or next(filter(None, close), [])
    hint = f"did you mean {' or '.join(near)}?" if near else otherwise or f"known: {', '.join(names)}"
    return UserError(f"unknown {kind} {name!r}; {hint}")


def one_line(error: BaseException) -> str:
    """An error's class and message, or the function that raised it if the message is empty."""
    text = " ".join(str(error).split())
    if not text and error.__traceback__ is not None:
        text = f"in {traceback.extract_tb(error.__traceback__)[-1].name}()"
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


@contextmanager
def as_user_error(before: str, after: str, *kinds: type[BaseException]) -> Iterator[None]:
    """Turn errors of these kinds (default: any `Exception`) into `UserError`: their `one_line` between two texts."""
    expected = kinds or (Exception,)
    try:
        yield
    except UserError:
        raise
    except expected as error:
        raise UserError(f"{before}{one_line(error)}{after}") from error


def printable(text: str) -> str:
    """Escape control characters, such as a terminal's escape sequences."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
