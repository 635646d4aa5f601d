"""The probe: tasks are right by a second way of computing them, planted layers are named, known mixers spread."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tokenmix import UserError
from tokenmix.layers import MIXERS, Mixer, Pooling2d, SelfAttention
from tokenmix.layers.base import Capabilities
from tokenmix.testing.probe import (
    ProbeNet,
    ProbeReport,
    Score,
    accuracy,
    guess_of,
    look_at,
    make_mixers,
    probe,
    train_one,
)
from tokenmix.testing.probe_tasks import KEYS, SHIFT, SYMBOLS, TASKS, VALUES


@pytest.mark.parametrize("name", TASKS)
def test_a_batch_is_a_function_of_its_seed(name: str) -> None:
    task = TASKS[name]
    tokens, answers = task.batch(16, 3)
    again, other = task.batch(16, 3), task.batch(16, 4)
    assert torch.equal(tokens, again[0])
    assert torch.equal(answers, again[1])
    assert not torch.equal(tokens, other[0])
    assert tokens.shape[:2] == answers.shape == (16, task.grid[0] * task.grid[1])
    assert int(tokens.max()) < task.vocab
    assert int(answers.min()) >= -1
    assert int(answers.max()) < task.classes


def test_recall_asks_for_the_value_next_to_the_key() -> None:
    tokens, answers = TASKS["recall"].batch(8, 0)
    for row, wanted in zip(tokens.tolist(), answers.tolist()):
        pairs = {key: value - KEYS for key, value in row[:16]}
        assert len(pairs) == 16
        assert [pairs[key] for key, _ in row[16:]] == wanted[16:]
        assert all(mark == KEYS + VALUES for _, mark in row[16:])


def test_copy_asks_for_the_symbols_in_order() -> None:
    tokens, answers = TASKS["copy"].batch(8, 0)
    for row, wanted in zip(tokens.tolist(), answers.tolist()):
        assert [token for token in row[:-4] if token < SYMBOLS] == wanted[-4:]


def test_shift_asks_for_an_earlier_token() -> None:
    tokens, answers = TASKS["shift"].batch(8, 0)
    assert torch.equal(answers[:, SHIFT:], tokens[:, :-SHIFT])


def test_count_and_majority_are_counts() -> None:
    tokens, answers = TASKS["count"].batch(8, 0)
    for row, wanted in zip(tokens.tolist(), answers.tolist()):
        assert [min(row.count(token), 8) - 1 for token in row] == wanted
    tokens, answers = TASKS["majority"].batch(64, 0)
    assert torch.equal(2 * tokens.sum(1) > tokens.shape[1], answers[:, 0] == 1)
    assert int((2 * tokens.sum(1) == tokens.shape[1]).sum()) == 0


def test_same_compares_the_two_symbols() -> None:
    tokens, answers = TASKS["same"].batch(64, 0)
    for row, wanted in zip(tokens.tolist(), answers.tolist()):
        one, two = (token for token in row if token < SYMBOLS)
        assert (one == two) == bool(wanted[-1])


def test_longer_inputs_have_their_own_guess() -> None:
    """16 or 32 values are shown, and of 48 tokens the majority is nearer to a half."""
    assert [guess_of(task) for task in ("recall", "recall x2")] == [1 / 16, 1 / 32]
    assert guess_of("majority") == pytest.approx(0.5 + 1 / 18, abs=0.01)
    assert guess_of("majority x2") == pytest.approx(0.5 + 1 / 36, abs=0.01)


def test_path_is_what_a_flood_reaches() -> None:
    tokens, answers = TASKS["path"].batch(32, 0)
    for row, wanted in zip(tokens.tolist(), answers.tolist()):
        todo, seen = [row.index(2)], set()
        while todo:
            here = todo.pop()
            if here in seen or row[here] == 1:
                continue
            seen.add(here)
            i, j = divmod(here, 6)
            todo += [
                k * 6 + m for k, m in ((i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)) if 0 <= k < 6 and 0 <= m < 6
            ]
        assert all((cell in seen) == bool(answer) for cell, answer in enumerate(wanted) if answer >= 0)


class Nothing(Mixer):
    capabilities = Capabilities(map=None)

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.linear = dim, nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.linear(x)


class Neighbours(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(dim, dim, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class Spectral(nn.Module):
    """A causal window of three tokens, by an FFT, whose rounding errors are everywhere."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.randn(3, dim))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x, 64, dim=1) * torch.fft.rfft(self.taps, 64, dim=0), dim=1)[:, :16]


