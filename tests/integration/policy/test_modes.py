"""Every mode on a real engine, changed while it runs: the tokens are those of plain decoding."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import grpc
import pytest

from paceline.convert.fleet import knobs_to_proto
from paceline.internal.v1 import generation_pb2
from paceline.internal.v1 import policy_pb2 as pb
from paceline.internal.v1 import policy_pb2_grpc as rpc
from paceline.times import seconds_of
from services.contracts.knob_store import KnobStore
from services.contracts.knobs import KnobScope
from services.contracts.modes import MODES
from services.platform.config import ServiceConfig
from services.platform.redis.connection import connect
from tests.support.instances import CALL, InstanceProcess, Outcome, calling, generate, item
from tests.support.models import VOCAB_SIZE, tiny_model

NAMESPACE = "policy-modes"
SAMPLES, TOKENS = 12, 80


async def _switch_off(redis_url: str) -> int:
    redis = connect(ServiceConfig(redis_url=redis_url))
    try:
        return await KnobStore(redis, NAMESPACE).set(KnobScope(), 0, {"speculation": False}, "test")
    finally:
        await redis.aclose()


@pytest.fixture(scope="module")
def instance(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InstanceProcess]:
    """An instance that starts when speculation is switched off for the fleet, without a policy service."""
    asyncio.run(_switch_off(redis_url))
    model = tiny_model(tmp_path_factory.mktemp("model"))
    folder = tmp_path_factory.mktemp("modes")
    settings = {"namespace": NAMESPACE, "instance_id": "modes", "drafters": '["reference"]'}
    with InstanceProcess(model, redis_url, folder, **settings) as process:
        yield process


class Knobs:
    """The instance's knobs."""

    def __init__(self, stub: Any) -> None:
        self.stub = stub
        self.revision = 1

    async def set(self, setting: dict[str, Any], **runs: dict[str, Any]) -> pb.ApplyKnobsResponse:
        self.revision += 1
        request = pb.ApplyKnobsRequest(revision=self.revision, knobs=knobs_to_proto(setting))
        for run_id, each in runs.items():
            request.runs[run_id].CopyFrom(knobs_to_proto(each))
        return await self.stub.ApplyKnobs(request, timeout=CALL)

    async def report(self) -> pb.GetSpeculationReportResponse:
        report = await self.stub.GetSpeculationReport(pb.GetSpeculationReportRequest(), timeout=CALL)
        self.revision = max(self.revision, report.revision)
        return report


@pytest.fixture
async def knobs(instance: InstanceProcess) -> AsyncIterator[Knobs]:
    async with grpc.aio.insecure_channel(instance.address) as channel:
        made = Knobs(rpc.KnobServiceStub(channel))
        await made.report()
        yield made


def items(
    step: int, truth: dict[int, list[int]] | None = None, run_id: str = "run"
) -> list[generation_pb2.WorkItem]:
    """Return the same samples in every step; given the truth, with a guess of which one token in ten is wrong."""
    chosen = random.Random(5)
    made = []
    for handle in range(SAMPLES):
        prompt = [chosen.randrange(2, VOCAB_SIZE) for _ in range(20)]
        guess = [] if truth is None else _spoilt(truth[handle], handle)
        made.append(
            item(
                handle,
                prompt,
                seed=900 + handle,
                max_tokens=TOKENS,
                ignore_eos=True,
                reference_token_ids=guess,
                run_id=run_id,
                prompt_id=f"p{handle}",
                step=step,
            )
        )
    return made


def _spoilt(tokens: Sequence[int], seed: int) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(2, VOCAB_SIZE) if chosen.random() < 0.1 else token for token in tokens]


def drafted(outcomes: dict[int, Outcome]) -> int:
    return sum(
        source.drafted
        for outcome in outcomes.values()
        if outcome.finished is not None
        for source in outcome.finished.draft_sources
    )


def tokens(outcomes: dict[int, Outcome]) -> dict[int, list[int]]:
    return {handle: outcome.tokens for handle, outcome in outcomes.items()}


def counted(instance: InstanceProcess) -> float:
    """Draft tokens that were verified, by the metrics."""
    name = "paceline_speculation_drafted_tokens_total"
    return sum(value for key, value in instance.metrics().items() if key.startswith(name))


@pytest.fixture(scope="module")
def truth(instance: InstanceProcess) -> dict[int, list[int]]:
    """What plain decoding gives."""
    plain = asyncio.run(generate(instance.address, items(0)))
    assert all(len(outcome.tokens) == TOKENS for outcome in plain.values())
    return tokens(plain)


