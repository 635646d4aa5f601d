"""Tokenizers trained on users' text, in Hugging Face's format."""

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from tokenmix.errors import UserError
from tokenmix.files import Values, check_new, new_folder, user_path, write_json
from tokenmix.lab.tasks.text.corpus import Documents, growth, load_text, pieces, settings_of, tokenizing

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast


TokenizerKind = Literal["bpe", "wordpiece", "unigram"]
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""The first five ids, in this order."""
MOST_CHARACTERS = 1000
MOST_GROWTH = 64
"""Largest number of bytes that a normalizer may make of a character; SentencePiece's makes up to 33."""
MOST_SPECIAL = 64
NAMES = {f"{token.strip('[]').lower()}_token": token for token in SPECIAL}


def train_tokenizer(
    texts: str | Iterable[str],
    kind: TokenizerKind = "bpe",
    vocab_size: int = 8000,
    *,
    lowercase: Literal["yes", "no"] = "no",
    max_length: int = 512,
) -> "PreTrainedTokenizerFast":
    """Train a tokenizer on these texts.

    `bpe`: merges of UTF-8 bytes, so that no text is unknown (as GPT-2; Sennrich et al., arXiv:1508.07909). `wordpiece`:
    as BERT, words cut into pieces with ## inside (arXiv:1810.04805); characters beyond the thousand most frequent are
    unknown. `unigram`: as SentencePiece (Kudo, arXiv:1804.10959).

    A text becomes [CLS] A [SEP], a pair [CLS] A [SEP] B [SEP] with segments 0 and 1.

    bpe and wordpiece are the same for the same texts in every process. unigram is not: the library sums in the order of
    a hash table, so scores and numbers of rare pieces differ from process to process; keep the folder.

    `texts` are documents; or a value of --data, such as `text:PATH`, whose training part is used. `vocab_size` includes
    the five special pieces, and is less if the text has fewer. With `lowercase`, BERT's wordpiece also drops accents.
    `max_length` becomes its `model_max_length`. `UserError` for no text, or a vocabulary too small for the characters.
    """
    if kind not in get_args(TokenizerKind):
        raise UserError(f"the kind of a tokenizer must be bpe, wordpiece or unigram, got {kind!r}")
    # Byte-level pieces need the 256 bytes; every kind needs at least one piece.
    least = 256 + len(SPECIAL) if kind == "bpe" else len(SPECIAL) + 1
    if vocab_size < least:
        raise UserError(f"a vocabulary of {vocab_size} is too small for {kind}; give {least} or more")
    if isinstance(texts, str):
        texts = load_text(texts).train
    from tokenizers import AddedToken, processors
    from transformers import PreTrainedTokenizerFast

    # Read more than once; a corpus is streamed anew each time.
    whole = list(texts) if isinstance(texts, Iterator) else texts
    documents = Documents(partial(pieces, whole))
    if not any(document.strip() for document in documents):
        raise UserError("there is no text to train a tokenizer on; give a file or corpus that holds some")
    make = {"bpe": _bpe, "wordpiece": _wordpiece, "unigram": _unigram}[kind]
    settings = {"vocab_size": vocab_size, "special_tokens": list(SPECIAL), "show_progress": sys.stderr.isatty()}
    tokenizer = make(documents, lowercase == "yes", settings)
    # bpe and unigram pieces begin with the space before their word, so [MASK] also takes that space.
    tokenizer.add_special_tokens([AddedToken(token, special=True, lstrip=token == "[MASK]") for token in SPECIAL])
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        **NAMES,
    )


def save_tokenizer(tokenizer: "PreTrainedTokenizerFast", folder: Path) -> Path:
    """Write a tokenizer atomically as a folder of three JSON files; `UserError` if the folder is not empty."""
    folder = user_path(folder)
    check_new(folder)
    with new_folder(folder) as partial:
        tokenizer.save_pretrained(partial)
        # transformers 5 omits this file; older versions and other libraries read it.
        names = {name: str(getattr(tokenizer, name)) for name in NAMES}
        write_json(partial / "special_tokens_map.json", names)
    return folder


