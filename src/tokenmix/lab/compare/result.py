"""What `tokenmix.compare` returns."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmix.errors import needs
from tokenmix.lab.compare.columns import cells, columns, markdown_table
from tokenmix.lab.compare.notes import finding_sentence
from tokenmix.lab.compare.results import Results, Variant

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class ComparisonResult(os.PathLike[str]):
    """A comparison that has ended.

    Attributes:
        path: folder of report.html, results.json and results.md.
        comparisons: what was found, by the name of each comparison of a grid; outside of a grid the name is "".
    """

    path: Path
    comparisons: Mapping[str, Results]

    @property
    def results(self) -> Results:
        """What was found; in a grid by the first comparison."""
        return next(iter(self.comparisons.values()))

    @property
    def best(self) -> Variant:
        """The variant of the best score, which chance may have put first: see `results.leaders()`."""
        return self.results.leaders()[0]

    def to_pandas(self) -> "pd.DataFrame":
        """A row for each run: score, times and costs; pandas has to be installed."""
        with needs("to_pandas"):
            import pandas as pd

        return pd.DataFrame(
            {
                "comparison": name,
                "variant": variant.name,
                "seed": run.seed,
                results.metric: run.score,
                "status": run.status,
                "seconds": run.seconds,
                **{column.heading: column.value(variant) for column in columns(results)[1:]},
            }
            for name, results in self.comparisons.items()
            for variant in results.variants
            for run in variant.runs
        )

    def plot(self) -> "Figure":
        """Score over multiply-adds, with the standard deviation over seeds and lines for the baselines."""
        from matplotlib.figure import Figure

        results = self.results
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.add_subplot()
        for variant in results.variants:
            if variant.score is not None and variant.macs:
                axes.errorbar(
                    variant.macs, variant.score, yerr=variant.deviation, fmt="o", capsize=3, label=variant.name
                )
        for name, score in results.baselines.items():
            axes.axhline(score, color="grey", linestyle="--", linewidth=1)
            axes.annotate(name, (1, score), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)
        axes.set(xscale="log", xlabel="multiply-adds of one sample", ylabel=f"test {results.metric}")
        axes.legend(frameon=False)
        return figure

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return "\n\n".join(
            f"{f'{name}: ' if name else ''}{finding_sentence(results)}\n\n{markdown_table(results)}"
            for name, results in self.comparisons.items()
        )

    def _repr_html_(self) -> str:
        """The finding and the table, as a notebook shows them."""
        parts = []
        for name, results in self.comparisons.items():
            heads = "".join(f"<th>{escape(text)}</th>" for text in ("", *(c.heading for c in columns(results))))
            rows = "".join(
                f"<tr><th>{escape(variant.name)}</th>"
                + "".join(
                    f"<td>{'<b>' * c.best}{escape(c.text)}{'</b>' * c.best}</td>" for c in cells(results, variant)
                )
                + "</tr>"
                for variant in results.variants
            )
            rows += "".join(
                f"<tr><th><i>{escape(label)}</i></th><td>{score:.4f}</td></tr>"
                for label, score in results.baselines.items()
            )
            title = f"<b>{escape(name)}</b>: " if name else ""
            parts.append(f"<p>{title}{escape(finding_sentence(results))}</p><table><tr>{heads}</tr>{rows}</table>")
        return "".join(parts)
