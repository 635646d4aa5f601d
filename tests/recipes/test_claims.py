"""The ledger is what the recipes' results say, and its verdicts follow the rule that it states."""

import math
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    import recipes.claims

    return recipes.claims


def test_the_page_is_made_from_the_results(claims: Any) -> None:
    assert claims.page() == claims.PAGE.read_text(), "make it again: python -m recipes.claims"


def test_every_claim_can_be_run_or_says_why_not(claims: Any) -> None:
    for claim in claims.CLAIMS:
        assert bool(claim.rows) != bool(claim.not_testable), claim.text
        for row in claim.rows:
            assert (ROOT / "recipes" / Path(*row.recipe.split("."))).with_suffix(".py").is_file()


def test_rows_of_the_plateau_recipe_are_cells_that_it_has(claims: Any) -> None:
    """All that the ledger looks up is found where every cell has been run."""
    from recipes.classification import plateau

    run: dict[str, Any] = {"runs": [0.5, 0.6, 0.7], "images": 10, "parameters": 10}
    maps = [[{"distance": 0.1, "diagonality": 0.2}] * 8] * 3
    document = {
        "families": {budget: dict.fromkeys(plateau.FAMILIES, run) for budget in claims.BUDGETS},
        "emoji": {"equal images": dict.fromkeys(plateau.FAMILIES, run)},
        "ablations": {
            name: {label: {**run, "parameters": 10 ** (1 + n), "maps": maps} for n, label in enumerate(rows)}
            for name, rows in plateau.ABLATIONS.items()
        },
    }
    rows = [row for claim in claims.CLAIMS for row in claim.rows if row.recipe == claims.PLATEAU]
    assert len(rows) > 20
    for row in rows:
        assert claims.judge(row, document).verdict != "not yet run", row
        assert claims.judge(row, {"families": {}, "ablations": {}}).verdict == "not yet run", row


def verdict(claims: Any, a: list[float], b: list[float], **more: Any) -> Any:
    row = claims.Row("", "", claims.at("a"), claims.at("b"), ("a", "b"), **more)
    return claims.judge(row, {"a": {"runs": a}, "b": {"runs": b}})


def test_a_difference_counts_from_what_seeds_and_test_images_could_make_of_it(claims: Any) -> None:
    """Student's t at 0.975 and 0.8 of 4 degrees of freedom, from a table: 2.776 and 0.941."""
    runs = [0.85, 0.86, 0.87]
    found = verdict(claims, [x + 0.03 for x in runs], runs)
    error = math.sqrt(2 * 0.01**2 / 3)
    assert found.counts_from == pytest.approx(2.776 * error, rel=1e-3)
    assert found.seen_from == pytest.approx((2.776 + 0.941) * error, rel=1e-3)
    assert found.verdict == "agrees"
    assert verdict(claims, runs, [x + 0.03 for x in runs]).verdict == "disagrees"
    assert verdict(claims, [x + 0.02 for x in runs], runs).verdict == "not seen at this scale"
    drawn = verdict(claims, [x + 0.03 for x in runs], runs, images=1000)
    assert drawn.counts_from == pytest.approx(
        2.776 * math.sqrt(error**2 + (0.89 * 0.11 + 0.86 * 0.14) / 1000), rel=1e-3
    )
    assert drawn.verdict == "not seen at this scale"


@pytest.mark.parametrize(
    ("behind", "expected"),
    [(0.0, "agrees"), (0.02, "agrees"), (0.04, "not seen at this scale"), (0.08, "disagrees")],
)
def test_as_good_means_within_the_margin(claims: Any, behind: float, expected: str) -> None:
    runs = [0.85, 0.86, 0.87]
    assert verdict(claims, [x - behind for x in runs], runs, kind="as good", margin=0.05).verdict == expected


def test_where_less_is_better_and_where_a_group_is_a_number(claims: Any) -> None:
    assert verdict(claims, [40.0, 41.0, 42.0], [50.0, 51.0, 52.0], lower=True).verdict == "agrees"
    row = claims.Row("", "", claims.at("a"), 0.5, ("a", "half"))
    assert claims.judge(row, {"a": {"runs": [0.6, 0.61, 0.62]}}).verdict == "agrees"
    assert claims.judge(row, {"a": {"runs": [0.4, 0.5, 0.6]}}).verdict == "not seen at this scale"


def test_the_verdict_on_a_claim(claims: Any) -> None:
    claim = claims.Claim("", "", rows=())
    row = claims.Row("", "", claims.at("a"), claims.at("b"), ("a", "b"))

    def of(*verdicts: str) -> str:
        return claims.verdict_of(claim, [claims.Found(row, verdict) for verdict in verdicts])

    assert of("agrees", "not yet run") == "agrees"
    assert of("agrees", "not seen at this scale") == "not seen at this scale"
    assert of("agrees", "disagrees") == "disagrees"
    assert of("not yet run") == "not yet run"
