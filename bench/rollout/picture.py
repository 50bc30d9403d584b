"""The picture of the table: how many times as fast as plain vLLM each system is, with the spread of its rounds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_COLOURS = ("#0072b2", "#e69f00", "#009e73")
"""Of the regimes; distinguished by those who do not see red and green as two (Okabe and Ito)."""


def draw(rows: Mapping[str, Mapping[str, Mapping[str, Any]]], path: Path) -> None:
    """Draw a bar for each system in each regime, as SVG."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(name for systems in rows.values() for name in systems))
    height = 0.8 / max(1, len(rows))
    sheet, axes = pyplot.subplots(figsize=(9, 1.2 + 0.5 * len(names)), layout="constrained")
    for place, (regime, systems) in enumerate(rows.items()):
        found = {name: systems[name]["speedup_vs_plain"] for name in names if name in systems}
        ratios = {name: ratio for name, ratio in found.items() if ratio is not None}
        axes.barh(
            [names.index(name) + place * height for name in ratios],
            [ratio.median for ratio in ratios.values()],
            height,
            xerr=[
                [ratio.median - ratio.low for ratio in ratios.values()],
                [ratio.high - ratio.median for ratio in ratios.values()],
            ],
            color=_COLOURS[place % len(_COLOURS)],
            label=regime,
        )
    axes.axvline(1, color="#444444", linewidth=0.8)
    axes.set_yticks([place + height * (len(rows) - 1) / 2 for place in range(len(names))], names)
    axes.invert_yaxis()
    axes.set(xlabel="rollouts, times as fast as plain vLLM")
    axes.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.savefig(path)
    pyplot.close(sheet)