class Leaking(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x.mean((0, 1))


class Places(nn.Module):
    """A learned matrix over tokens."""

    def __init__(self, dim: int, num_tokens: int) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(dim, dim), nn.Parameter(torch.randn(num_tokens, num_tokens))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight @ self.linear(x)


class Mean(nn.Module):
    """All tokens meet in one vector of 8 numbers."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(dim, 8), nn.Linear(8, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.down(x).mean(1, keepdim=True))


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        (Nothing, "mixes nothing: each output depends on its own token alone"),
        ("external-softmax", "mixes nothing"),
        ("simplified", "hardly mixes"),
        (Neighbours, "sees only neighbours: one layer reaches 1 of 15"),
        ("pool", "sees only neighbours: one layer reaches 1 of 15"),
        (Spectral, "sees only neighbours: one layer reaches 2 of 15"),
        (Leaking, "leaks across samples"),
        (SelfAttention, ""),
        ("gating", ""),
    ],
)
def test_planted_layers_are_named(target, sentence: str) -> None:
    assert look_at("it", target).sentence().startswith(sentence)
    assert bool(sentence) == bool(look_at("it", target).sentence())


@pytest.mark.parametrize(
    ("target", "task", "reason"),
    [
        (Nothing, "recall", "each output depends on its own token alone"),
        ("external-softmax", "majority", "each output depends on its own token alone"),
        (Neighbours, "recall", "2 layers reach 2 tokens far, and 16 are asked for"),
        ("depthwise", "shift", ""),
        ("depthwise", "same", "2 layers reach 6 tokens far, and 12 are asked for"),
        ("external", "recall", r"its memory is the same for every sample (63 of 512 numbers pass"),
        ("external", "path", "which tokens an output listens to depends on what they hold, not on their places"),
        ("em", "recall", ""),
        (Mean, "count", "its passage is narrow (8 of 512 numbers pass"),
        (Places, "same", "which tokens an output listens to depends on their places"),
        ("gating", "recall", "which tokens an output listens to depends on their places"),
        (Places, "path", ""),
        ("self", "recall", ""),
    ],
)
def test_reasons_are_measured(target, task: str, reason: str) -> None:
    found = look_at("it", target).reason(TASKS[task].distance, TASKS[task].needs, 2)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def test_sentences_give_the_reason_for_what_fails_only() -> None:
    structures = {name: look_at(name, name) for name in ("self", "external")}
    values = {"self": {"recall": 1.0, "path": 0.9}, "external": {"recall": 0.14, "path": 0.9}}
    scores = (Score(task, name, (value,), 0.1) for name, row in values.items() for task, value in row.items())
    report = ProbeReport(tuple(scores), structures, {"self": 1.0, "external": 1.0}, 1)
    recall, path = report.sentences("external")
    assert recall.startswith(
        "external cannot recall in context what was paired with a token: its memory is the same for every sample"
    )
    assert recall.endswith(". 0.14 right, guessing 0.10, self-attention 1.00.")
    assert path.startswith("external can partly follow a path")
    assert report.sentences("self")[0] == (
        "self can recall in context what was paired with a token. 1.00 right, guessing 0.10."
    )
    assert ProbeReport.from_json(report.to_json()) == report


def test_a_class_is_probed_as_its_name_is() -> None:
    """A 2-d class too, which sees the tokens as a grid."""
    assert look_at("a", Pooling2d) == look_at("b", "pool")
    assert look_at("less", "less").reach == 15
    kinds = [[type(mixer) for mixer in make_mixers(target, (4, 4), 32, 2)] for target in (Pooling2d, "pool")]
    assert kinds[0] == kinds[1]


def test_a_quick_task_tells_self_attention_from_identity() -> None:
    """Margins are wide: the measured accuracies are 1.00 and 0.56."""
    task = TASKS["majority"]
    found = {name: train_one(name, task, 0, steps=120) for name in ("self", "identity")}
    assert accuracy(found["self"]["majority"]) > 0.85
    assert accuracy(found["self"]["majority x2"]) > 0.7
    assert accuracy(found["identity"]["majority"]) < 0.65
    assert found["self"]["majority"][1].eq(24).all(), "positions asked for in each sample"


def test_the_report_has_a_table_json_and_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmix.testing.probe.STEPS", {"majority": 3, "path": 3})
    report = probe(["external", Nothing, "gating"], tasks=["majority", "path"])
    assert report.mixers == ["self", "identity", "external", "Nothing", "gating"]
    assert report.tasks == ["majority", "majority x2", "path"]
    assert report.score("majority x2", "gating") is None
    rows = report.rows()
    assert {len(row) for row in rows} == {4}
    assert rows[-1][2] == "-"
    told = json.loads(report.to_json())
    assert len(told["scores"]) == 5 * 2 + 4
    assert any("mixes nothing" in line for line in told["sentences"]["Nothing"])
    assert "| external |" in report.markdown()
    assert "external" in str(report)
    assert "<table>" in report._repr_html_()
    assert len(report.plot().axes) == 3


def test_less_attention_follows_self_attention() -> None:
    mixers = make_mixers("less", (1, 8), 32, 2)
    assert [type(mixer).__name__ for mixer in mixers] == ["SelfAttention", "LessAttention"]
    net = ProbeNet(mixers, TASKS["shift"], 32)
    assert net(torch.zeros(2, 8, dtype=torch.long)).shape == (2, 8, SYMBOLS)


class Wider(nn.Linear):
    def __init__(self, dim: int) -> None:
        super().__init__(dim, 2 * dim)


class Broken(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        raise RuntimeError("no such width")


class NotANumber(nn.Linear):
    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.nan


class Shuffled(NotANumber):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.Linear.forward(self, x[:, torch.randperm(x.shape[1])])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: probe(NotANumber, tasks=["shift"]), "NotANumber gives NaN or infinity"),
        (lambda: probe(Shuffled, tasks=["shift"]), "Shuffled is not deterministic"),
        (lambda: probe("selff"), "unknown mixer 'selff'; did you mean self"),
        (lambda: probe("self", tasks=["recal"]), "unknown task of the probe 'recal'; did you mean recall"),
        (lambda: probe("self", tasks="recal"), "unknown task of the probe 'recal'"),
        (lambda: probe("self", tasks=[]), "no task given; name one or more of recall"),
        (lambda: probe(None), "a mixer must be a name .* or a class, got None"),
        (lambda: probe(nn.Linear(8, 8)), "a mixer must be a name .* or a class, got Linear"),
        (lambda: probe(Wider, tasks=["shift"]), r"Wider.* gives \(1, 16, 128\) for tokens \(1, 16, 64\)"),
        (lambda: probe(Broken, tasks=["shift"]), "cannot be built with the width 64: RuntimeError: no such width"),
    ],
)
def test_mistakes_are_found_before_training(call, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmix.testing.probe.train_one", lambda *a, **k: pytest.fail("training began"))
    with pytest.raises(UserError, match=message):
        call()


def test_a_plain_module_is_named_like_one_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = torch.ones(2, 1, dtype=torch.long)
    monkeypatch.setattr("tokenmix.testing.probe.train_one", lambda *a, **k: {"shift": counts})
    report = probe(["torch.nn:Identity", f"{__name__}:Nothing"], tasks=["shift"])
    assert report.mixers == ["self", "identity", "torch.nn:Identity", f"{__name__}:Nothing"]
    assert report.structures["torch.nn:Identity"].reach == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_a_device_that_is_not_there_is_told() -> None:
    with pytest.raises(UserError, match="no CUDA device is available"):
        probe("self", tasks=["shift"], device="cuda")


def test_the_pages_have_the_committed_numbers() -> None:
    """`python docs/probe.py` would change nothing."""
    docs = Path(__file__).parents[2] / "docs"
    spec = importlib.util.spec_from_file_location("docs_probe", docs / "probe.py")
    assert spec is not None
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    report = ProbeReport.from_json(tables.RESULTS.read_text())
    assert {*MIXERS} < {*report.structures}
    for path, text in tables.pages(report).items():
        assert path.read_text() == text, path.name
        if path.stem in MIXERS:
            assert f"| `{path.stem}` |" in text
    told = json.loads(tables.RESULTS.read_text())
    assert {name: report.sentences(name) for name in report.mixers} == told["sentences"]
