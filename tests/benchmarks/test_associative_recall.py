"""benchmarks/associative_recall.py: the task is that of zoology."""

import associative_recall
import torch

LENGTH, PAIRS = 32, 4


def test_each_key_comes_again_once_and_asks_for_its_value() -> None:
    tokens, answers = associative_recall.recall(64, PAIRS, 0, LENGTH)
    again = associative_recall.recall(64, PAIRS, 0, LENGTH)
    assert torch.equal(tokens, again[0])
    assert torch.equal(answers, again[1])
    half = associative_recall.VOCABULARY // 2
    for row, wanted in zip(tokens.tolist(), answers.tolist()):
        pairs = dict(zip(row[: 2 * PAIRS : 2], row[1 : 2 * PAIRS : 2]))
        assert len(pairs) == len(set(pairs.values())) == PAIRS
        assert all(1 <= key < half <= value < 2 * half for key, value in pairs.items())
        asked = [i for i, answer in enumerate(wanted) if answer != -100]
        assert len(asked) == PAIRS
        assert all(i >= 2 * PAIRS and i % 2 == 0 for i in asked)
        assert {row[i]: wanted[i] for i in asked} == pairs
        assert all(row[i] == 0 for i in range(2 * PAIRS, LENGTH) if i not in asked)


def test_gaps_follow_the_power_law() -> None:
    """With one pair, the odds of the place where the key comes again."""
    _, answers = associative_recall.recall(20_000, 1, 0, 18)
    found = (answers[:, 2::2] >= 0).double().mean(0)
    odds = torch.arange(1, 9, dtype=torch.float64) ** (associative_recall.POWER - 1)
    torch.testing.assert_close(found, odds / odds.sum(), atol=0.012, rtol=0)


def test_the_network_is_causal() -> None:
    net = associative_recall.Network(8, 16, associative_recall.causal)
    tokens, _ = associative_recall.recall(2, 2, 0)
    changed = tokens.clone()
    changed[:, -1] = 5
    assert torch.equal(net(tokens)[:, :-1], net(changed)[:, :-1])
    assert not torch.equal(net(tokens)[:, -1], net(changed)[:, -1])
