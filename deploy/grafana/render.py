"""Draw the data of the dashboards without Grafana: `python -m deploy.grafana.render --prometheus http://127.0.0.1:9090`.

Each dashboard becomes a picture of the results of its queries over the last minutes. Needs matplotlib (the extra
`demo`).
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

from deploy.grafana.board import NUMBER, Board, Chart, Query
from deploy.grafana.boards import BOARDS
from deploy.grafana.build import BAD, WARN

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

_COLUMNS = 3
_POINTS = 240
_MOST_SERIES = 12
"""Most names in a legend."""


class PrometheusSource:
    """Queries of a Prometheus server for the `seconds` before `end` (unix time)."""

    def __init__(self, url: str, seconds: float, end: float, window: str) -> None:
        self._url = url.rstrip("/")
        self.begin, self.end = end - seconds, end
        self._span = {"start": end - seconds, "end": end, "step": max(1.0, seconds / _POINTS)}
        self._window = window

    def over(self, expression: str) -> list[dict[str, Any]]:
        """Return the series over the whole period: {metric, values}."""
        return self._ask("query_range", {"query": self._filled(expression), **self._span})

    def last(self, expression: str) -> list[dict[str, Any]]:
        """Return the series at the end of the period: {metric, value}."""
        return self._ask("query", {"query": self._filled(expression), "time": self.end})

    def _filled(self, expression: str) -> str:
        filled = expression.replace("$__rate_interval", self._window).replace("$top", str(_MOST_SERIES))
        return re.sub(r"\$(namespace|release|instance|run)\b", ".*", filled)

    def _ask(self, what: str, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
        with urllib.request.urlopen(
            f"{self._url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}", timeout=30
        ) as answer:
            result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
            return result


def draw(board: Board, source: PrometheusSource, path: Path) -> None:
    """Write one dashboard as a picture."""
    charts = [(section.title, chart) for section in board.sections for chart in section.charts]
    rows = math.ceil(len(charts) / _COLUMNS)
    figure, axes = plt.subplots(rows, _COLUMNS, figsize=(6 * _COLUMNS, 2.9 * rows), squeeze=False)
    for place, each in enumerate(axes.flat):
        if place < len(charts):
            _draw_chart(*charts[place], source, each)
        else:
            each.set_axis_off()
    figure.suptitle(board.title)
    figure.tight_layout(rect=(0, 0, 1, 0.985))
    figure.savefig(path, dpi=70)
    plt.close(figure)


def _draw_chart(section: str, chart: Chart, source: PrometheusSource, axes: Axes) -> None:
    unit = chart.unit.removeprefix("si:").removeprefix("suffix:").strip()
    axes.set_title(f"{section} / {chart.title} [{unit}]", fontsize=10)
    drawers = {"bars": _draw_bars, "heatmap": _draw_heat, "table": _write_rows}
    drawn = sum(drawers.get(chart.kind, _draw_lines)(query, source, axes) for query in chart.queries)
    if chart.limits is not None and drawn:
        for value, colour in ((chart.limits.warn, WARN), (chart.limits.bad, BAD)):
            axes.axhline(value, color=colour, linestyle="--", linewidth=1)
    if not drawn:
        axes.text(0.5, 0.5, "no data", ha="center", transform=axes.transAxes)
    handles, names = axes.get_legend_handles_labels()
    if handles:
        more = [f"and {len(names) - _MOST_SERIES} more"] if len(names) > _MOST_SERIES else []
        axes.legend(handles[:_MOST_SERIES], names[:_MOST_SERIES], title="".join(more), fontsize=7)
    axes.tick_params(labelsize=7)
    if chart.kind not in ("bars", "table"):
        # Minutes before the end, over all of the time that was asked for.
        axes.set_xlim((source.begin - source.end) / 60, 0)
        axes.xaxis.set_major_formatter(lambda minutes, _: f"{-minutes:g} min" if minutes else "now")
    if chart.kind in ("line", "area", "stat") and chart.unit != NUMBER:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))


def _draw_lines(query: Query, source: PrometheusSource, axes: Axes) -> int:
    series = source.over(query.expr)
    for each in series:
        points = [(float(at), float(value)) for at, value in each["values"]]
        times, values = [(at - source.end) / 60 for at, _ in points], [value for _, value in points]
        axes.plot(times, values, label=_name(query, each["metric"]))
    return len(series)


def _draw_bars(query: Query, source: PrometheusSource, axes: Axes) -> int:
    series = source.last(query.expr)
    bars = sorted((_order(_name(query, each["metric"])), float(each["value"][1])) for each in series)
    axes.bar([str(name[1]) for name, _ in bars], [value for _, value in bars])
    return len(series)


def _draw_heat(query: Query, source: PrometheusSource, axes: Axes) -> int:
    found = source.over(query.expr)
    buckets = sorted((float(each["metric"]["le"]), dict(each["values"])) for each in found)
    times = sorted({at for _, values in buckets for at in values})
    if not times:
        return 0
    counts = [[float(values.get(at, 0)) for at in times] for _, values in buckets]
    # Buckets are cumulative.
    cells = [counts[0], *([b - a for a, b in zip(*pair, strict=True)] for pair in pairwise(counts))]
    axes.imshow(
        cells,
        aspect="auto",
        origin="lower",
        cmap="viridis",
        extent=((times[0] - source.end) / 60, 0, 0, len(cells)),
    )
    axes.set_yticks(range(1, len(buckets) + 1), [f"{le:g}" for le, _ in buckets])
    return len(buckets)


def _write_rows(query: Query, source: PrometheusSource, axes: Axes) -> int:
    rows = [", ".join(each["metric"].values()) for each in source.last(query.expr)]
    axes.text(0.02, 0.95, "\n".join(rows), va="top", fontsize=8, transform=axes.transAxes)
    return len(rows)


def _order(name: str) -> tuple[float, str]:
    return (float(name) if name.isdigit() else math.inf, name)


def _name(query: Query, metric: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: metric.get(found[1], ""), query.legend) or "value"


def main() -> None:
    """Draw every dashboard."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--window", default="1m", help="window of rates; at least four scrape intervals")
    parser.add_argument("--out", type=Path, default=Path("runs/dashboards"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    source = PrometheusSource(options.prometheus, options.minutes * 60, time.time(), options.window)
    for board in BOARDS:
        path = options.out / f"{board.uid}.png"
        draw(board, source, path)
        print(path)


if __name__ == "__main__":
    main()
