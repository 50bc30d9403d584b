"""Whatever happens to Redis, no process that lives is taken for dead, and one that died is noticed."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.platform.redis.registry import HEARTBEAT, SETTLING, OutageGrace

# Ticks of the simulated clock: a second, the life of a record, the pauses of a watcher and of a process between
# heartbeats and after one that failed, and the longest that a heartbeat hangs after Redis can be reached again.
SECOND = 20
TTL = 3 * SECOND
LOOK = SECOND // 4
BEAT = int(HEARTBEAT * SECOND)
RETRY = SECOND // 4
TIMEOUT = 5 * SECOND
CALM = int(SETTLING * SECOND) + TTL + LOOK
IDS = ("a", "b", "c")


@dataclass(frozen=True)
class Outage:
    """`kind` is `refused` (reads are answered), `unreachable`, `hung` (all is answered at its end) or `forgets`."""

    after: int
    ticks: int
    kind: str


@dataclass
class World:
    """Redis, three processes that send heartbeats, and a watcher, which reads before any heartbeat comes back."""

    outages: list[Outage]
    deaths: dict[str, int] = field(default_factory=dict)
    expires: dict[str, int] = field(default_factory=dict)
    views: dict[int, set[str]] = field(default_factory=dict)
    now: int = 0

    def __post_init__(self) -> None:
        self.grace: OutageGrace[str] = OutageGrace(LOOK + SECOND, SETTLING * SECOND)
        self.due = {name: 3 * number for number, name in enumerate(IDS)}
        self.look_at, self.probed, self.probe = 0, False, False

    def run(self) -> None:
        """Live through the outages, and the calm after them."""
        for outage in self.outages:
            self.live(outage.after, "")
            if outage.kind == "forgets":
                self.expires.clear()
                self.probe = False
            elif outage.kind == "hung":
                self.now += outage.ticks
            else:
                self.live(outage.ticks, outage.kind)
        self.live(CALM + 1, "")

    def live(self, ticks: int, kind: str) -> None:
        """Let so many ticks pass, in an outage of this kind or (empty) in calm."""
        end = self.now + ticks
        while self.now < end:
            if self.now >= self.look_at:
                self.look_at = self.now + LOOK
                self.look(kind)
            for name in self.alive():
                if self.now >= self.due[name]:
                    self.beat(name, kind, end, ticks)
            self.now += 1

    def alive(self) -> list[str]:
        return [name for name in IDS if self.deaths.get(name, self.now + 1) > self.now]

    def beat(self, name: str, kind: str, end: int, ticks: int) -> None:
        if not kind:
            self.expires[name] = self.now + TTL
            self.due[name] = self.now + BEAT
        elif kind == "refused":
            self.due[name] = self.now + RETRY
        else:
            # TCP repeats what was lost ever more seldom: a short outage makes nothing hang for long.
            self.due[name] = end + min(TIMEOUT, ticks) + RETRY

    def look(self, kind: str) -> None:
        if kind == "unreachable":
            self.grace.disturbed(self.now)
            return
        if kind == "refused" or (self.probed and not self.probe):
            self.grace.disturbed(self.now)
        if not kind:
            self.probed = self.probe = True
        found = {name: name for name, end in self.expires.items() if end > self.now}
        self.views[self.now] = set(self.grace.update(found, self.now))


# Long enough to be noticed: shorter ones do harm only if they meet the heartbeats of one process again and again.
outages = st.builds(
    Outage,
    after=st.integers(0, 10 * SECOND),
    ticks=st.integers(LOOK + SECOND + 1, 15 * SECOND),
    kind=st.sampled_from(["refused", "unreachable", "hung", "forgets"]),
)
deaths = st.dictionaries(st.sampled_from(IDS), st.integers(0, 20 * SECOND))


@given(outages=st.lists(outages, max_size=4), deaths=deaths)
@example(outages=[Outage(SECOND, 3 * SECOND + 2, "refused")], deaths={})
def test_no_process_is_gone_before_it_dies_and_each_is_gone_after(
    outages: list[Outage], deaths: dict[str, int]
) -> None:
    world = World(outages, deaths)
    world.run()
    seen: set[str] = set()
    for at, view in world.views.items():
        seen |= view
        assert all(deaths.get(name, at + 1) <= at for name in seen - view), f"{seen - view} gone at {at}"
    last = max(world.views)
    assert set(world.alive()) <= world.views[last]
    assert not world.views[last] & {name for name, death in deaths.items() if death <= last - CALM}


@pytest.mark.parametrize("kind", ["refused", "unreachable", "hung", "forgets"])
def test_an_outage_of_any_length_loses_no_process(kind: str) -> None:
    for ticks in range(1, 8 * SECOND):
        for after in range(2 * SECOND, 3 * SECOND, 4):
            world = World([Outage(after, ticks, kind)])
            world.run()
            views = [view for at, view in world.views.items() if at > SECOND]
            assert all(view == set(IDS) for view in views), f"{ticks} ticks after {after}"


@given(death=st.integers(SECOND, 20 * SECOND))
def test_in_calm_a_dead_process_is_gone_as_soon_as_its_record(death: int) -> None:
    world = World([], {"a": death})
    world.live(death + TTL + LOOK, "")
    gone = min(at for at, view in world.views.items() if at > SECOND and "a" not in view)
    assert death < gone < death + TTL + LOOK
