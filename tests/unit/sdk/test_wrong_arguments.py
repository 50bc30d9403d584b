"""Whatever a trainer gives for an argument of a call: it is sent as it was meant, or refused by its name."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import InvalidArgumentError
from paceline import types as t
from paceline.aio import AsyncRun
from paceline.blocking import finish
from paceline.calls import GatewayCalls
from paceline.transport.interface import Stream, Unary
from paceline.v1 import weight_pb2
from tests.unit.sdk.anything import anything
from tests.unit.sdk.scripted_transport import ScriptedTransport

GROUP = t.Group("p", [1, 2], 2)
BATCH = t.Batch("r", "b", 1, 2, [GROUP])
ARGUMENTS: dict[str, Any] = {
    "batch": BATCH,
    "request": t.SampleRequest("r", "p", [1]),
    "hint": t.BatchHint("r", 1, 2, [GROUP]),
    "setting": t.KnobSetting(0, {"draft_cap": 1}),
    "version": 3,
    "step": 1,
    "cursor": 0,
    "drafter_version": 1,
    "groups": [GROUP],
    "continuations": [t.Continuation("p", 0, 1, [1])],
    "rewards": [t.Reward("p", 0, 1.0)],
    "path": "/weights",
    "target": t.WeightTarget.POLICY,
    "tools": t.ToolUse((1,)),
    "policy_version": 3,
}
"""What the calls are made with, by the parameters' names; of others, a string."""
PARTS_OF_THEIR_OWN = {"batch", "request", "hint", "setting", "version", "samples"}
"""Parameters whose parts have names of their own."""
NOT_OF_TRAINERS = {"call", "close", "run_work", "sleep", "events", "dial", "post_ack", "send_batch"}
OF_RUNS = ("rollout", "open_batch", "sessions", "hint", "report_rewards")


class Sent(Exception):
    """The request was made."""


class Sending(ScriptedTransport):
    """Ends every call when its request was made, except the calls of a run before it."""

    async def send(self, unary: Unary) -> Any:
        if unary.method == "GetVersions":
            return weight_pb2.GetVersionsResponse(policy_version=3)
        raise Sent

    def open(self, stream: Stream[Any], seconds: float | None) -> NoReturn:
        stream.request()
        raise Sent


async def made(outcome: Any) -> None:
    """Make a call that was begun."""
    if hasattr(outcome, "__aenter__"):
        await outcome.__aenter__()
    elif isinstance(outcome, AsyncIterator):
        await anext(outcome)
    else:
        await outcome


def calls_of(kind: type[Any], names: tuple[str, ...]) -> list[Any]:
    """Return the methods of a class that take arguments."""
    found = [each for name, each in inspect.getmembers(kind, inspect.isfunction) if name in names]
    return [each for each in found if len(inspect.signature(each).parameters) > 1]


def try_one(data: st.DataObject, method: Callable[..., Any], of: Any) -> None:
    """Make a call with one argument that may be anything."""
    _, *parameters = inspect.signature(method).parameters.values()
    options = [each for each in parameters if each.kind is each.VAR_KEYWORD]
    parameters = [each for each in parameters if each not in options]
    named = [each.name for each in parameters] + [*t.BatchOptions.__annotations__] * len(options)
    wrong = data.draw(st.sampled_from(named))
    arguments = {
        each.name: ARGUMENTS.get(each.name, "x") for each in parameters if each.default is each.empty
    }
    arguments[wrong] = data.draw(anything)
    with pytest.raises((Sent, InvalidArgumentError)) as caught:
        finish(made(method(of, **arguments)))
    if isinstance(caught.value, InvalidArgumentError):
        assert wrong.rstrip("s") in caught.value.violations[0].field or wrong in PARTS_OF_THEIR_OWN


_PUBLIC = tuple(name for name in dir(GatewayCalls) if name[0] != "_" and name not in NOT_OF_TRAINERS)


@pytest.mark.parametrize("method", calls_of(GatewayCalls, _PUBLIC), ids=lambda each: each.__name__)
@settings(max_examples=20)
@given(data=st.data())
def test_an_argument_of_a_call_is_sent_or_refused_by_its_name(method: Any, data: st.DataObject) -> None:
    try_one(data, method, GatewayCalls(Sending({})))


@pytest.mark.parametrize("method", calls_of(AsyncRun, OF_RUNS), ids=lambda each: each.__name__)
@settings(max_examples=60)
@given(data=st.data())
def test_an_argument_of_a_run_is_sent_or_refused_by_its_name(method: Any, data: st.DataObject) -> None:
    try_one(data, method, AsyncRun(GatewayCalls(Sending({})), "r", 1, None))


@pytest.mark.parametrize("wrong", ["max_stalenes", "tools", "run_id"])
def test_a_keyword_that_is_no_option_is_refused_before_anything_is_sent(wrong: str) -> None:
    class Silent(Sending):
        async def send(self, unary: Unary) -> NoReturn:
            raise AssertionError(f"{unary.method} was called")

    run = AsyncRun(GatewayCalls(Silent({})), "r", 1, None)
    options: Any = {wrong: t.ToolUse((1,))}
    for call in (run.rollout(1, [GROUP], **options), run.open_batch(1, **options)):
        with pytest.raises(TypeError, match=f"'{wrong}' is not an option; options are exactness, deadline"):
            finish(made(call))
