"""Health of the fleet: life by two signs, and no way from DEAD to SERVING."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.gateway.state.fleet_health import FleetHealth, FleetRules, InstanceLoss, MemberState
from services.platform.redis.registry import InstanceRecord


def record(
    instance_id: str = "a", epoch: int = 1, state: str = "serving", version: int = 0
) -> InstanceRecord:
    return InstanceRecord("generation", instance_id, epoch=epoch, state=state, policy_version=version)


def serving(recorded: bool = False, version: int = 3) -> FleetHealth:
    fleet = FleetHealth()
    fleet.publish(version, recorded=recorded, now=0.0)
    fleet.observe({"a": record()}, 0.0)
    assert fleet.confirm("a", 1, version, 0.1, updated=False)
    return fleet


def test_a_new_instance_is_stale_until_it_confirms_the_published_version() -> None:
    fleet = FleetHealth()
    fleet.publish(3, recorded=True, now=0.0)
    fleet.observe({"a": record()}, 0.0)
    assert fleet.members["a"].state is MemberState.STALE
    assert not fleet.confirm("a", 1, 2, 0.1, updated=False)
    assert fleet.members["a"].state is MemberState.STALE
    assert fleet.confirm("a", 1, 3, 0.2, updated=True)
    assert fleet.members["a"].state is MemberState.SERVING


def test_the_first_instance_says_which_version_the_fleet_starts_with() -> None:
    fleet = FleetHealth()
    fleet.observe({"a": record(), "b": record("b")}, 0.0)
    assert fleet.confirm("a", 1, 4, 0.1, updated=False)
    assert fleet.published == 4
    assert not fleet.confirm("b", 1, 5, 0.1, updated=False)


def test_a_missing_heartbeat_and_a_silent_stream_are_a_loss() -> None:
    fleet = serving()
    assert fleet.observe({}, 4.0) == [InstanceLoss("a", 1, "heartbeat gone")]
    assert fleet.members["a"].state is MemberState.DEAD
    assert fleet.observe({}, 4.5) == []


def test_a_stream_that_still_speaks_outweighs_a_missing_record() -> None:
    fleet = serving()
    fleet.note_message("a", 1, 3.5)
    assert fleet.observe({}, 6.4) == []
    assert fleet.observe({}, 6.6) == [InstanceLoss("a", 1, "heartbeat gone")]


def test_a_new_epoch_ends_the_old_one_and_starts_stale() -> None:
    fleet = serving(recorded=True)
    assert fleet.observe({"a": record(epoch=2, version=3)}, 1.0) == [
        InstanceLoss("a", 1, "replaced by epoch 2")
    ]
    assert (fleet.members["a"].state, fleet.members["a"].epoch) == (MemberState.STALE, 2)
    assert not fleet.confirm("a", 1, 3, 1.1, updated=True)
    fleet.note_message("a", 1, 1.2)
    assert fleet.lost("a", 1, "late", 1.3) == []
    assert fleet.members["a"].state is MemberState.STALE
    assert fleet.confirm("a", 2, 3, 1.4, updated=False)


def test_an_older_epoch_is_not_listened_to() -> None:
    fleet = serving()
    fleet.observe({"a": record(epoch=2)}, 1.0)
    fleet.observe({"a": record(epoch=1)}, 1.1)
    assert fleet.members["a"].epoch == 2


def test_a_lost_epoch_serves_again_only_after_a_completed_update() -> None:
    fleet = serving(recorded=True)
    fleet.lost("a", 1, "broken", 1.0)
    assert fleet.due(1.1) == []
    fleet.observe({"a": record()}, 2.0)
    (member,) = fleet.due(2.0)
    assert member.state is MemberState.STALE
    assert not fleet.confirm("a", 1, 3, 2.1, updated=False)
    assert fleet.confirm("a", 1, 3, 2.2, updated=True)


def test_without_recorded_weights_the_handshake_has_to_do() -> None:
    fleet = serving(recorded=False)
    fleet.lost("a", 1, "broken", 1.0)
    fleet.observe({"a": record()}, 2.0)
    assert fleet.due(2.0)
    assert fleet.confirm("a", 1, 3, 2.1, updated=False)


@pytest.mark.parametrize("recorded", [True, False])
def test_a_quarantined_instance_needs_a_completed_update_in_any_case(recorded: bool) -> None:
    fleet = serving(recorded=recorded)
    fleet.quarantine("a", 1, "failed to apply", 1.0)
    assert fleet.members["a"].state is MemberState.STALE
    assert not fleet.confirm("a", 1, 3, 1.1, updated=False)
    assert fleet.confirm("a", 1, 3, 1.2, updated=True)


def test_a_dead_instance_confirms_nothing() -> None:
    fleet = serving()
    fleet.lost("a", 1, "broken", 1.0)
    assert not fleet.confirm("a", 1, 3, 1.1, updated=True)
    assert fleet.members["a"].state is MemberState.DEAD


def test_pauses_between_attempts_grow_and_are_bounded() -> None:
    fleet, now, waits = serving(), 1.0, []
    for _ in range(12):
        fleet.lost("a", 1, "broken", now)
        waits.append(fleet.members["a"].retry_at - now)
        now = fleet.members["a"].retry_at
        fleet.due(now)
    assert waits[:3] == [0.5, 1.0, 2.0]
    assert waits[-1] == FleetRules().retry_most


def test_publishing_makes_everybody_else_stale() -> None:
    fleet = serving()
    fleet.publish(4, recorded=True, now=1.0)
    assert fleet.members["a"].state is MemberState.STALE
    assert fleet.usable() == []
    assert fleet.confirm("a", 1, 4, 1.1, updated=True)


def test_only_a_change_of_the_reported_state_counts() -> None:
    fleet = serving()
    fleet.report("a", MemberState.PAUSED, 1.0)
    fleet.observe({"a": record(state="serving")}, 1.1)
    assert fleet.members["a"].state is MemberState.PAUSED
    fleet.observe({"a": record(state="paused")}, 1.2)
    fleet.observe({"a": record(state="serving")}, 1.3)
    assert fleet.members["a"].state is MemberState.SERVING
    fleet.observe({"a": record(state="draining")}, 1.4)
    assert fleet.members["a"].state is MemberState.DRAINING


def test_the_dead_are_forgotten_in_the_end() -> None:
    fleet = serving()
    fleet.observe({}, 4.0)
    fleet.observe({}, 4.0 + FleetRules().remember + 1)
    assert fleet.members == {}


class FleetMachine(RuleBasedStateMachine):
    """Any order of events: a member never goes from DEAD to SERVING, and serves the published version only."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = FleetHealth()
        self.fleet.publish(1, recorded=True, now=0.0)
        self.now, self.epoch, self.before = 0.0, 1, MemberState.STALE

    @rule(present=st.booleans(), state=st.sampled_from(["serving", "paused", "draining", "stale"]))
    def poll(self, present: bool, state: str) -> None:
        self.fleet.observe({"a": record(epoch=self.epoch, state=state)} if present else {}, self.now)

    @rule()
    def replaced(self) -> None:
        self.epoch += 1

    @rule(version=st.integers(1, 3), updated=st.booleans())
    def confirm(self, version: int, updated: bool) -> None:
        self.fleet.confirm("a", self.epoch, version, self.now, updated=updated)

    @rule()
    def lose(self) -> None:
        self.fleet.lost("a", self.epoch, "broken", self.now)

    @rule()
    def publish(self) -> None:
        self.fleet.publish((self.fleet.published or 0) + 1, recorded=True, now=self.now)

    @rule(seconds=st.floats(0.1, 40))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.fleet.due(self.now)

    @invariant()
    def never_from_dead_to_serving(self) -> None:
        member = self.fleet.members.get("a")
        state = member.state if member else MemberState.STALE
        assert not (
            self.before is MemberState.DEAD
            and state in (MemberState.SERVING, MemberState.PAUSED, MemberState.DRAINING)
        )
        self.before = state

    @invariant()
    def only_the_published_version_serves(self) -> None:
        assert all(member.version == self.fleet.published for member in self.fleet.usable())
        assert all(not member.needs_update for member in self.fleet.usable())


TestFleetMachine = FleetMachine.TestCase
TestFleetMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
