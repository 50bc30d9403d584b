"""Render the table as Markdown. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.report import format_value, markdown_row, markdown_table
from bench.rollout.table import GOALS, PairedRatio

Rows = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Columns by regime and system."""
COLUMNS = (
    ("rollout, s", "rollout_seconds"),
    ("of plain", "speedup_vs_plain"),
    ("step, s", "step_seconds"),
    ("of plain", "step_speedup_vs_plain"),
    ("push, s", "push_seconds"),
    ("tokens of a step", "tokens_of_step"),
    ("tokens a decode step", "tokens_per_decode_step"),
    ("of this machine's line", "line_share"),
    ("decode steps, average", "decode_steps_mean"),
    ("maximum", "decode_steps_max"),
    ("acceptance length", "acceptance_length"),
    ("rate", "acceptance_rate"),
    ("draft length", "draft_length"),
    ("coverage", "coverage"),
    ("bubbles, s, average", "bubble_seconds_mean"),
    ("maximum", "bubble_seconds_max"),
    ("MB moved", "moved_megabytes"),
    ("reward", "reward"),
    ("samples differing", "samples_differing"),
    ("last sample, steps", "last_sample_steps"),
    ("seconds", "last_sample_seconds"),
)
"""Headers and keys of columns. The header "of plain" is the speed as a multiple of plain vLLM's."""
_SPEED = "speedup_vs_plain"
MODELLED = (
    ("modelled rollout", "rollout_seconds"),
    ("of plain", _SPEED),
    ("ahead, of its time", "ahead_share"),
)
"""Columns of each modelled device; the device's name precedes the header."""


def shown(value: Any) -> str:
    """Return a value as table text; a ratio, also one read from plain data, with its bounds."""
    ratio = _ratio(value)
    if ratio is None:
        return format_value(value)
    if ratio.rounds == 1:
        return f"{ratio.median:.2f}"
    return f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def banded(figures: Mapping[str, Any]) -> str:
    """Return a modelled speed with its band, from the lower bound at the pessimistic end to the upper bound.

    If published speeds lie outside the band of their replays, the text says by how much. Results from before there
    was a band show the range of rounds.
    """
    high, low = (_ratio(figures.get(key)) for key in ("speedup_vs_plain", "speedup_vs_plain_low"))
    if high is None or low is None:
        return shown(high)
    off = figures.get("replays_off")
    note = f", replays {off:.0%} off" if off else ""
    return f"{high.median:.2f} ({low.low:.2f} to {high.high:.2f}{note})"


def _ratio(value: Any) -> PairedRatio | None:
    """Return a ratio, also one read from plain data."""
    if isinstance(value, Mapping):
        return PairedRatio(*(value[name] for name in ("low", "median", "high", "rounds")))
    return value if isinstance(value, PairedRatio) else None


def regime_table(systems: Mapping[str, Mapping[str, Any]], marks: Mapping[str, str]) -> list[str]:
    """Return the lines of a regime's table: a row for each system."""
    devices = _devices({"": systems})
    # Older results may lack a column.
    columns = [each for each in COLUMNS if any(each[1] in figures for figures in systems.values())]
    heads = ["", *(head for head, _ in columns)]
    heads += [f"{device}, {head}" for device in devices for head, _ in MODELLED]
    rows = []
    for name, figures in systems.items():
        cells = [shown(figures.get(key)) for _, key in columns]
        for device in devices:
            found = _modelled(figures, device)
            cells += [banded(found) if key == _SPEED else shown(found.get(key)) for _, key in MODELLED]
        rows.append([f"{name}{marks.get(name, '')}", *cells])
    return markdown_table(heads, rows)


def overview(rows: Rows, marks: Mapping[str, str]) -> list[str]:
    """Return the lines of the short table: rollout speed compared with plain vLLM, by regime."""
    regimes = list(rows)
    names = list(dict.fromkeys(name for systems in rows.values() for name in systems))
    heads = ["rollouts, times as fast as plain vLLM", *regimes, "samples that differ"]
    lines = []
    for name in names:
        found = [rows[regime].get(name) for regime in regimes]
        differing = sum(each["samples_differing"] for each in found if each is not None)
        speeds = ["-" if each is None else shown(each["speedup_vs_plain"]) for each in found]
        lines.append([f"{name}{marks.get(name, '')}", *speeds, str(differing)])
    return markdown_table(heads, lines)


def modelled_table(rows: Rows, marks: Mapping[str, str]) -> list[str]:
    """Return the lines of the overview's modelled counterpart: speed over plain vLLM, by device and regime.

    In brackets is the band: from the pessimistic end to the optimistic one.
    """
    places = [(device, regime) for device in _devices(rows) for regime in rows]
    names = list(dict.fromkeys(name for systems in rows.values() for name in systems))
    heads = [
        "modelled rollouts, times as fast as plain vLLM",
        *(f"{device}, {regime}" for device, regime in places),
    ]
    lines = []
    for name in names:
        found = [_modelled(rows[regime].get(name, {}), device) for device, regime in places]
        lines.append([f"{name}{marks.get(name, '')}", *map(banded, found)])
    return markdown_table(heads, lines)


def _devices(rows: Rows) -> list[str]:
    """Return the devices that any row was modelled on; old results have none."""
    found = (
        device
        for systems in rows.values()
        for each in systems.values()
        for device in each.get("modelled", ())
    )
    return list(dict.fromkeys(found))


def _modelled(figures: Mapping[str, Any], device: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = figures.get("modelled", {}).get(device, {})
    return found


def goal_table(figures: Mapping[str, Any], verdicts: Mapping[str, str]) -> list[str]:
    """Return the lines of the table of goals."""
    lines = [markdown_row("figure", "value", "goal", ""), markdown_row("---", "---:", "---:", "---")]
    for name, found in verdicts.items():
        goal = f"{GOALS[name]} at least" if name in GOALS else "0"
        lines.append(markdown_row(f"`{name}`", shown(figures[name]), goal, found))
    return lines
