"""Tokens on the disk, sequences packed from them, and what is masked: a function of (seed, epoch, index)."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tokenmix.errors import UserError
from tokenmix.lab.data.indexed import make_loader
from tokenmix.lab.tasks.text.corpus import IGNORED, PackedText, Tokens, load_text, tokenized
from tokenmix.lab.tasks.text.tokenizer import train_tokenizer

LINES = [
    f"The {word} number {i} remembers wonderful {word}s of yesterday.\n" for i in range(60) for word in ("cat", "dog")
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(LINES, "wordpiece", 120)


@pytest.fixture
def corpus(tmp_path: Path) -> Any:
    (tmp_path / "a.txt").write_text("".join(LINES))
    return load_text(f"text:{tmp_path / 'a.txt'}")


@pytest.fixture
def tokens(corpus: Any, tokenizer: Any, tmp_path: Path) -> tuple[Tokens, Tokens]:
    return tokenized(corpus, tokenizer, tmp_path / "cache")


def everything(tokens: Tokens) -> tuple[np.ndarray, np.ndarray]:
    return tokens.read(0, len(tokens))


def test_tokens_are_those_of_the_tokenizer(corpus: Any, tokenizer: Any, tokens: tuple[Tokens, Tokens]):
    expected = tokenizer("".join(corpus.test), add_special_tokens=False)
    ids, starts = everything(tokens[1])
    assert ids.tolist() == [*expected["input_ids"], tokenizer.sep_token_id]
    assert ids.dtype == np.uint16
    pieces = tokenizer.convert_ids_to_tokens(ids.tolist())
    assert [int(not piece.startswith("##")) for piece in pieces] == starts.tolist()


def test_tokens_are_made_once(
    corpus: Any, tokenizer: Any, tokens: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tokenmix.lab.tasks.text.corpus._encoded", lambda *_: pytest.fail("made again"))
    again = tokenized(corpus, tokenizer, tmp_path / "cache")
    assert np.array_equal(everything(again[0]), everything(tokens[0]))


def test_groups_of_documents_are_one_run_of_tokens(
    corpus: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    groups: list[str] = []
    monkeypatch.setattr("tokenmix.lab.tasks.text.corpus.tokenizing", lambda what: groups.append(what) or nullcontext())
    monkeypatch.setattr("tokenmix.lab.tasks.text.corpus.PIECE", 400)
    whole = tokenized(corpus, tokenizer, tmp_path / "whole")[0]
    at_once = len(groups)
    monkeypatch.setattr("tokenmix.lab.tasks.text.corpus.BLOCK", 500)
    parts = tokenized(corpus, tokenizer, tmp_path / "parts")[0]
    assert len(groups) - at_once > at_once == 2
    assert np.array_equal(everything(parts), everything(whole))
    for begin in (0, 7, len(whole) - 30):
        assert np.array_equal(parts.read(begin, 40), np.stack(everything(whole))[:, begin : begin + 40])


@pytest.mark.parametrize("kept", [3, 700, -9, "changed", "exchanged"])
def test_damaged_tokens_are_made_again(corpus: Any, tokenizer: Any, tokens: Any, tmp_path: Path, kept: int | str):
    (file,) = (tmp_path / "cache" / "tokens").rglob("train")
    before, whole = everything(tokens[0])[0].tolist(), file.read_bytes()
    file.unlink()
    others = {"changed": bytes([whole[0] ^ 2]) + whole[1:], "exchanged": file.with_name("test").read_bytes()}
    file.write_bytes(others[kept] if isinstance(kept, str) else whole[:kept])
    assert everything(tokenized(corpus, tokenizer, tmp_path / "cache")[0])[0].tolist() == before
    assert file.read_bytes() == whole


def test_another_tokenizer_has_tokens_of_its_own(corpus: Any, tokenizer: Any, tokens: Any, tmp_path: Path):
    tokenized(corpus, train_tokenizer(LINES, "wordpiece", 100), tmp_path / "cache")
    assert len([path for path in (tmp_path / "cache" / "tokens").iterdir() if path.is_dir()]) == 2


def test_a_corpus_without_text(tmp_path: Path, tokenizer: Any):
    (tmp_path / "blank.txt").write_text(" \n" * 50)
    with pytest.raises(UserError, match="holds no text for training"):
        tokenized(load_text(f"text:{tmp_path / 'blank.txt'}"), tokenizer, tmp_path)
    assert not list((tmp_path / "tokens").rglob("train"))


def restored(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.where(batch["labels"] == IGNORED, batch["input_ids"], batch["labels"])


def test_testing_reads_every_token_once(tokens: Any, tokenizer: Any):
    packed = PackedText(tokens[1], tokenizer, length=16, part="test")
    batch = packed.read(torch.arange(len(packed)), 0)
    whole = restored(batch)
    assert set(whole[:, 0].tolist()) == {tokenizer.cls_token_id}
    last = batch["attention_mask"].sum(1) - 1
    assert set(whole.gather(1, last[:, None])[:, 0].tolist()) == {tokenizer.sep_token_id}
    inner = [row[1:end].tolist() for row, end in zip(whole, last)]
    assert sum(inner, []) == everything(tokens[1])[0].tolist()  # noqa: RUF017
    again = PackedText(tokens[1], tokenizer, length=16, part="test", seed=5).read(torch.arange(len(packed)), 3)
    assert torch.equal(again["input_ids"], batch["input_ids"])


def test_training_masks_follow_seed_epoch_and_index_alone(tokens: Any, tokenizer: Any):
    packed = PackedText(tokens[0], tokenizer, length=32, part="train", seed=1)
    whole = packed.read(torch.arange(len(packed)), 2)
    some = packed.read(torch.tensor([5, 3]), 2)
    for key in ("input_ids", "labels"):
        assert torch.equal(some[key], whole[key][[5, 3]])
    other_epoch = packed.read(torch.arange(len(packed)), 3)
    other_seed = PackedText(tokens[0], tokenizer, length=32, part="train", seed=2).read(torch.arange(len(packed)), 2)
    assert not torch.equal(other_epoch["labels"], whole["labels"])
    assert not torch.equal(other_seed["labels"], whole["labels"])


@pytest.mark.parametrize("masking", ["token", "whole-word"])
def test_shares(tokens: Any, tokenizer: Any, masking: Any):
    packed = PackedText(tokens[0], tokenizer, length=34, part="train", masking=masking)
    batches = [packed.read(torch.arange(len(packed)), epoch) for epoch in range(40)]
    labels = torch.cat([batch["labels"] for batch in batches])
    inputs = torch.cat([batch["input_ids"] for batch in batches])
    chosen = labels != IGNORED
    ordinary = ~torch.isin(torch.where(chosen, labels, inputs), packed.special)
    assert not (chosen & ~ordinary).any()
    assert chosen.sum() / ordinary.sum() == pytest.approx(0.15, abs=0.01)
    hidden = (inputs[chosen] == tokenizer.mask_token_id).float().mean()
    kept = (inputs[chosen] == labels[chosen]).float().mean()
    assert hidden == pytest.approx(0.8, abs=0.02)
    assert kept == pytest.approx(0.1, abs=0.02)
    assert not torch.isin(inputs[chosen & (inputs != tokenizer.mask_token_id)], packed.special).any()


def test_whole_words_are_hidden_whole(tokens: Any, tokenizer: Any):
    packed = PackedText(tokens[0], tokenizer, length=32, part="train", masking="whole-word")
    batch = packed.read(torch.arange(len(packed)), 0)
    chosen = (batch["labels"] != IGNORED).tolist()
    pieces = [tokenizer.convert_ids_to_tokens(row.tolist()) for row in restored(batch)]
    inside = 0
    for row, names in zip(chosen, pieces):
        for place in range(2, len(names)):
            if names[place].startswith("##"):
                inside += row[place]
                assert row[place] == row[place - 1]
    assert inside > 5


def test_loader_resumes_and_shares(tokens: Any, tokenizer: Any):
    packed = PackedText(tokens[0], tokenizer, length=16, part="train", seed=3)

    def batches(epoch: int = 1, **options: Any) -> list[dict[str, torch.Tensor]]:
        loader = make_loader(packed, **{"batch_size": 4, "shuffle": True, "seed": 3, "drop_last": True, **options})
        loader.set_epoch(epoch)
        return list(loader)

    whole = batches()
    late = batches(start_batch=3)
    assert len(late) == len(whole) - 3
    assert all(torch.equal(a[k], b[k]) for a, b in zip(late, whole[3:]) for k in a)
    assert not torch.equal(batches(epoch=2)[0]["index"], whole[0]["index"])
    halves = [batches(batch_size=2, rank=rank, world_size=2) for rank in (0, 1)]
    for one, other, both in zip(*halves, whole):
        assert torch.equal(torch.stack([one["labels"], other["labels"]], 1).flatten(0, 1), both["labels"])
    state = torch.get_rng_state()
    batches()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 2}, "leaves no token"),
        ({"length": 100_000}, "do not fill one sequence"),
    ],
)
def test_impossible_packing(tokens: Any, tokenizer: Any, options: Any, message: str):
    with pytest.raises(UserError, match=message):
        PackedText(tokens[0], tokenizer, part="train", **options)


def test_batch_that_does_not_fit(tokens: Any, tokenizer: Any):
    packed = PackedText(tokens[1], tokenizer, length=16, part="test")
    with pytest.raises(UserError, match="give a batch size of at most"):
        make_loader(packed, batch_size=10_000, shuffle=True, seed=0, drop_last=True)
    with pytest.raises(UserError, match="batch_size must be at least 1"):
        make_loader(packed, batch_size=0, shuffle=True, seed=0)


def test_a_cache_that_cannot_be_written(corpus: Any, tokenizer: Any, tmp_path: Path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match=r"cannot keep tokens in .*; free space or set TOKENMIX_DATA") as caught:
        tokenized(corpus, tokenizer, tmp_path / "file")
    assert "\n" not in str(caught.value)


def test_what_is_wrong_with_a_text_is_reported_as_it_is(tokenizer: Any, tmp_path: Path):
    (tmp_path / "latin.txt").write_bytes("caf\xe9\n".encode("latin-1") * 30)
    with pytest.raises(UserError, match=r"latin.txt, line 1: byte 0xe9 at offset 3 is not UTF-8"):
        tokenized(load_text(f"text:{tmp_path / 'latin.txt'}"), tokenizer, tmp_path / "cache")
