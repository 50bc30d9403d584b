"""The phases of an update: only forwards, one at a time, and published once all is done."""

from __future__ import annotations

import json

import hypothesis.strategies as st
import pytest
from google.rpc import error_details_pb2
from hypothesis import given

from paceline.v1 import weight_pb2
from services.contracts.errors import FailedPrecondition, NotFound
from services.gateway.instances.updater import order_of
from services.gateway.state.update_book import (
    InFlightTreatment,
    PublishedVersion,
    UpdateBook,
    UpdatePhase,
    WeightUpdate,
)

KEEP_KV = weight_pb2.IN_FLIGHT_KEEP_KV


def test_the_phases_follow_each_other() -> None:
    book = UpdateBook(10.0, PublishedVersion(3))
    book.start("u", "run", 4, 0.0)
    book.staged("u", "/w", "sha256:x", 1.0)
    book.applying("u", 0, 2.0)
    assert book.is_applying()
    assert book.publish() == PublishedVersion(4, "/w", "sha256:x", "u")
    assert (book.version, book.active) == (4, None)


def test_a_version_must_be_above_the_current_one() -> None:
    book = UpdateBook(10.0, PublishedVersion(3))
    for version in (2, 3):
        with pytest.raises(FailedPrecondition) as error:
            book.start("u", "run", version, 0.0)
        assert error.value.reason == "VERSION_NOT_NEWER"


def test_one_update_at_a_time() -> None:
    book = UpdateBook(10.0, PublishedVersion(3))
    book.start("u", "run", 4, 0.0)
    with pytest.raises(FailedPrecondition) as error:
        book.start("v", "run", 5, 0.0)
    assert error.value.reason == "UPDATE_IN_PROGRESS"
    book.drop()
    book.start("v", "run", 5, 0.0)


def test_starting_the_same_update_again_goes_on_with_it() -> None:
    book = UpdateBook(10.0, PublishedVersion(3))
    book.start("u", "run", 4, 0.0)
    book.staged("u", "/w", "sha256:x", 1.0)
    assert book.start("v", "run", 4, 5.0).update_id == "u"
    assert book.expired(14.0) is None, "its trainer is there"
    book.applying("u", 0, 6.0)
    for run, version in (("run", 4), ("run", 5), ("another", 4)):
        with pytest.raises(FailedPrecondition) as error:
            book.start("v", run, version, 7.0)
        assert error.value.reason == "UPDATE_IN_PROGRESS"


def test_unfinished_samples_keep_the_old_version() -> None:
    book = UpdateBook(10.0, PublishedVersion(3))
    book.start("u", "run", 4, 0.0)
    book.staged("u", "/w", "", 1.0)
    with pytest.raises(FailedPrecondition, match="12 samples of version 3"):
        book.applying("u", 12, 2.0)
    assert book.active is not None
    assert book.active.phase is UpdatePhase.STAGED


def test_a_phase_out_of_order_and_an_unknown_update_are_refused() -> None:
    book = UpdateBook(10.0, PublishedVersion(3))
    with pytest.raises(NotFound):
        book.staged("u", "/w", "", 0.0)
    book.start("u", "run", 4, 0.0)
    with pytest.raises(NotFound):
        book.staged("other", "/w", "", 0.0)
    with pytest.raises(FailedPrecondition):
        book.applying("u", 0, 0.0)
    book.staged("u", "/w", "", 0.0)
    book.staged("u", "/w2", "", 0.0)
    book.applying("u", 0, 0.0)
    with pytest.raises(FailedPrecondition):
        book.staged("u", "/w3", "", 0.0)


def test_an_update_expires_unless_it_is_being_applied() -> None:
    book = UpdateBook(10.0, PublishedVersion(3))
    assert book.expired(100.0) is None
    update = book.start("u", "run", 4, 0.0)
    assert book.expired(10.0) is None
    assert book.expired(10.1) is update
    book.staged("u", "/w", "", 11.0)
    assert book.expired(20.0) is None
    book.applying("u", 0, 20.0)
    assert book.expired(1000.0) is None


def test_books_survive_being_written_down() -> None:
    update = WeightUpdate("u", "run", 4, UpdatePhase.STAGED, 1.5, "/w", "sha256:x")
    assert WeightUpdate.from_json(update.to_json()) == update
    published = PublishedVersion(4, "/w", "sha256:x", "u")
    assert PublishedVersion.from_json(published.to_json().encode()) == published


