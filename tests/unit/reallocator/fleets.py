"""Fleets for tests of the plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import hypothesis.strategies as st

from services.reallocator.planning.records import Candidate, InstanceView, Transfer
from services.reallocator.planning.throughput import ThroughputCurve

BLOCK = 16
# Shaped as RLHFSpec's Figure 5: flat to a dozen samples, then in proportion.
FIGURE_5 = ThroughputCurve(tuple(max(0.0078, 0.00069 * n) for n in range(1, 65)))
FLAT = ThroughputCurve((0.005,) * 64)
STEEP = ThroughputCurve(tuple(0.001 * n for n in range(1, 65)))


def candidate(key: str, tokens: int = 64, accepted: float = 0.0, remaining: float = 1000.0) -> Candidate:
    return Candidate(key, tokens, accepted, remaining, -(-tokens // BLOCK))


def view(
    name: str,
    samples: int | Sequence[Candidate],
    *,
    threshold: int = 19,
    curve: ThroughputCurve = FIGURE_5,
    most: int = 64,
    free_blocks: int = 10_000,
) -> InstanceView:
    if isinstance(samples, int):
        samples = [candidate(f"{name}.{n}", tokens=64 + n) for n in range(samples)]
    return InstanceView(
        name, len(samples), max(0, most - len(samples)), free_blocks, curve, threshold, tuple(samples)
    )


def moved(fleet: Iterable[InstanceView], transfers: Iterable[Transfer]) -> list[InstanceView]:
    """Return the fleet after the transfers; a key that is not where it should be is an error."""
    by_name = {each.instance_id: each for each in fleet}
    for transfer in transfers:
        donor, receiver = by_name[transfer.donor], by_name[transfer.receiver]
        wanted = dict.fromkeys(transfer.keys)
        going = [each for each in donor.candidates if each.key in wanted]
        assert len(going) == len(transfer.keys) == len(wanted)
        blocks = sum(each.blocks for each in going)
        by_name[transfer.donor] = replace(
            donor,
            samples=donor.samples - len(going),
            room=donor.room + len(going),
            free_blocks=donor.free_blocks + blocks,
            candidates=tuple(each for each in donor.candidates if each.key not in wanted),
        )
        by_name[transfer.receiver] = replace(
            receiver,
            samples=receiver.samples + len(going),
            room=receiver.room - len(going),
            free_blocks=receiver.free_blocks - blocks,
            candidates=receiver.candidates + tuple(going),
        )
    return list(by_name.values())


@st.composite
def curves(draw: st.DrawFn) -> ThroughputCurve:
    """Rooflines: flat, then rising."""
    base = draw(st.floats(1e-4, 1e-2))
    slope = draw(st.floats(0, 1e-3))
    knee = draw(st.integers(1, 80))
    tokens = draw(st.floats(1, 8))
    return ThroughputCurve(
        tuple(base + slope * n + slope * 3 * max(0, n - knee) for n in range(1, 65)), tokens
    )


@st.composite
def fleets(draw: st.DrawFn, *, alike: bool = True) -> list[InstanceView]:
    """Up to five instances; `alike`: with the same curve and threshold."""
    curve, threshold = draw(curves()), draw(st.integers(1, 64))
    found = []
    for number in range(draw(st.integers(0, 5))):
        if not alike:
            curve, threshold = draw(curves()), draw(st.integers(1, 64))
        samples = [
            Candidate(
                f"i{number}.{place}",
                tokens := draw(st.integers(1, 2000)),
                draw(st.floats(0, 8)),
                draw(st.floats(0, 4000)),
                -(-tokens // BLOCK),
                draw(st.booleans()) or draw(st.booleans()),
            )
            for place in range(draw(st.integers(0, 20)))
        ]
        free = draw(st.integers(0, 1000))
        found.append(view(f"i{number}", samples, threshold=threshold, curve=curve, free_blocks=free))
    return found
