"""Compute the figures of the weights benchmark that have goals, and pauses in decoding. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Row = Mapping[str, Any]
LOOPBACK, THROTTLED = "loopback", "throttled"
FOLDER, STREAM = "folder", "stream"
GOALS = {
    "folder_vs_copy": 1.5,
    "stream_vs_copy": 1.5,
    "stream_seconds_ratio_4_vs_1": 1.3,
    "trainer_bytes_ratio_4_vs_1": 1.0,
}
# Share of bytes that the protocol may add.
_BYTES_TOLERANCE = 0.01
_LEAST_GAP_MS = 100.0
_MORE_BYTES = 1e9


def summary(transfers: Sequence[Row], engines: Sequence[Row]) -> dict[str, Any]:
    """Return the figures; None if not measured.

    Ratios to the copy are for the largest model and one instance, memory is for the largest model, and the gap is
    the longest of all pushes to vLLM's engine.
    """
    largest = max((row["megabytes"] for row in transfers), default=0)
    of_largest = [row for row in transfers if row["megabytes"] == largest]
    throttled = [row for row in transfers if row["links"] == THROTTLED]
    heaviest = max((row["megabytes"] for row in engines), default=0)
    memory = [row["peak_memory_models"] for row in engines if row["megabytes"] == heaviest]
    return {
        "folder_vs_copy": _only(of_largest, "vs_copy_and_check", FOLDER, 1),
        "stream_vs_copy": _only(of_largest, "vs_copy_and_check", STREAM, 1),
        "stream_seconds_ratio_4_vs_1": _ratio(throttled, "seconds"),
        "trainer_bytes_ratio_4_vs_1": _ratio(throttled, "trainer_bytes"),
        "peak_memory_models": max(memory, default=None),
        "decoding_gap_ms": max((row["decoding_gap_ms"] for row in engines), default=None),
    }


def verdicts(figures: Row, engines: Sequence[Row]) -> dict[str, bool | None]:
    """Return, by figure, True if its goal is reached, or None if it was not measured."""
    found: dict[str, bool | None] = {}
    for name, most in GOALS.items():
        slack = _BYTES_TOLERANCE if name.startswith("trainer_bytes") else 0.0
        value = figures[name]
        found[name] = None if value is None else value <= most + slack
    # Both depend on the model: its size, and the time to copy it in memory.
    found["peak_memory_models"] = all_of(
        row["peak_memory_models"] <= 1 + _MORE_BYTES / (1e6 * row["megabytes"]) for row in engines
    )
    found["decoding_gap_ms"] = all_of(
        row["decoding_gap_ms"] <= max(_LEAST_GAP_MS, row["memory_copy_ms"]) for row in engines
    )
    return found


def all_of(reached: Any) -> bool | None:
    """Return whether all are reached; None if there are none."""
    each = list(reached)
    return all(each) if each else None


def _only(rows: Sequence[Row], figure: str, transport: str, instances: int) -> float | None:
    for row in rows:
        told = row["transport"], row["instances"], row["links"]
        if told == (transport, instances, LOOPBACK):
            value: float = row[figure]
            return value
    return None


def _ratio(rows: Sequence[Row], figure: str) -> float | None:
    by_instances = {row["instances"]: row[figure] for row in rows}
    return by_instances[4] / by_instances[1] if {1, 4} <= by_instances.keys() else None


@dataclass(frozen=True, slots=True)
class Span:
    """Begin and end of a step, or of applying weights, in monotonic seconds."""

    began: float
    ended: float

    @property
    def seconds(self) -> float:
        """Length in seconds."""
        return self.ended - self.began


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """Steps of an engine, and the times at which it applied weights, each in order."""

    steps: Sequence[Span]
    applied: Sequence[Span]


@dataclass(frozen=True, slots=True)
class Pauses:
    """Pauses of decoding during a push, in milliseconds.

    `usual_step` and `usual_gap` are the medians before it. `gap` is the longest time in which no step ran.
    `prefill` is the step after the weights were applied, which computes the KV again. `slowest_step` is the longest
    of the others.
    """

    usual_step: float
    usual_gap: float
    gap: float
    apply: float
    prefill: float
    step_while_staging: float
    slowest_step: float


def parse(lines: Iterable[str]) -> EngineTimes:
    """Return the times in the lines of an instance's file; an incomplete last line is left out."""
    found: dict[str, list[Span]] = {"step": [], "apply": []}
    for line in lines:
        if line.endswith("\n"):
            name, began, ended = line.split()
            found[name].append(Span(float(began), float(ended)))
    return EngineTimes(found["step"], found["apply"])


def pauses(times: EngineTimes, began: float, ended: float) -> Pauses:
    """Return the pauses of decoding in a push. ValueError if it did not decode before, during or after the push."""
    before = [step for step in times.steps if step.ended <= began]
    rest = [step for step in times.steps if step.ended > began]
    applied = next((each for each in times.applied if began <= each.began <= ended), None)
    if len(before) < 2 or applied is None:
        raise ValueError("the engine did not decode before the push, or applied no weights in it")
    first_after = next((place for place, step in enumerate(rest) if step.began >= applied.ended), None)
    if first_after is None or first_after + 1 >= len(rest):
        raise ValueError("the engine did not decode after the push")
    during = [step for step in rest if step.began < max(ended, rest[first_after].ended)]
    staging = rest[:first_after]
    others = [step for place, step in enumerate(during) if place != first_after]
    gaps = [second.began - first.ended for first, second in pairwise([before[-1], *during])]
    return Pauses(
        usual_step=1000 * statistics.median(step.seconds for step in before),
        usual_gap=1000 * statistics.median(b.began - a.ended for a, b in pairwise(before)),
        gap=1000 * max(gaps),
        apply=1000 * applied.seconds,
        prefill=1000 * rest[first_after].seconds,
        step_while_staging=1000 * statistics.median(step.seconds for step in staging or before),
        slowest_step=1000 * max((step.seconds for step in others), default=0.0),
    )
