"""The table of lenience: a row for each level, over the seeds that it was trained with. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from bench.report import format_value

Cells = Mapping[tuple[str, int], Mapping[str, Any]]
"""The figures of runs, by level and seed."""
Spread = Mapping[str, float]
"""Mean over seeds, lowest and highest."""
LEVEL_COLUMNS = (
    ("decode steps a token", "steps_per_token"),
    ("tokens that cost no step", "saved_share"),
    ("reused", "reused_share"),
    ("reused whole", "full_reuse_share"),
    ("wasted rows a token", "wasted_rows_per_token"),
    ("tokens a response", "response_length_mean"),
    ("rollout, s", "rollout_seconds"),
    ("of plain", "rollout_seconds_of_plain"),
    ("KL", "kl"),
    ("KL in the update", "update_kl"),
    ("diversity", "diversity"),
    ("reward, first epoch", "reward_first"),
    ("later", "reward"),
    ("held out", "accuracy"),
)
"""Heads and the figures under them."""
_TAKEN = [key for _, key in LEVEL_COLUMNS if key not in ("rollout_seconds_of_plain", "reward_first")]


def by_level(cells: Cells, plain: str) -> dict[str, dict[str, Any]]:
    """Return the spread of each figure over the seeds of a level, and `lossless` and `seeds`.

    `plain` is the level that rollout times are compared with, seed by seed.
    """
    found: dict[str, dict[str, Any]] = {}
    for level in dict.fromkeys(name for name, _ in cells):
        seeds = [seed for name, seed in cells if name == level]
        own = [cells[level, seed] for seed in seeds]
        paired = [
            cells[level, seed]["rollout_seconds"] / cells[plain, seed]["rollout_seconds"]
            for seed in seeds
            if (plain, seed) in cells
        ]
        found[level] = {
            **{key: spread([each[key] for each in own]) for key in _TAKEN},
            "rollout_seconds_of_plain": spread(paired) if paired else None,
            "reward_first": spread([each["reward_by_epoch"][0] for each in own]),
            "lossless": all(each["lossless"] for each in own),
            "seeds": seeds,
        }
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return mean, lowest and highest of at least one value."""
    return {"mean": fmean(values), "low": min(values), "high": max(values)}


def shown(value: Spread | None) -> str:
    """Return a figure as it stands in a table: its mean, and the range unless it is one value."""
    if value is None:
        return "-"
    mean, low, high = (format_value(float(value[name])) for name in ("mean", "low", "high"))
    return mean if low == high else f"{mean} ({low} to {high})"


def level_table(levels: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the table as lines of Markdown."""
    heads = ["", *(head for head, _ in LEVEL_COLUMNS), "lossless"]
    lines = [_line(heads), _line(["---", *["---:"] * len(LEVEL_COLUMNS), "---"])]
    lines += [
        _line([name, *(shown(found[key]) for _, key in LEVEL_COLUMNS), "yes" if found["lossless"] else "no"])
        for name, found in levels.items()
    ]
    return lines


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
