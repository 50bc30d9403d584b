"""Compute the figures of the benchmark of moves from its rounds. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bench.intervals import median_interval
from bench.migration.driver import LoadResult
from bench.report import format_value
from bench.scrape import Metrics
from paceline.times import seconds_of

STAY, MOVE, PREFIX = "no moves", "reallocator", "same moves by prefix"
_DECIDED = "paceline_reallocator_decision_seconds_sum"
_MOVED_BYTES = "paceline_reallocator_moved_bytes_total"


@dataclass(slots=True)
class MigrationRuns:
    """All rounds of one way to run a load."""

    outcomes: list[LoadResult] = field(default_factory=list)
    stall_steps: list[float] = field(default_factory=list)
    stall_seconds: list[float] = field(default_factory=list)
    # Counters of the reallocator during each round.
    reallocator: list[Metrics] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Seconds of the median round."""
        return median(each.seconds for each in self.outcomes)

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of the median round."""
        return median(each.tokens / each.seconds for each in self.outcomes)


def table_of(runs: Mapping[str, MigrationRuns]) -> dict[str, dict[str, Any]]:
    return {name: _row(each, runs[STAY]) for name, each in runs.items()}


def document_table(tables: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, list[Any]]:
    """Return columns and rows of text of all loads, as documents show them."""
    rows = [
        [
            f"{load}, {system}",
            f"{row['ratio']:.2f} ({row['ratio_lower']:.2f} to {row['ratio_upper']:.2f})",
            f"{row['moves_by_kv']} by KV, {row['moves_by_prefix']} by prefix",
            *(
                format_value(row[name])
                for name in ("gap_seconds_median", "stall_steps_median", "overhead_share")
            ),
        ]
        for load, systems in tables.items()
        for system, row in systems.items()
    ]
    columns = ["load", "throughput", "moves", "gap between two tokens, s", "stall, decode steps", "overhead"]
    return {"columns": columns, "rows": rows}


def _row(runs: MigrationRuns, plain: MigrationRuns) -> dict[str, Any]:
    low, middle, high = _ratio(runs, plain)
    gaps = [gap for outcome in runs.outcomes for gap in outcome.gaps("kv", "prefix")]
    ways = Counter(move.by for outcome in runs.outcomes for move in outcome.moves)
    return {
        "seconds": runs.seconds,
        "tokens_per_second": runs.tokens_per_second,
        "ratio": middle,
        "ratio_lower": low,
        "ratio_upper": high,
        "moves": ways.total(),
        "moves_by_kv": ways["kv"],
        "moves_by_prefix": ways["prefix"],
        "claims_lost": sum(each.lost_claims for each in runs.outcomes),
        "gap_seconds_median": median(gaps) if gaps else None,
        "stall_steps_median": median(runs.stall_steps) if runs.stall_steps else None,
        "stall_seconds_median": median(runs.stall_seconds) if runs.stall_seconds else None,
        "overhead_share": _overhead(runs),
        "moved_megabytes": sum(each[_MOVED_BYTES] for each in runs.reallocator) / 1e6,
    }


def _ratio(runs: MigrationRuns, plain: MigrationRuns) -> tuple[float, float, float]:
    """Return the median ratio of speeds within a round, and its bounds: with few rounds, minimum and maximum."""
    ratios = [there.seconds / here.seconds for here, there in zip(runs.outcomes, plain.outcomes, strict=True)]
    try:
        return median_interval(ratios)
    except ValueError:
        return min(ratios), median(ratios), max(ratios)


def _overhead(runs: MigrationRuns) -> float | None:
    """Return the share of time that decisions and moves take.

    This is the seconds of decisions over all seconds, plus the pause of moved samples over the time of all samples.
    By prefix the pause is the whole gap between two tokens.
    """
    if not runs.reallocator:
        return None
    seconds = sum(each.seconds for each in runs.outcomes)
    decided = sum(each[_DECIDED] for each in runs.reallocator)
    stood = sum(runs.stall_seconds) + sum(gap for each in runs.outcomes for gap in each.gaps("prefix"))
    lived = sum(
        seconds_of(track.finished.generation_time)
        for outcome in runs.outcomes
        for track in outcome.tracks.values()
        if track.finished is not None
    )
    return decided / seconds + (stood / lived if lived else 0.0)
