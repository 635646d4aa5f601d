"""What a label tells of the class: over all tiles, and within each."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    pytest.importorskip("sklearn")
    import recipes.segmentation.slots

    return recipes.segmentation.slots


def test_a_slot_of_another_meaning_in_each_tile_tells_nothing_over_all(slots: Any) -> None:
    same = np.array([[[8.0, 0.0], [0.0, 8.0]]] * 2)
    swapped = np.stack([same[0], same[0][::-1]])
    alone = np.array([[[8.0, 0.0], [8.0, 0.0]]] * 2)
    assert slots.told(same.sum(0)) == pytest.approx(1.0)
    assert slots.told(swapped.sum(0)) == pytest.approx(0.0)
    assert slots.told(alone.sum(0)) == 0.0, "one class has no entropy"


def test_counts_of_labels_and_classes(slots: Any) -> None:
    tables = slots.tables_of([np.array([0, 2, 2]), np.array([1])], [np.array([1, 0, 0]), np.array([1])])
    assert tables.tolist() == [[[0, 1], [0, 0], [2, 0]], [[0, 0], [0, 1], [0, 0]]]
