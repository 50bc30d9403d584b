"""The policy service: knobs reach every instance, whoever comes late, dies or lags behind."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from paceline.convert.fleet import knobs_from_proto
from paceline.internal.v1 import policy_pb2 as pb
from paceline.v1 import knobs_pb2
from services.contracts.knob_store import KnobStore, lease_key
from tests.integration.policy.conftest import CALL, Fleet, until

LADDER = {"on": True, "lengths": [2, 4, 8]}


def code(error: pytest.ExceptionInfo[grpc.aio.AioRpcError]) -> grpc.StatusCode:
    return error.value.code()


async def test_a_change_reaches_every_instance_before_it_is_answered(fleet: Fleet) -> None:
    first, second = await fleet.instance("i0"), await fleet.instance("i1")
    policy = await fleet.policy()
    await fleet.linked(policy, 2)
    answer = await policy.set(0, {"speculation": False})
    assert (list(answer.applied), list(answer.pending)) == (["i0", "i1"], [])
    assert first.knobs == second.knobs == {"speculation": False}
    kept = await policy.get()
    assert (kept.revision, knobs_from_proto(kept.knobs)) == (answer.revision, {"speculation": False})
    (decision,) = await fleet.decided("knobs")
    assert decision.reason == "fleet: speculation unset -> false"


async def test_a_change_made_from_a_stale_revision_is_refused(fleet: Fleet) -> None:
    policy = await fleet.policy()
    first = await policy.set(0, {"mode": "toggle"})
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await policy.set(0, {"mode": "fixed"})
    assert code(refused) is grpc.StatusCode.ABORTED
    assert f"revision {first.revision}" in (refused.value.details() or "")
    assert knobs_from_proto((await policy.get()).knobs) == {"mode": "toggle"}
    await policy.set(first.revision, {"mode": "fixed"})
    answers = await asyncio.gather(
        *(policy.set(0, {"draft_cap": n + 1}, run_id="run") for n in range(8)), return_exceptions=True
    )
    assert sum(isinstance(each, pb.SetKnobsResponse) for each in answers) == 1, "one of them was first"


# Field 99, which there is not.
OF_A_LATER_VERSION = knobs_pb2.Knobs.FromString(b"\x98\x06\x01")


@pytest.mark.parametrize(
    ("knobs", "scope", "said"),
    [
        ({"mode": "best"}, {}, "knobs.mode"),
        ({"ladder": {"patience": 0}}, {}, "knobs.ladder.patience"),
        (OF_A_LATER_VERSION, {}, "does not know"),
        ({}, {"run_id": "r", "pool": "p"}, "only one"),
    ],
)
async def test_bad_knobs_are_refused(fleet: Fleet, knobs: Any, scope: Any, said: str) -> None:
    policy = await fleet.policy()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await policy.set(0, knobs, **scope)
    assert code(refused) is grpc.StatusCode.INVALID_ARGUMENT
    assert said in (refused.value.details() or "")
    assert (await policy.get()).revision == 0


async def test_each_instance_gets_what_its_model_its_pool_and_its_runs_say(fleet: Fleet) -> None:
    spot, other = await fleet.instance("spot-0", pool="spot"), await fleet.instance("other-0")
    policy = await fleet.policy()
    await policy.set(0, {"mode": "toggle", "draft_cap": 8})
    await policy.set(0, {"draft_cap": 4}, pool="spot")
    await policy.set(0, {"margin": 0.5}, model="models/m")
    await policy.set(0, {"margin": 0.7}, model="models/another")
    await policy.set(0, {"draft_cap": 2}, run_id="r")
    await fleet.linked(policy, 2)
    assert spot.knobs == {"mode": "toggle", "draft_cap": 4, "margin": 0.5}
    assert other.knobs == {"mode": "toggle", "draft_cap": 8, "margin": 0.5}
    assert {run: knobs_from_proto(each) for run, each in spot.latest.runs.items()} == {"r": {"draft_cap": 2}}


async def test_one_that_comes_late_or_comes_back_gets_the_knobs(fleet: Fleet) -> None:
    policy = await fleet.policy()
    await policy.set(0, {"speculation": False})
    late = await fleet.instance("i0")
    await fleet.linked(policy, 1)
    assert late.knobs == {"speculation": False}
    again = await fleet.instance("i0")
    await until(lambda: again.applied, "the process that took over the name has them")
    assert again.knobs == {"speculation": False}


async def test_one_that_does_not_answer_is_told_of_and_tried_again(fleet: Fleet) -> None:
    well, ill = await fleet.instance("i0"), await fleet.instance("i1")
    # Long enough for the one that is well, on a busy machine too.
    policy = await fleet.policy(answer_seconds=4.0)
    await fleet.linked(policy, 2)
    ill.deaf = True
    answer = await policy.set(0, {"speculation": False})
    assert (list(answer.applied), list(answer.pending)) == (["i0"], ["i1"])
    assert well.knobs == {"speculation": False}
    ill.deaf = False
    await fleet.linked(policy, 2)
    assert ill.knobs == {"speculation": False}


async def test_a_standby_takes_over_with_all_that_was_set(fleet: Fleet) -> None:
    instance = await fleet.instance("i0")
    leader = await fleet.policy("policy-0")
    standby = await fleet.policy("policy-1", leading=False)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await standby.get()
    assert code(refused) is grpc.StatusCode.UNAVAILABLE
    before = await leader.set(0, {"mode": "solver"})
    await leader.kill()
    await until(standby.leads, "the standby leads")
    assert (await standby.get()).revision == before.revision
    await fleet.linked(standby, 1)
    after = await standby.set(before.revision, {"mode": "fixed"})
    assert after.revision > before.revision
    assert instance.knobs == {"mode": "fixed"}


async def test_a_leader_that_was_frozen_cannot_write(fleet: Fleet) -> None:
    policy = await fleet.policy(lease_seconds=30)
    await fleet.redis.set(lease_key(fleet.config.namespace), "another")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await policy.set(0, {"mode": "fixed"})
    assert code(refused) is grpc.StatusCode.UNAVAILABLE
    assert (await KnobStore(fleet.redis, fleet.config.namespace).load()).settings == {}


async def test_a_redis_that_lost_its_counter_does_not_leave_instances_behind(fleet: Fleet) -> None:
    instance = await fleet.instance("i0", revision=41)
    policy = await fleet.policy()
    answer = await policy.set(0, {"mode": "fixed"})
    await fleet.linked(policy, 1)
    assert instance.knobs == {"mode": "fixed"}
    assert instance.revision > 41
    assert (await policy.get()).revision == answer.revision


async def test_a_redis_that_lost_the_settings_can_be_told_new_ones(fleet: Fleet) -> None:
    instance = await fleet.instance("i0")
    policy = await fleet.policy()
    before = await policy.set(0, {"speculation": False})
    keys = [key async for key in fleet.redis.scan_iter(f"{fleet.config.namespace}:*settings")]
    assert await fleet.redis.delete(*keys) == 1
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await policy.set(before.revision, {"mode": "fixed"})
    assert code(refused) is grpc.StatusCode.ABORTED
    assert (await policy.get()).revision == 0, "callers are told what is kept"
    await policy.set(0, {"mode": "fixed"})
    await fleet.linked(policy, 1)
    assert instance.knobs == {"mode": "fixed"}


def tally(step: int, accepted: int, engine_steps: int = 100, cap: int = 4) -> pb.StepTally:
    return pb.StepTally(
        run_id="run",
        step=step,
        reasons={"drafts": engine_steps - 10, "within_margin": 10},
        predicted_gain=0.5 * engine_steps,
        drafts=[pb.DraftTally(drafter="suffix", verifications=100, drafted=100 * cap, accepted=accepted)],
        mode="planner",
    )


async def test_a_finished_step_is_explained_with_its_gain(fleet: Fleet) -> None:
    first, second = await fleet.instance("i0"), await fleet.instance("i1")
    # Both are asked in this time, however busy the machine is: else there would be an end for each.
    await fleet.linked(await fleet.policy(settle_seconds=3.0), 2)
    first.report.steps.extend([tally(0, 200)])
    second.report.steps.extend([tally(0, 300)])
    (decision,) = await fleet.decided("speculation")
    assert (decision.run_id, decision.predicted_gain) == ("run", pytest.approx(0.5))
    assert decision.reason.startswith("step 0: 180 of 200 engine steps verified drafts, 3.50 tokens")
    assert "within the margin in 20" in decision.reason
    assert decision.details["reasons"] == {"drafts": 180, "within_margin": 20}
    assert decision.details["drafts"] == {"suffix": [200, 800, 500]}


async def test_the_ladder_moves_the_cap_of_a_run_on_every_instance(fleet: Fleet) -> None:
    instance = await fleet.instance("i0")
    policy = await fleet.policy()
    await policy.set(0, {"ladder": LADDER, "draft_cap": 5})
    for step in range(2):
        instance.report.steps.extend([tally(step, 400)])
        await fleet.decided("speculation", step + 1)
    (moved,) = await fleet.decided("draft_cap")
    assert (moved.details["from"], moved.details["to"]) == (4, 8)
    assert moved.predicted_gain > 0
    await fleet.linked(policy, 1)
    assert dict(instance.latest.run_caps) == {"run": 8}
    assert (await policy.get(run_id="run")).ladder_cap == 8
    # The next leader goes on from there.
    await policy.kill()
    successor = await fleet.policy("policy-1")
    assert (await successor.get(run_id="run")).ladder_cap == 8


async def test_switches_are_told_once(fleet: Fleet) -> None:
    instance = await fleet.instance("i0")
    await fleet.policy()
    on = pb.Switch(serial=1, on=True, predicted_speedup=1.3, requests=12, run_id="run", step=3)
    instance.report.switches.extend([on])
    (decision,) = await fleet.decided("toggle")
    assert decision.predicted_gain == pytest.approx(0.3)
    assert "on at 12 samples" in decision.reason
    off = pb.Switch(serial=2, on=False, predicted_speedup=0.9, requests=9, run_id="run", step=3)
    instance.report.switches.extend([off])
    assert [each.details["on"] for each in await fleet.decided("toggle", 2)] == [True, False]


async def test_too_many_scopes_are_refused_and_empty_ones_make_room(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.contracts.knob_store.MAX_SCOPES", 2)
    policy = await fleet.policy()
    first = await policy.set(0, {"mode": "fixed"}, run_id="a")
    await policy.set(0, {"mode": "fixed"}, run_id="b")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await policy.set(0, {"mode": "fixed"}, run_id="c")
    assert code(refused) is grpc.StatusCode.RESOURCE_EXHAUSTED
    await policy.set(first.revision, {}, run_id="a")
    await policy.set(0, {"mode": "fixed"}, run_id="c")


async def test_two_that_write_the_same_scope_at_once_see_each_other(fleet: Fleet) -> None:
    policy = await fleet.policy()
    revision = 0
    for n in range(5):
        answer = await asyncio.wait_for(policy.set(revision, {"draft_cap": n + 1}), CALL)
        assert answer.revision > revision
        revision = answer.revision
