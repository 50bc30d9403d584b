"""Measure what drafts are worth by response length, vocabulary, entropy, KL of an update, and age of the history.

No engine runs. A synthetic policy (policy.py) writes the responses of a step, the responses that the policy of the
previous update gives to the same noise, and earlier samples of the same prompts. The index, the reference drafter
and the planner of an instance decode them (known_texts.py) by the step times of an 8B model on an H100, at both
ends of their band (bench/rollout/modelled.py). Each point changes one number of the base point.

The table has two to four rows for each point. "history" drafts from earlier samples of the prompt, from siblings
and from the sample itself. "ahead" also drafts from the whole response that the previous policy would have written
to the same noise. This is what pre-generation provides when the idle time suffices. "ahead, other noise" has whole
responses of the previous policy to other noise in their place, at points of at most 1,024 tokens. At the base point
and on the axis of age "epoch" also drafts from the whole response that the policy gave to the same noise when the
prompt came last, as COUPLED_HISTORY does. Writes
runs/bench/axes.json.

    python -m bench.axes [--axes length vocabulary]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.axes.known_texts import DecodedBatch, KnownText, decode, plain_seconds, stored
from bench.axes.policy import PolicySizes, SyntheticPolicy, hashes
from bench.report import format_band, format_value, option_parser, say, show_rows, write
from bench.rollout.modelled import DEVICES, H100_8B
from services.contracts.rollout import StoredRollout
from services.step_time.estimator import warm_up

PROMPTS, SAMPLES = 2, 4
_TEMPERATURE = 0.7
COLUMNS = ("changed", "point", "drafts", "tokens a step", "acceptance rate", "of plain, modelled")


@dataclass(frozen=True, slots=True)
class Point:
    """A setting of all axes."""

    length: int = 1024
    vocabulary: int = 8192
    entropy: float = 0.7
    kl: float = 1e-4
    lag: int = 4
    """Updates since the prompt was last sampled."""
    anchored: float = 0.0
    """Share of positions at which diverged texts return to the same tokens (policy.py)."""
    temperature: float = _TEMPERATURE
    """Temperature of sampling; entropy and KL are given for the base point's."""


AXES: dict[str, tuple[float, ...]] = {
    "length": (128, 1024, 4096, 16384),
    "vocabulary": (64, 8192, 131072),
    "entropy": (0.2, 0.7, 1.4),
    "kl": (1e-5, 1e-4, 1e-3),
    "lag": (1, 4, 16, 64),
    "anchored": (0.0, 0.003, 0.03),
    "temperature": (0.6, 0.7, 1.0),
}
_MOST_COMPARED = 1024
"""Most tokens of responses that are also decoded with drafts to other noise; longer ones would take minutes."""


def main() -> None:
    """Decode every point, then show and write the table."""
    given = arguments()
    warm_up()
    rows, began = list[dict[str, Any]](), time.monotonic()
    for row in synthetic(given.axes):
        rows.append(row)
        gone = f"{time.monotonic() - began:.0f} s"
        say(f"axes: {gone}, {row['changed']} {row['point']} {row['drafts']}")
    lines = [shown(row) for row in rows]
    table = show_rows("axes", COLUMNS, lines)
    base = {row["drafts"]: row["speedup_vs_plain"] for row in rows if row["changed"] == "base"}
    figures = {
        f"{name.replace(', ', '_').replace(' ', '_')}_speedup_vs_plain": value for name, value in base.items()
    }
    write("axes", {**figures, "options": asdict(Point()), "rows": rows, "tables": {"points": table}})


def arguments() -> argparse.Namespace:
    """Parse the options."""
    parser = option_parser(__doc__)
    parser.add_argument("--axes", nargs="*", choices=list(AXES), default=list(AXES))
    return parser.parse_args()


def shown(row: dict[str, Any]) -> list[str]:
    """Return the cells of a table row as text."""
    figures = (row["tokens_per_step"], row["acceptance_rate"])
    band = format_band(row["speedup_vs_plain"], row["speedup_vs_plain_low"])
    return [row["changed"], row["point"], row["drafts"], *map(format_value, figures), band]


def synthetic(axes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of the base point and of every other point on these axes."""
    base = Point()
    yield from rows_of("base", "", base)
    for name in axes:
        for value in AXES[name]:
            if value != getattr(base, name):
                yield from rows_of(
                    name, format_value(value), replace(base, **{name: type(getattr(base, name))(value)})
                )


def rows_of(changed: str, point: str, at: Point) -> Iterator[dict[str, Any]]:
    """Yield the rows of a point: with history alone, and with responses ahead to the same and other noise."""
    n = PROMPTS * SAMPLES
    policy = SyntheticPolicy(
        PolicySizes(at.vocabulary, at.entropy, at.kl, at.anchored, temperature=at.temperature / _TEMPERATURE)
    )
    prompts, noise = hashes(1, count=PROMPTS).repeat(SAMPLES), hashes(2, count=3 * n)
    now, ahead, epoch, before, other = policy.draw(
        np.tile(prompts, 5),
        np.concatenate([noise[:n], noise[:n], noise]),
        np.repeat([0, 1, at.lag, at.lag, 1], n),
        at.length,
    ).reshape(5, n, at.length)
    names = [f"p{place // SAMPLES}" for place in range(n)]
    history = [stored(names[i], i % SAMPLES, n + i, before[i], 0) for i in range(n)]
    drafts: dict[str, NDArray[np.int32] | None] = {"history": None, "ahead": ahead}
    if at.length <= _MOST_COMPARED:
        drafts["ahead, other noise"] = other
    if changed in ("base", "lag"):
        drafts["epoch"] = epoch
    for kind, references in drafts.items():
        texts = [
            KnownText(names[i], i, now[i], None if references is None else references[i]) for i in range(n)
        ]
        known = list(history)
        if references is other:
            # The index finds parts of such a draft; the reference drafter needs the same positions.
            known += [stored(names[i], i % SAMPLES, 2 * n + i, other[i], 1) for i in range(n)]
        yield _row(changed, point, kind, texts, known, at.vocabulary)


def _row(
    changed: str,
    point: str,
    drafts: str,
    texts: Sequence[KnownText],
    known: Sequence[StoredRollout],
    vocabulary: int,
) -> dict[str, Any]:
    found, low = band_of(texts, known, vocabulary)
    return {
        "changed": changed,
        "point": point,
        "drafts": drafts,
        "tokens_per_step": found.tokens_per_step,
        "acceptance_rate": found.counts.accepted / found.counts.drafted if found.counts.drafted else None,
        "speedup_vs_plain": plain_seconds(texts, DEVICES[H100_8B].steps) / found.seconds,
        "speedup_vs_plain_low": low,
    }


def band_of(
    texts: Sequence[KnownText], known: Sequence[StoredRollout], vocabulary: int
) -> tuple[DecodedBatch, float]:
    """Return a batch as decoded at the optimistic end of the band, and its speed at the pessimistic end.

    At either end the planner knows the step times of that end. Plain decoding does not wait for the host.
    """
    device = DEVICES[H100_8B]
    found, slow = (decode(texts, known, each, vocabulary) for each in (device.steps, device.pessimistic))
    return found, plain_seconds(texts, device.steps) / slow.seconds


if __name__ == "__main__":
    main()
