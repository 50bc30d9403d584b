"""Callers: the runs that a token may name, in every message that has one, and on whose behalf a service calls."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.transport.channel import ON_BEHALF, call_metadata
from paceline.v1 import fleet_pb2, rollout_pb2, weight_pb2, weight_stream_pb2
from services.contracts.errors import InvalidArgument, PermissionDenied
from services.platform.security.caller import (
    FIELDS,
    WITHOUT_RUN,
    TokenHolder,
    act_for,
    check_runs,
    current_caller,
    may_see,
    read_caller,
    runs_named,
)

PUBLIC = (rollout_pb2, weight_pb2, fleet_pb2, weight_stream_pb2)
OF_NO_RUN = {
    "FleetService": {
        "ListInstances",
        "WatchFleet",
        "Pause",
        "Resume",
        "Drain",
        "GetDrafter",
        "RollBackDrafter",
    },
    "WeightService": {"UpdateWeights", "FinishUpdate", "AbortUpdate", "GetVersions"},
    "WeightStreamService": {"PushWeights"},
}
"""Public methods that are about the whole fleet: weights, drafters and instances are those of all runs."""
NO_RUNS = {"run_seed", "running", "max_running"}
"""Fields whose names begin or end as that of a run, and that name none."""
ANSWERS_OF_RUNS = {"GetBatch", "ListBatches", "WatchDecisions"}
"""Methods whose answers name runs: the one that was asked for, or those that `may_see` allows."""


def methods(*modules: ModuleType) -> Iterator[MethodDescriptor]:
    for module in modules:
        for service in module.DESCRIPTOR.services_by_name.values():
            yield from service.methods


def places(descriptor: Descriptor, above: tuple[str, ...] = ()) -> Iterator[list[FieldDescriptor]]:
    """Yield the path of every field of a run, by a walk of its own."""
    for field in descriptor.fields:
        if "run" in field.name and field.name not in NO_RUNS:
            yield [field]
        if field.message_type is not None and field.message_type.full_name not in above:
            for path in places(field.message_type, (*above, descriptor.full_name)):
                yield [field, *path]


def naming(descriptor: Descriptor, path: list[FieldDescriptor], run_id: str) -> Message:
    """Return a message in which only this field is set."""
    message = GetMessageClass(descriptor)()
    inner = message
    for field in path[:-1]:
        inner = getattr(inner, field.name)
        inner = inner.add() if field.is_repeated else inner
        inner.SetInParent()
    if path[-1].is_repeated:
        getattr(inner, path[-1].name).append(run_id)
    else:
        setattr(inner, path[-1].name, run_id)
    return message


def caller(*runs: str, name: str = "team-a") -> TokenHolder:
    return TokenHolder(name=name, runs=runs or None)


# Patterns ------------------------------------------------------------------------------------------------

_CHARACTERS = "abzAZ09._-"
_PATTERNS = st.text(_CHARACTERS + "*?", min_size=1, max_size=6)
_RUNS = st.text(_CHARACTERS, max_size=8) | st.text(max_size=8)


def matches(pattern: str, run_id: str) -> bool:
    """Return whether a pattern matches, by the book: the rest of both, character by character."""
    if not pattern:
        return not run_id
    if pattern[0] == "*":
        return any(matches(pattern[1:], run_id[begin:]) for begin in range(len(run_id) + 1))
    return bool(run_id) and pattern[0] in ("?", run_id[0]) and matches(pattern[1:], run_id[1:])


@given(st.lists(_PATTERNS, min_size=1, max_size=4), _RUNS)
@example(["team-a"], "team-a\n")
@example(["team-a"], "Team-a")
@example(["team-a"], "team-ab")
@example(["team-a"], "xteam-a")
@example(["a.c"], "abc")
@example(["a*"], "a\nb")
@example(["a?"], "a")
@example(["a?b"], "a*b")
@example(["*"], "")
def test_no_pattern_grants_a_run_that_it_does_not_match(patterns: list[str], run_id: str) -> None:
    wanted = bool(run_id) and any(matches(pattern, run_id) for pattern in patterns)
    assert caller(*patterns).may_name(run_id) is wanted


def test_a_run_id_that_nothing_accepts_is_of_nobody() -> None:
    assert caller("*").may_name("a" * 256)
    assert not caller("*").may_name("a" * 257)
    assert caller().may_name("a" * 257), "without `runs` nothing is looked at"


def test_many_stars_take_no_time_to_speak_of() -> None:
    assert not caller("*a" * 60 + "*b").may_name("a" * 256)


@pytest.mark.parametrize(
    "pattern", ["", "a b", "a/b", "[ab]", "!a", "a\n", "ä", "x" * 129, "^a$", "a|b", "\\*"]
)
def test_other_characters_are_no_pattern(pattern: str) -> None:
    with pytest.raises(ValueError, match="runs"):
        caller(pattern)


@pytest.mark.parametrize("runs", [(), ("a",) * 65, ("x" * 128,) * 33])
def test_no_pattern_and_too_many_are_refused(runs: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="runs"):
        TokenHolder(name="a", runs=runs)


def test_a_request_without_a_run_gets_the_one_that_is_named_in_full() -> None:
    assert caller().run_or("http") == "http"
    assert caller("h*", "team-a").run_or("http") == "http"
    assert caller("team-*", "team-a").run_or("http") == "team-a"
    assert caller("team-*").run_or("http") == "http", "which is refused then"


# Messages ------------------------------------------------------------------------------------------------


def test_every_run_that_a_public_request_can_name_is_checked() -> None:
    mine, found = caller("mine"), set()
    for method in methods(*PUBLIC):
        name = f"/{method.containing_service.full_name}/{method.name}"
        for path in places(method.input_type):
            assert path[-1].name in FIELDS, f"{name}: is {path[-1].name} the name of a run?"
            with pytest.raises(PermissionDenied, match="theirs"):
                check_runs(mine, name, naming(method.input_type, path, "theirs"))
            check_runs(mine, name, naming(method.input_type, path, "mine"))
            found.add(method.full_name)
    unchecked = {method.full_name for method in methods(*PUBLIC)} - found
    assert unchecked == {f"paceline.v1.{name}.{m}" for name, each in OF_NO_RUN.items() for m in each}


def test_a_batch_is_never_named_without_its_run() -> None:
    for method in methods(*PUBLIC):
        fields = method.input_type.fields_by_name
        assert "batch_id" not in fields or "run_id" in fields, method.full_name


def test_a_run_that_is_left_out_is_refused_where_that_is_not_meant_to_be() -> None:
    for method in methods(*PUBLIC):
        name = f"{method.containing_service.full_name}/{method.name}"
        empty = GetMessageClass(method.input_type)()
        if list(runs_named(empty)) and name not in WITHOUT_RUN:
            with pytest.raises(PermissionDenied):
                check_runs(caller("*"), f"/{name}", empty)
        else:
            check_runs(caller("*a"), f"/{name}", empty)


def test_runs_in_answers_are_those_that_were_asked_for_or_may_be_seen() -> None:
    named = {method.name for method in methods(*PUBLIC) if any(places(method.output_type))}
    assert named == ANSWERS_OF_RUNS


def test_runs_are_found_at_any_depth() -> None:
    # No public request has one below its top.
    answer = rollout_pb2.ListBatchesResponse(batches=[{"run_id": "a"}, {"run_id": "b"}])
    assert list(runs_named(answer)) == ["a", "b"]
    assert list(runs_named(rollout_pb2.GetBatchResponse(batch={"run_id": "c"}))) == ["c"]
    assert list(runs_named(rollout_pb2.GetBatchResponse())) == []


# On behalf -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "who",
    [
        TokenHolder(name="plain"),
        TokenHolder(name="größe", runs=("a*", "b?"), max_queued_samples=3, max_queued_tokens=4),
        TokenHolder(name="x" * 64, runs=("y" * 63 + "*",) * 64, max_queued_tokens=2**40),
    ],
)
def test_a_caller_travels_in_metadata(who: TokenHolder) -> None:
    sent = who.metadata()
    assert sent.isascii()
    assert sent.isprintable()
    assert len(sent) < 6 << 10, "gRPC takes 8 KiB of metadata for certain"
    assert read_caller(sent) == who


@pytest.mark.parametrize(
    "sent", ["", "{", "[]", "null", '{"name": ""}', '{"name": "a", "runs": []}', "[" * 10**5]
)
def test_what_names_no_caller_is_refused(sent: str) -> None:
    with pytest.raises(InvalidArgument, match="x-paceline-caller"):
        read_caller(sent)


def test_the_calls_of_a_service_say_for_whom_they_are() -> None:
    who = caller("a*")
    try:
        act_for(who)
        assert current_caller() is who
        assert dict(call_metadata("own")) == {
            "authorization": "Bearer own",
            "x-paceline-caller": who.metadata(),
        }
        assert [may_see(run_id) for run_id in ("a1", "b", "")] == [True, False, True]
    finally:
        act_for(None)
    assert dict(call_metadata("own")) == {"authorization": "Bearer own"}
    assert ON_BEHALF.get() == ""
    assert may_see("b")
