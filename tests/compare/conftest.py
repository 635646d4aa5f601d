from typing import Any

import pytest

from tokenmix.lab.compare import costs
from tokenmix.profiling.machine import time_interleaved


@pytest.fixture(scope="package", autouse=True)
def _short_timings():
    """Nobody reads the times that are measured here, so that one of each is enough."""

    def once(functions: Any, **options: Any) -> Any:
        return time_interleaved(functions, **{**options, "repeats": 1, "warmup": 0})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "time_interleaved", once)
        yield


@pytest.fixture
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are measured at these only."""
    monkeypatch.setattr(costs, "TOKENS", (4, 16))
