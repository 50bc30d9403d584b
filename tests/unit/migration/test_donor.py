"""The donor: whatever happens, in whatever order, the sample ends up in exactly one place."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.generation.kv_transfer.reason import Reason
from services.generation.migration.protocol import Action, Donor, Event, Stage

FORWARD = [Action.COPY, Action.PAUSE, Action.SEND, Action.COMMIT, Action.RELEASE]


def test_a_move_without_trouble() -> None:
    donor = Donor()
    found = [action for _ in range(6) for action in donor.on(Event.DONE)]
    assert found == FORWARD
    assert (donor.stage, donor.moved, donor.reason) == (Stage.OVER, True, None)


def at(stage: Stage) -> Donor:
    donor = Donor()
    while donor.stage is not stage:
        donor.on(Event.FAILED if donor.stage is Stage.COMMITTING and stage is Stage.DECIDING else Event.DONE)
    return donor


def test_a_refusal_costs_nothing() -> None:
    donor = at(Stage.RESERVING)
    assert donor.on(Event.REFUSED, Reason.NO_KV, "full") == []
    assert (donor.refused, donor.moved, donor.reason, donor.message) == (True, False, Reason.NO_KV, "full")


def test_before_it_is_paused_a_failure_only_frees_the_reservation() -> None:
    for stage in (Stage.RESERVING, Stage.COPYING, Stage.PAUSING):
        for event in (Event.FAILED, Event.LEFT):
            donor = at(stage)
            assert donor.on(event, Reason.CONNECTION) == [Action.CANCEL]
            assert (donor.stage, donor.moved, donor.refused) == (Stage.OVER, False, False)


def test_a_paused_sample_decodes_on_before_anything_else() -> None:
    donor = at(Stage.SENDING)
    assert donor.on(Event.FAILED, Reason.CHECKSUM) == [Action.RESUME, Action.CANCEL]
    donor = at(Stage.COMMITTING)
    assert donor.on(Event.REFUSED, Reason.CHECKSUM) == [Action.RESUME]
    assert donor.reason is Reason.CHECKSUM


def test_an_unanswered_commit_is_decided_by_the_receiver() -> None:
    donor = at(Stage.COMMITTING)
    assert donor.on(Event.FAILED, Reason.DEADLINE, "no answer") == [Action.DECIDE]
    assert donor.paused
    assert donor.on(Event.DONE) == [Action.RELEASE]
    assert donor.on(Event.DONE) == []
    assert (donor.moved, donor.reason) == (True, None)

    donor = at(Stage.DECIDING)
    assert donor.on(Event.REFUSED, Reason.RECEIVER_LOST) == [Action.RESUME]
    assert not donor.moved


def test_the_first_reason_stays() -> None:
    donor = at(Stage.COMMITTING)
    donor.on(Event.FAILED, Reason.DEADLINE, "no answer")
    donor.on(Event.FAILED, Reason.RECEIVER_LOST, "gone")
    assert (donor.reason, donor.message) == (Reason.DEADLINE, "no answer")


def test_without_an_answer_the_donor_goes_on_and_disowns_what_there_may_be() -> None:
    assert at(Stage.DECIDING).on(Event.FAILED) == [Action.RESUME, Action.DISOWN]


def test_a_sample_that_ended_meanwhile_is_disowned_once_it_was_offered() -> None:
    for stage in (Stage.COMMITTING, Stage.DECIDING, Stage.RELEASING):
        donor = at(stage)
        assert donor.on(Event.LEFT, Reason.ABORTED) == [Action.DISOWN]
        assert (donor.moved, donor.reason) == (False, Reason.ABORTED)


@given(st.lists(st.sampled_from(Event), min_size=1, max_size=12))
def test_any_course_ends_with_one_owner(events: list[Event]) -> None:
    donor, taken = Donor(), []
    paused = left = False
    for event in events:
        stage = donor.stage
        actions = donor.on(event, Reason.CONNECTION)
        paused |= stage is Stage.PAUSING and event is Event.DONE
        left |= stage is not Stage.OVER and event is Event.LEFT
        taken += actions
        if stage is Stage.OVER:
            assert actions == []
    for action in set(taken):
        assert taken.count(action) == 1
    if donor.stage is not Stage.OVER:
        return
    if donor.moved:
        assert Action.RELEASE in taken
        assert Action.RESUME not in taken
        assert not {Action.CANCEL, Action.DISOWN} & set(taken)
    else:
        # It is resumed if and only if it was paused and is still there; the receiver was told, or refused itself.
        assert (Action.RESUME in taken) == (paused and not left)
        assert donor.reason is not None