def load_tokenizer(folder: str | Path) -> "PreTrainedTokenizerFast":
    """The tokenizer of a folder; `UserError` if it is missing, incomplete, damaged or lacks a special token."""
    from transformers import PreTrainedTokenizerFast

    from tokenmix.lab.tasks.foreign import from_folder

    path = user_path(folder)
    if not path.is_dir():
        raise UserError(f"there is no tokenizer folder {str(path)!r}; make one: tokenmix train-tokenizer --out {path}")
    missing = [name for name in ("tokenizer.json", "tokenizer_config.json") if not (path / name).is_file()]
    if missing:
        raise UserError(f"the tokenizer folder {path} has no {' and no '.join(missing)}; copy it whole, or train again")
    with tokenizing(f"the tokenizer in {path} cannot be read", Exception):
        tokenizer = from_folder(PreTrainedTokenizerFast, path)
        backend = tokenizer.backend_tokenizer
        # A file may set truncation and padding; our callers set their own.
        backend.no_truncation()
        backend.no_padding()
        most = max(growth(backend.normalizer), growth(backend.decoder))
        special = max(backend.num_special_tokens_to_add(pair) for pair in (False, True))
        highest = max(tokenizer.get_vocab().values(), default=0)
        repeated = _copies(backend.post_processor)
    too_much = {
        f"repeats a text {repeated:,} times": repeated > 1,
        f"makes {most:,.0f} bytes of one character": most > MOST_GROWTH,
        f"makes {special:,} special tokens in a text": special > MOST_SPECIAL,
    }
    if any(too_much.values()):
        what = next(what for what, holds in too_much.items() if holds)
        raise UserError(f"the tokenizer in {path} {what}, which no text needs; use another")
    if highest >= len(tokenizer):
        raise UserError(
            f"the tokenizer in {path} has the id {highest}, but {len(tokenizer)} pieces; number them without gaps"
        )
    without = [name for name in NAMES if getattr(tokenizer, name) is None]
    if without:
        raise UserError(f"the tokenizer in {path} names no {', '.join(without)} in its tokenizer_config.json; add it")
    return tokenizer


def _copies(step: Any) -> int:
    """How often a post-processor puts one text into its output."""
    step = settings_of(step)
    inner = math.prod(max(1, _copies(one)) for one in step.get("processors", ()))
    forms = (step.get("single", ()), step.get("pair", ()))
    named = (Counter(part["Sequence"]["id"] for part in form if "Sequence" in part) for form in forms)
    return inner * max((count for counts in named for count in counts.values()), default=1)


def write_tokenizer(
    data: str, out: Path, kind: TokenizerKind, vocab_size: int, lowercase: Literal["yes", "no"], max_length: int
) -> str:
    """Train and save a tokenizer; return one line on the result."""
    check_new(user_path(out))
    tokenizer = train_tokenizer(data, kind, vocab_size, lowercase=lowercase, max_length=max_length)
    folder = save_tokenizer(tokenizer, out)
    return f"{kind} tokenizer with {len(tokenizer):,} pieces, trained on the training part of {data}, is in {folder}"


def _bpe(documents: Iterable[str], lowercase: bool, settings: Values) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    steps = [normalizers.NFC(), *([normalizers.Lowercase()] if lowercase else [])]
    tokenizer.normalizer = normalizers.Sequence(steps)  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), **settings)
    tokenizer.train_from_iterator(documents, trainer=trainer)
    return tokenizer


def _wordpiece(documents: Iterable[str], lowercase: bool, settings: Values) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    counts: Counter[str] = Counter()
    for document in documents:
        counts.update(normalizer.normalize_str(document))
    known = sorted((c for c in counts if not c.isspace()), key=lambda c: (-counts[c], c))
    kept = sorted(known[:MOST_CHARACTERS])
    inner = [f"##{character}" for character in kept]
    vocab_size, least = settings["vocab_size"], len(SPECIAL) + 2 * len(kept)
    if vocab_size < least:
        raise UserError(f"a vocabulary of {vocab_size} is too small for {len(kept)} characters; give {least} or more")
    draft = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    draft.normalizer = normalizer  # type: ignore[assignment]
    draft.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]
    # The library numbers ##a, ##b, ... in hash-table order, and merges break ties by number.
    # As special tokens they have the same numbers in every process.
    settings = {**settings, "special_tokens": [*SPECIAL, *inner]}
    trainer = trainers.WordPieceTrainer(initial_alphabet=kept, limit_alphabet=len(kept), **settings)
    draft.train_from_iterator(documents, trainer=trainer)
    tokenizer = Tokenizer(models.WordPiece(vocab=draft.get_vocab(), unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = draft.normalizer, draft.pre_tokenizer
    tokenizer.decoder = decoders.WordPiece()  # type: ignore[assignment]
    return tokenizer


def _unigram(documents: Iterable[str], lowercase: bool, settings: Values) -> "Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.Unigram())
    steps = [normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " ")]
    steps += [normalizers.Lowercase()] if lowercase else []  # type: ignore[list-item]
    tokenizer.normalizer = normalizers.Sequence(steps)  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    tokenizer.decoder = decoders.Metaspace()  # type: ignore[assignment]
    tokenizer.train_from_iterator(documents, trainer=trainers.UnigramTrainer(unk_token="[UNK]", **settings))
    return tokenizer
