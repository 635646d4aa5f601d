import pytest

from tokenmix.compare import twin_costs


@pytest.fixture(scope="session", autouse=True)
def _short_timings():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(twin_costs, "SECONDS", 0.05)
        yield


@pytest.fixture
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are measured at these only."""
    monkeypatch.setattr(twin_costs, "TOKENS", (4, 16))