async def test_an_instance_starts_with_the_knobs_that_are_kept(
    instance: InstanceProcess, knobs: Knobs, truth: dict[int, list[int]]
) -> None:
    report = await knobs.report()
    assert report.revision >= 1
    assert report.own_knobs.speculation, "its own configuration, which what is kept overrides"
    assert report.own_knobs.mode == "planner"
    outcomes = await generate(instance.address, items(1, truth))
    assert drafted(outcomes) == 0
    assert tokens(outcomes) == truth


async def test_tokens_are_the_same_in_every_mode_and_each_is_on_the_account(
    instance: InstanceProcess, knobs: Knobs, truth: dict[int, list[int]]
) -> None:
    for first, mode in zip(range(1000, 9000, 1000), MODES, strict=False):
        assert (await knobs.set({"mode": mode, "draft_cap": 8})).speculates
        # On a busy machine drafts may not pay, or seem not to, for a whole step.
        for step in range(first, first + 20):
            outcomes = await generate(instance.address, items(step, truth))
            assert tokens(outcomes) == truth, mode
            tallies = {each.step: each for each in (await knobs.report()).steps}
            tally = tallies[step]
            assert (tally.run_id, tally.mode) == ("run", mode)
            assert drafted(outcomes) == sum(each.drafted for each in tally.drafts)
            assert seconds_of(tally.measured_time) > 0
            assert tally.reasons
            if drafted(outcomes):
                break
        else:
            pytest.fail(f"{mode}: nothing was ever drafted")


async def test_knobs_that_change_in_mid_sample_do_not_change_it(
    instance: InstanceProcess, knobs: Knobs, truth: dict[int, list[int]]
) -> None:
    settings: list[dict[str, Any]] = [
        {"mode": "fixed", "draft_cap": 2},
        {"speculation": False},
        {"mode": "planner", "draft_cap": 3, "latch": True},
        {"mode": "toggle", "draft_cap": 1, "margin": 0.0},
        {"drafters": {"reference": False}},
        {"mode": "solver", "draft_cap": 3},
    ]
    # The samples may have ended before a change is heard: then they are begun again, as another step.
    for step in range(100, 120):
        async with calling(instance.address) as caller:
            await caller.send(start=items(step, truth))
            for setting in settings:
                before = {handle: len(caller.of(handle).tokens) for handle in range(SAMPLES)}
                answer = await knobs.set(setting, other={"draft_cap": 1})
                assert answer.revision == knobs.revision
                await caller.until(
                    lambda was=before: all(
                        caller.of(h).over or len(caller.of(h).tokens) > was[h] for h in range(SAMPLES)
                    )
                )
            outcomes = await caller.ended(*range(SAMPLES))
        assert tokens(outcomes) == truth
        (tally,) = [each for each in (await knobs.report()).steps if each.step == step]
        if "off" in tally.reasons and drafted(outcomes) > 0:
            return
    pytest.fail("the samples always ended before drafting was switched off")


async def test_after_the_kill_switch_not_one_token_is_drafted(
    instance: InstanceProcess, knobs: Knobs, truth: dict[int, list[int]]
) -> None:
    await knobs.set({"mode": "fixed"})
    await generate(instance.address, items(30, truth))
    await knobs.set({"speculation": False})
    before = counted(instance)
    assert before > 0
    outcomes = await generate(instance.address, items(31, truth))
    assert counted(instance) == before
    assert tokens(outcomes) == truth
    # One run alone may be switched off as well.
    await knobs.set({"mode": "fixed"}, run={"speculation": False})
    assert drafted(await generate(instance.address, items(32, truth))) == 0
    assert drafted(await generate(instance.address, items(32, truth, "other"))) > 0


async def test_old_and_bad_knobs_are_refused(instance: InstanceProcess, knobs: Knobs) -> None:
    await knobs.set({"draft_cap": 4})
    old = pb.ApplyKnobsRequest(revision=knobs.revision - 1, knobs=knobs_to_proto({"draft_cap": 9}))
    assert (await knobs.stub.ApplyKnobs(old, timeout=CALL)).revision == knobs.revision
    for bad in (
        pb.ApplyKnobsRequest(revision=10**6, knobs=knobs_to_proto({"draft_cap": 0})),
        pb.ApplyKnobsRequest(revision=10**6, runs={"r": knobs_to_proto({"mode": "best"})}),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await knobs.stub.ApplyKnobs(bad, timeout=CALL)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await knobs.report()).revision == knobs.revision
