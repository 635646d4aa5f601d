import pytest

from tokenmix.compare import variant_costs


@pytest.fixture(scope="session", autouse=True)
def _short_timings():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(variant_costs, "SECONDS", 0.05)
        yield


@pytest.fixture
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are measured at these only."""
    monkeypatch.setattr(variant_costs, "TOKENS", (4, 16))
