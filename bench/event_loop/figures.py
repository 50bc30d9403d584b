"""Ratios of turns with clients to turns without, and what they are made of. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from bench.intervals import median_interval

SILENT = "no client"
_FEWEST = 6
Times = Mapping[str, Any]
"""Fields of `TurnTimes`."""


def per_turn(times: Times) -> dict[str, float]:
    """Return milliseconds a turn, its parts, and other threads' processor time; and `switches` a turn."""
    turns, parts = times["turns"], times["parts"]
    slept = times["wall"] - times["cpu"] - times["queued"]
    own = {
        "turn": times["wall"],
        "without_queue": times["wall"] - times["queued"],
        "processor": times["cpu"],
        "no_core": times["queued"],
        "slept": slept,
        "collecting": sum(times["collecting"].values()),
        **{f"{name}_processor": part["cpu"] for name, part in parts.items()},
        **{f"{name}_wall": part["wall"] for name, part in parts.items()},
    }
    others = max(1, times["others_turns"])
    return {
        **{name: 1000 * seconds / turns for name, seconds in own.items()},
        "turns": turns,
        "switches": times["switches"] / turns,
        "event_loop_processor": 1000 * times["others"].get("event loop", 0.0) / others,
        "others_processor": 1000 * sum(times["others"].values()) / others,
        "others_no_core": 1000 * times["others_queued"] / others,
    }


def summary(rounds: Sequence[Mapping[str, Times]]) -> dict[str, dict[str, float]]:
    """Return for each load the medians over the rounds: milliseconds a turn, and ratios to turns without a client.

    `ratio` is of turns less the time without a core, which other programs cause, and has its interval from six
    rounds on, before that its range.
    """
    turns = [{load: per_turn(times) for load, times in each.items()} for each in rounds]
    found = {}
    for load in turns[0]:
        row = {name: median(each[load].get(name, 0.0) for each in turns) for name in turns[0][load]}
        for name, of in (("ratio", "without_queue"), ("ratio_of_turns", "turn")):
            ratios = [each[load][of] / each[SILENT][of] for each in turns]
            row[name] = median(ratios)
            if name == "ratio":
                row["ratio_low"], row["ratio_high"] = _ends(ratios)
        row["more_processor"] = median(each[load]["processor"] - each[SILENT]["processor"] for each in turns)
        row["more_sleep"] = median(each[load]["slept"] - each[SILENT]["slept"] for each in turns)
        found[load] = row
    return found


def _ends(ratios: Sequence[float]) -> tuple[float, float]:
    if len(ratios) < _FEWEST:
        return min(ratios), max(ratios)
    interval = median_interval(ratios)
    return interval.low, interval.high
