"""Encoding with any tokenizer: errors in one line, and blocks of characters that fit into memory."""

import base64
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tokenmix.environment import filtered_stderr
from tokenmix.errors import UserError, one_line
from tokenmix.registry import Arguments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


BLOCK = 1 << 21
# Rust's message before a panic, which Python raises as an error.
PANIC = re.compile(rb"^\n?thread '[^\n]*panicked at .*?(note: [^\n]*\n|\Z)", re.DOTALL | re.MULTILINE)


@contextmanager
def tokenizing(what: str, *more: type[BaseException]) -> Iterator[None]:
    """Raise `UserError` for the tokenizers library's bare `Exception`s, Rust panics (no `Exception`) and `more`."""
    try:
        with filtered_stderr(lambda said: PANIC.sub(b"", said)):
            yield
    except BaseException as error:
        panic = type(error).__name__ == "PanicException"
        if isinstance(error, UserError) or not (panic or type(error) is Exception or isinstance(error, more)):
            raise
        raise UserError(f"{what} ({one_line(error)}); copy it again, or train it again") from None


def block_characters(tokenizer: "PreTrainedTokenizerFast") -> int:
    """Characters to encode at a time: a token takes 150 bytes until its number is kept."""
    return int(BLOCK / growth(tokenizer.backend_tokenizer.normalizer))


def growth(step: Any) -> float:
    """Largest number of bytes that a normalizer or decoder makes of one byte, from the texts that it inserts."""
    return 1 if step is None else _growth(json.loads(step.__getstate__()))


def _growth(step: Arguments) -> float:
    steps = step.get("normalizers") or step.get("decoders") or ()
    kind, grown = step.get("type"), math.prod(map(_growth, steps))
    if kind == "Replace":
        content, literal = len(step["content"].encode()), step["pattern"].get("String")
        # A regex may match between any two characters.
        grown = max(1, content / len(literal.encode())) if literal else 1 + content
    elif kind == "Prepend":
        grown = 1 + len(step["prepend"].encode())
    elif kind == "Precompiled":
        charsmap = base64.b64decode(step["precompiled_charsmap"])
        replaced = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].split(b"\0")
        grown = max(map(len, replaced))
    return grown