def test_a_gateway_takes_over_from_one_that_wrote_more_fields() -> None:
    update = WeightUpdate("u", "run", 4, UpdatePhase.STARTED, 1.5, ticket="t")
    # Releases with a transport COLLECTIVE wrote this one.
    written = {**json.loads(update.to_json()), "collective": True}
    assert WeightUpdate.from_json(json.dumps(written)) == update


def test_samples_that_are_aborted_or_go_on_do_not_keep_the_old_version() -> None:
    for treatment in (InFlightTreatment.ABORT, InFlightTreatment.CONTINUE, InFlightTreatment.KEEP_KV):
        book = UpdateBook(10.0, PublishedVersion(3))
        book.start("u", "run", 4, 0.0)
        book.staged("u", "/w", "", 1.0)
        update = book.applying("u", 12, 2.0, treatment)
        assert WeightUpdate.from_json(update.to_json()) == update


def test_an_update_that_keeps_kv_can_be_finished_by_an_earlier_release() -> None:
    """It knows CONTINUE only, under which samples compute their KV again."""
    book = UpdateBook(10.0, PublishedVersion(3))
    book.start("u", "run", 4, 0.0)
    book.staged("u", "/w", "", 1.0)
    update = book.applying("u", 12, 2.0, InFlightTreatment.KEEP_KV)
    assert (order_of(update), order_of(WeightUpdate.from_json(update.to_json()))) == (KEEP_KV, KEEP_KV)
    written = json.loads(update.to_json())
    assert written["in_flight"] == "continue"
    del written["keeps_kv"]
    assert order_of(WeightUpdate.from_json(json.dumps(written))) == weight_pb2.IN_FLIGHT_CONTINUE
    # An attempt that could not be recorded may be repeated with another treatment.
    update.phase = UpdatePhase.STAGED
    assert order_of(book.applying("u", 12, 2.0, InFlightTreatment.ABORT)) == weight_pb2.IN_FLIGHT_REFUSE


def test_a_refusal_names_the_update_and_keeps_it_alive() -> None:
    book = UpdateBook(10.0, PublishedVersion(3))
    book.start("u", "run", 4, 0.0)
    book.staged("u", "/w", "", 1.0)
    with pytest.raises(FailedPrecondition) as error:
        book.applying("u", 12, 9.0)
    assert error.value.reason == "SAMPLES_UNFINISHED"
    info = next(each for each in error.value.details if isinstance(each, error_details_pb2.ErrorInfo))
    assert (info.metadata["update_id"], info.metadata["version"]) == ("u", "4")
    assert book.expired(18.0) is None


@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from(InFlightTreatment)), max_size=6))
def test_samples_go_on_through_updates_that_let_them_and_no_other(
    updates: list[tuple[int, InFlightTreatment]],
) -> None:
    book = UpdateBook(10.0, PublishedVersion(3))
    # The versions whose samples are still there.
    alive = {3}
    for number, (more, treatment) in enumerate(updates):
        version = (book.version or 0) + more
        book.start(f"u{number}", "run", version, 0.0)
        book.staged(f"u{number}", "/w", "", 0.0)
        book.applying(f"u{number}", 0, 0.0, treatment)
        published = book.publish()
        assert PublishedVersion.from_json(published.to_json()) == published
        go_on = treatment in (InFlightTreatment.CONTINUE, InFlightTreatment.KEEP_KV)
        alive = {*alive, version} if go_on else {version}
        for asked in range(3, version + 1):
            # Between two that go on there may be versions that never were.
            goes_on = min(alive) <= asked
            assert book.version_for(asked) == (version if goes_on else None)
        assert book.version_for(version + 1) == version + 1


def test_every_sample_goes_on_where_the_version_before_is_not_known() -> None:
    update = WeightUpdate("u", "run", 4, UpdatePhase.APPLYING, 1.5, "/w", "", InFlightTreatment.CONTINUE)
    book = UpdateBook(10.0, None, update)
    book.publish()
    assert [book.version_for(version) for version in (0, 3, 4)] == [4, 4, 4]


def test_records_have_nothing_that_an_earlier_release_does_not_know() -> None:
    published = PublishedVersion(4, "/w", "sha256:x", "u")
    assert "since" not in published.to_json()
    update = WeightUpdate("u", "run", 4, UpdatePhase.STAGED, 1.5, "/w", "sha256:x")
    assert "in_flight" not in update.to_json()
    before = '{"version": 4, "path": "/w", "checksum": "", "update_id": ""}'
    assert PublishedVersion.from_json(before) == PublishedVersion(4, "/w")
