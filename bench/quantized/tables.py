"""Tables of the benchmark of the quantized copy, as documents show them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.report import format_value

Table = dict[str, Any]


def tables(found: Mapping[str, Any]) -> dict[str, Table]:
    """Return columns and rows of text, by name."""
    models = found["models"]
    return {
        "formats": _formats(models),
        "products": _products(models),
        "modes": _modes(models),
        "toggling": _toggling(found["toggling"]),
        "laddering": _laddering(found["laddering"]),
    }


def _formats(models: Mapping[str, Any]) -> Table:
    rows = [
        [
            f"{model}, {name}",
            f"{each['acceptance']:.4f}",
            f"{each['block_efficiency']:.2f}",
            f"{each['by_place'][0]:.3f}",
            f"{each['compared']:,}",
        ]
        for model, measured in models.items()
        for name, each in measured["here"]["formats"].items()
    ]
    columns = ["weights", "accepted", "tokens a verification", "first position", "tokens compared"]
    return {"columns": columns, "rows": rows}


def _products(models: Mapping[str, Any]) -> Table:
    rows = [
        [
            f"{model}, {name}",
            f"{each['acceptance']:.4f}",
            format_value(each["pass_ms"]),
            format_value(each["plain_step_ms"]),
            f"{each['pass_ms'] / each['plain_step_ms']:.2f}",
            f"{each['vs_plain']:.2f}",
        ]
        for model, measured in models.items()
        for name, each in measured["here"]["products"]["rows"].items()
    ]
    columns = ["product", "accepted", "pass, ms", "plain step, ms", "ratio", "tokens/s over plain"]
    return {"columns": columns, "rows": rows}


def _modes(models: Mapping[str, Any]) -> Table:
    names = list(next(iter(next(iter(models.values()))["here"]["modes"].values())))
    rows = [
        [f"{model}, {product}", *(f"{modes[name]['vs_plain']:.2f}" for name in names)]
        for model, measured in models.items()
        for product, modes in measured["here"]["modes"].items()
    ]
    return {"columns": ["tokens/s over plain", *names], "rows": rows}


def _toggling(found: list[Mapping[str, Any]]) -> Table:
    rows = [
        [
            f"{row['copy']} {row['mode']} {row['cap'] or ''}".strip(),
            f"{row['seconds']:.2f}",
            f"{row['of_plain']:.3f}",
            f"{row['draft_length']:.2f}",
        ]
        for row in found
    ]
    return {"columns": ["copy, mode, longest draft", "rollout, s", "of plain", "draft length"], "rows": rows}


def _laddering(found: list[Mapping[str, Any]]) -> Table:
    rows = [
        [row["way"], f"{row['seconds']:.2f}", f"{row['of_plain']:.3f}", ", ".join(map(str, row["caps"]))]
        for row in found
    ]
    return {"columns": ["draft cap", "rollout, s", "of plain", "cap by training step"], "rows": rows}
