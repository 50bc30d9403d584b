"""The receiver's ledger: a sample is reserved, committed and claimed at most once, and nothing stays for ever."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.generation.kv_transfer.reason import Reason
from services.generation.migration.protocol import REMEMBERED, ReceiverLedger, ReceiverState


def opened(*names: str, most: int = 8) -> ReceiverLedger:
    ledger = ReceiverLedger(most)
    for name in names:
        ledger.open(name, f"s-{name}", 10.0)
    return ledger


def state(ledger: ReceiverLedger, name: str) -> ReceiverState | None:
    found = ledger.get(name)
    return None if found is None else found.state


def test_the_way_of_a_sample() -> None:
    ledger = opened("a")
    assert ledger.claim("a") is None
    assert ledger.commit("a", 20.0)
    assert state(ledger, "a") is ReceiverState.COMMITTED
    claimed = ledger.claim("a")
    assert claimed is not None
    assert claimed.state is ReceiverState.CLAIMED
    assert ledger.claim("a") is None
    assert list(ledger) == []


def test_a_commit_is_done_once_and_never_after_a_cancel() -> None:
    ledger = opened("a", "b")
    assert ledger.commit("a", 20.0)
    assert not ledger.commit("a", 20.0)
    assert ledger.cancel("b", Reason.ABORTED)[1]
    assert not ledger.commit("b", 20.0)
    assert not ledger.commit("unknown", 20.0)


def test_a_cancel_comes_too_late_for_a_committed_sample_unless_it_is_disowned() -> None:
    ledger = opened("a", "b")
    ledger.commit("a", 20.0)
    incoming, ended = ledger.cancel("a", Reason.ABORTED)
    assert (incoming.state, ended) == (ReceiverState.COMMITTED, False)
    incoming, ended = ledger.cancel("a", Reason.ABORTED, disown=True)
    assert (incoming.state, ended) == (ReceiverState.CANCELLED, True)
    ledger.commit("b", 20.0)
    ledger.claim("b")
    incoming, ended = ledger.cancel("b", Reason.ABORTED, disown=True)
    assert (incoming.state, ended) == (ReceiverState.CLAIMED, False)


def test_a_cancel_that_overtakes_its_reserve_is_remembered() -> None:
    ledger = opened()
    assert ledger.cancel("a", Reason.ABORTED)[0].state is ReceiverState.CANCELLED
    with pytest.raises(ValueError, match="known"):
        ledger.open("a", "s", 10.0)


def test_deadlines() -> None:
    ledger = opened("a", "b")
    ledger.commit("b", 12.0)
    assert ledger.expire(9.9) == []
    assert [each.migration_id for each in ledger.expire(10.0)] == ["a"]
    assert [each.migration_id for each in ledger.expire(12.0)] == ["b"]
    assert (state(ledger, "a"), state(ledger, "b")) == (ReceiverState.CANCELLED, ReceiverState.EXPIRED)
    assert ledger.claim("b") is None


def test_only_reservations_count_against_the_limit() -> None:
    ledger = opened("a", "b", most=2)
    assert ledger.full
    ledger.commit("a", 20.0)
    assert not ledger.full


def test_what_is_over_is_forgotten_in_the_end() -> None:
    ledger = opened()
    for i in range(REMEMBERED + 1):
        ledger.cancel(str(i), Reason.ABORTED)
    assert ledger.get("0") is None
    assert ledger.get("1") is not None


class AnyOrder(RuleBasedStateMachine):
    """Whatever peers say in whatever order: states only go forward, and each sample is claimed at most once."""

    NAMES = st.sampled_from(["a", "b", "c"])

    def __init__(self) -> None:
        super().__init__()
        self.ledger = ReceiverLedger(3)
        self.now = 0.0
        self.seen: dict[str, list[ReceiverState]] = {}
        self.claimed: list[str] = []

    @rule(name=NAMES)
    def open(self, name: str) -> None:
        if self.ledger.get(name) is None:
            self.ledger.open(name, name, self.now + 5)

    @rule(name=NAMES)
    def commit(self, name: str) -> None:
        self.ledger.commit(name, self.now + 5)

    @rule(name=NAMES)
    def claim(self, name: str) -> None:
        if self.ledger.claim(name) is not None:
            self.claimed.append(name)

    @rule(name=NAMES, disown=st.booleans())
    def cancel(self, name: str, disown: bool) -> None:
        self.ledger.cancel(name, Reason.ABORTED, disown=disown)

    @rule(seconds=st.integers(1, 4))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.ledger.expire(self.now)

    @invariant()
    def forward(self) -> None:
        order = [ReceiverState.OPEN, ReceiverState.COMMITTED]
        for name in ("a", "b", "c"):
            found = self.ledger.get(name)
            if found is None:
                continue
            states = self.seen.setdefault(name, [])
            if not states or states[-1] is not found.state:
                assert not states or states[-1] in order, "a migration that was over went on"
                states.append(found.state)
        assert len(set(self.claimed)) == len(self.claimed)
        for live in self.ledger:
            assert not live.over
            assert live.deadline > self.now


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestAnyOrder = AnyOrder.TestCase
