import pytest

from tokenmix.profiling import cost


@pytest.fixture(autouse=True)
def _short_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads the times that are measured here, so that one call of each is enough."""
    monkeypatch.setattr(cost, "SAMPLE", 0.0)
