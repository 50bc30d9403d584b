"""Tenants of one gateway: tokens for runs by pattern, and quotas of what each has in work."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from paceline import AsyncClient, Group, RetryPolicy, SampleRequest, SamplingParams
from paceline import types as t
from paceline.errors import ResourceExhaustedError
from paceline.tokens import hash_token
from paceline.transport.channel import CALLER, call_metadata
from paceline.v1 import fleet_pb2, rollout_pb2, sample_pb2, weight_pb2
from services.platform.redis.decision_log import DecisionRecord
from services.platform.security.caller import WITHOUT_RUN, TokenHolder
from tests.integration.gateway.conftest import (
    CALL,
    Cluster,
    RunningGateway,
    Trainer,
    check_samples,
    details,
    make_batch,
    until,
)

NEVER = RetryPolicy(seconds=0)


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    """Tokens of two tenants, and of one with quotas, each its own name."""
    every = ["rollouts", "weights", "fleet"]
    entries: list[dict[str, Any]] = [
        {"name": "alice", "scopes": every, "runs": ["a-*"]},
        {"name": "bob", "scopes": every, "runs": ["b-*"]},
        {"name": "few", "scopes": ["rollouts"], "runs": ["few"], "max_queued_samples": 10},
        {"name": "short", "scopes": ["rollouts"], "runs": ["short"], "max_queued_tokens": 200},
    ]
    path = tmp_path / "tokens.yaml"
    path.write_text(yaml.safe_dump([{**entry, "sha256": hash_token(entry["name"])} for entry in entries]))
    return path


async def served(cluster: Cluster, tokens_file: Path, **settings: Any) -> tuple[RunningGateway, Any]:
    gateway = await cluster.gateway(tokens_file=tokens_file, token="own", **settings)
    fake = await cluster.instance("i0", max_running=64)
    await cluster.serving(gateway, 1)
    return gateway, fake


def client_of(gateway: RunningGateway, token: str, retry: RetryPolicy = NEVER) -> AsyncClient:
    return AsyncClient(gateway.gateway.address, token=token, retry=retry, timeout=CALL)


def batch_of(run_id: str, samples: int = 4, max_tokens: int = 40) -> rollout_pb2.SubmitRolloutsRequest:
    request = make_batch(groups=1, samples=samples, max_tokens=max_tokens, ignore_eos=True)
    request.run_id = run_id
    return request


async def submit(
    gateway: RunningGateway, token: str, request: rollout_pb2.SubmitRolloutsRequest
) -> rollout_pb2.SubmitRolloutsResponse:
    return await gateway.trainer.rollouts.SubmitRollouts(request, timeout=CALL, metadata=call_metadata(token))


# Runs ----------------------------------------------------------------------------------------------------


def requests(run_id: str) -> dict[str, Any]:
    """Return a request of each public method that names a run."""
    batch: dict[str, Any] = {"run_id": run_id, "batch_id": "step"}
    group = rollout_pb2.Group(prompt_id="p", prompt_token_ids=[1], samples=1)
    sampling = sample_pb2.SamplingParams(max_tokens=2)
    # Of a version that there is not: it is checked after the run.
    sample: dict[str, Any] = {
        "run_id": run_id,
        "prompt_id": "p",
        "prompt_token_ids": [1],
        "policy_version": 7,
    }
    return {
        "SubmitRollouts": rollout_pb2.SubmitRolloutsRequest(**batch, groups=[group], sampling=sampling),
        "OpenBatch": rollout_pb2.OpenBatchRequest(run_id=run_id, batch_id="open", sampling=sampling),
        "AddSamples": rollout_pb2.AddSamplesRequest(**batch, groups=[group]),
        "CloseBatch": rollout_pb2.CloseBatchRequest(**batch),
        "ContinueSamples": rollout_pb2.ContinueSamplesRequest(**batch, continuations=[{"prompt_id": "p"}]),
        "StreamRollouts": rollout_pb2.StreamRolloutsRequest(**batch),
        "AckRollouts": rollout_pb2.AckRolloutsRequest(**batch),
        "Generate": rollout_pb2.GenerateRequest(**sample),
        "CancelRollouts": rollout_pb2.CancelRolloutsRequest(**batch),
        "HintNextBatch": rollout_pb2.HintNextBatchRequest(
            run_id=run_id, step=9, groups=[group], sampling=sampling
        ),
        "ReportRewards": rollout_pb2.ReportRewardsRequest(**batch),
        "GetBatch": rollout_pb2.GetBatchRequest(**batch),
        "ListBatches": rollout_pb2.ListBatchesRequest(run_id=run_id),
        "EndRun": rollout_pb2.EndRunRequest(run_id=run_id),
        "GetKnobs": fleet_pb2.GetKnobsRequest(run_id=run_id),
        "SetKnobs": fleet_pb2.SetKnobsRequest(run_id=run_id),
        "WatchDecisions": fleet_pb2.WatchDecisionsRequest(run_id=run_id, kept=True),
        "StartUpdate": weight_pb2.StartUpdateRequest(run_id=run_id),
    }


def method_of(trainer: Trainer, name: str) -> Any:
    return next(
        getattr(stub, name)
        for stub in (trainer.rollouts, trainer.weights, trainer.fleet)
        if hasattr(stub, name)
    )


async def answer(trainer: Trainer, name: str, request: Any, *metadata: tuple[str, str]) -> Any:
    """Return the answer, or the last one of a stream; the error if there is one."""
    call = method_of(trainer, name)(request, timeout=CALL, metadata=metadata)
    try:
        if isinstance(call, grpc.aio.UnaryStreamCall):
            return [each async for each in call][-1:]
        return await call
    except grpc.aio.AioRpcError as error:
        return error


def refused(found: Any) -> bool:
    return isinstance(found, grpc.aio.AioRpcError) and found.code() is grpc.StatusCode.PERMISSION_DENIED


def test_the_table_has_every_public_method_that_names_a_run() -> None:
    services = [
        module.DESCRIPTOR.services_by_name[name]
        for module, name in (
            (rollout_pb2, "RolloutService"),
            (fleet_pb2, "FleetService"),
            (weight_pb2, "WeightService"),
        )
    ]
    named = {m.name for s in services for m in s.methods if "run_id" in m.input_type.fields_by_name}
    assert named == set(requests("x"))


async def test_every_method_is_for_the_runs_of_its_token_and_no_others(
    cluster: Cluster, tokens_file: Path
) -> None:
    gateway, fake = await served(cluster, tokens_file)
    fake.hold_at = 1
    trainer, alice = gateway.trainer, call_metadata("alice")
    # What bob has in work, under the name that the requests ask for.
    theirs = requests("b-1")["SubmitRollouts"]
    await submit(gateway, "bob", theirs)
    kept = gateway.gateway.leadership.leading().recovery.records.all()
    assert [record.key for record in kept] == [("b-1", "step")]

    told: dict[str, list[str]] = {}
    for run_id in ("b-1", "b-nothing", "A-1", "xa-1", "a", "b-1\na-1"):
        for name, request in requests(run_id).items():
            error = await answer(trainer, name, request, *alice)
            assert refused(error), (name, run_id, error)
            info = details(error)["ErrorInfo"]
            assert info.reason == "RUN_NOT_GRANTED"
            assert dict(info.metadata) == {"run": run_id, "patterns": "a-*", "token": "alice"}
            told.setdefault(name, []).append(error.details().replace(repr(run_id), "RUN"))
    assert all(len(set(each)) == 1 for each in told.values()), (
        "what there is and what there is not look alike"
    )

    for name, request in requests("").items():
        allowed = any(each.endswith(f"/{name}") for each in WITHOUT_RUN)
        found = await answer(trainer, name, request, *alice)
        assert refused(found) is not allowed, name
    # Nothing of bob's was touched: his one sample still runs.
    assert [each.has_ended(0) for each in kept] == [False]

    fake.hold_at = None
    for name, request in requests("a-1").items():
        found = await answer(trainer, name, request, *alice)
        assert not refused(found), (name, found)

    labels = {"component": "gateway", "grant": "alice", "reason": "RUN_NOT_GRANTED"}
    counted = gateway.registry.get_sample_value("paceline_rpc_refused_total", labels)
    without = len(requests("")) - len(WITHOUT_RUN)
    assert counted == 6 * len(requests("")) + without


async def test_answers_about_several_runs_have_those_of_the_token(
    cluster: Cluster, tokens_file: Path
) -> None:
    gateway, fake = await served(cluster, tokens_file)
    fake.hold_at = 1
    for token, run_id in (("alice", "a-1"), ("bob", "b-1"), ("alice", "a-2"), ("bob", "b-2")):
        await submit(gateway, token, batch_of(run_id))
    decisions = gateway.gateway.leadership.leading().decisions
    for run_id in ("a-1", "b-1", ""):
        await decisions.write(DecisionRecord("test", "because", run_id=run_id))

    async def seen(token: str) -> tuple[list[str], list[str]]:
        async with client_of(gateway, token) as client:
            batches = [each.run_id async for each in client.batches()]
            told = [each async for each in client.watch_decisions(kept=True)]
            return batches, [each.run_id for each in told if each.kind == "test"]

    assert await seen("alice") == (["a-1", "a-2"], ["a-1", ""])
    assert await seen("bob") == (["b-1", "b-2"], ["b-1", ""])
    assert await seen("own") == (["a-1", "b-1", "a-2", "b-2"], ["a-1", "b-1", ""])
    # Page by page, with a token from one who sees more.
    first = await gateway.trainer.rollouts.ListBatches(
        rollout_pb2.ListBatchesRequest(page_size=2), timeout=CALL, metadata=call_metadata("own")
    )
    rest = await gateway.trainer.rollouts.ListBatches(
        rollout_pb2.ListBatchesRequest(page_token=first.next_page_token),
        timeout=CALL,
        metadata=call_metadata("alice"),
    )
    assert [each.run_id for each in rest.batches] == ["a-2"]


async def test_a_service_calls_for_somebody_and_a_caller_cannot(cluster: Cluster, tokens_file: Path) -> None:
    gateway, fake = await served(cluster, tokens_file)
    fake.hold_at = 1
    await submit(gateway, "bob", requests("b-1")["SubmitRollouts"])
    look = requests("b-1")["GetBatch"]
    for_bob = (CALLER, TokenHolder(name="bob", runs=("b-*",)).metadata())
    for_alice = (CALLER, TokenHolder(name="alice", runs=("a-*",)).metadata())
    trainer, own, alice = gateway.trainer, call_metadata("own"), call_metadata("alice")
    assert (await answer(trainer, "GetBatch", look, *own)).batch.run_id == "b-1"
    assert (await answer(trainer, "GetBatch", look, *own, for_bob)).batch.run_id == "b-1"
    assert refused(await answer(trainer, "GetBatch", look, *own, for_alice))
    assert refused(await answer(trainer, "GetBatch", look, *alice, for_bob))
    nobody = await answer(trainer, "GetBatch", look, *own, (CALLER, "{}"))
    assert nobody.code() is grpc.StatusCode.INVALID_ARGUMENT


# Quotas --------------------------------------------------------------------------------------------------


def in_use(gateway: RunningGateway, token: str) -> tuple[float, float]:
    return (
        gateway.metric("grant_unfinished_samples", grant=token),
        gateway.metric("grant_unfinished_tokens", grant=token),
    )


def groups(samples: int, prompt_id: str = "p") -> list[Group]:
    return [Group(prompt_id, [1, 2], samples)]


def opened(run_id: str) -> t.Batch:
    return t.Batch(run_id, "open", 0, 0, [], SamplingParams(max_tokens=5, ignore_eos=True))


async def test_a_token_has_so_many_samples_in_work_and_no_more(cluster: Cluster, tokens_file: Path) -> None:
    gateway, fake = await served(cluster, tokens_file, abort_timeout_seconds=CALL)
    fake.hold_at = 1
    first = batch_of("few", 8)
    await submit(gateway, "few", first)
    assert in_use(gateway, "few") == (8, 8 * 43)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await submit(gateway, "few", batch_of("few", 3))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    told = details(caught.value)
    assert dict(told["ErrorInfo"].metadata) == {
        "resource": "max_queued_samples",
        "token": "few",
        "limit": "10",
        "used": "8",
        "wanted": "3",
    }
    assert told["RetryInfo"].retry_delay.seconds == 1
    assert told["QuotaFailure"].violations[0].subject == "max_queued_samples"
    # What can never be is not to be waited for.
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await submit(gateway, "few", batch_of("few", 11))
    assert "RetryInfo" not in details(caught.value)
    assert "at most 10" in str(caught.value.details())
    # The same batch again is no new one, and others are not held up.
    assert (await submit(gateway, "few", first)).already_submitted
    await submit(gateway, "alice", batch_of("a-1", 30))

    async with client_of(gateway, "few") as client:
        # An open batch and single samples count likewise.
        await client.open_batch(opened("few"))
        assert await client.add_samples("few", "open", groups(2)) == 2
        assert in_use(gateway, "few")[0] == 10
        with pytest.raises(ResourceExhaustedError, match="10 unfinished samples; 1 more"):
            await client.add_samples("few", "open", groups(1, "q"))
        with pytest.raises(ResourceExhaustedError, match="max_queued_samples"):
            await anext(client.generate(SampleRequest("few", "p", [1])))
        # Cancelled ones are not in use any more.
        await client.cancel("few", "open")
        await until(lambda: in_use(gateway, "few")[0] == 8, "two are free")
        await client.end_run("few")
    assert in_use(gateway, "few") == (0, 0)
    labels = {"component": "gateway", "grant": "few", "reason": "max_queued_samples"}
    assert gateway.registry.get_sample_value("paceline_rpc_refused_total", labels) == 4


async def test_tokens_count_as_many_as_there_may_be(cluster: Cluster, tokens_file: Path) -> None:
    gateway, fake = await served(cluster, tokens_file)
    fake.hold_at = 1
    # Three prompt tokens and 40 of the response each.
    await submit(gateway, "short", batch_of("short", 4))
    assert in_use(gateway, "short") == (4, 172)
    with pytest.raises(
        grpc.aio.AioRpcError, match="172 tokens of unfinished samples; 43 more would exceed 200"
    ):
        await submit(gateway, "short", batch_of("short", 1))
    await submit(gateway, "short", batch_of("short", 1, max_tokens=25))
    assert in_use(gateway, "short") == (5, 200)
    # Without max_tokens a sample may fill the model, which is more than the token has.
    whole = batch_of("short", 1)
    whole.sampling.ClearField("max_tokens")
    with pytest.raises(grpc.aio.AioRpcError, match="512 more would exceed 200") as caught:
        await submit(gateway, "short", whole)
    assert "RetryInfo" not in details(caught.value)


async def one(client: AsyncClient, prompt_id: str) -> t.Sample:
    request = SampleRequest("few", prompt_id, [1], sampling=SamplingParams(max_tokens=4, ignore_eos=True))
    async with aclosing(client.generate(request)) as events:  # type: ignore[type-var]
        async for event in events:
            last = event
    assert isinstance(last, t.Sample)
    return last


async def test_the_sdk_waits_for_room(cluster: Cluster, tokens_file: Path) -> None:
    gateway, fake = await served(cluster, tokens_file)
    fake.hold_at = 1
    async with client_of(gateway, "few", RetryPolicy(seconds=CALL)) as client:
        async with asyncio.TaskGroup() as tasks:
            samples = [tasks.create_task(one(client, f"p{n}")) for n in range(14)]
            labels = {"component": "gateway", "grant": "few", "reason": "max_queued_samples"}
            await until(
                lambda: (gateway.registry.get_sample_value("paceline_rpc_refused_total", labels) or 0) >= 4,
                "four were told to come again",
            )
            assert in_use(gateway, "few")[0] == 10
            fake.hold_at = None
        assert {task.result().prompt_id for task in samples} == {f"p{n}" for n in range(14)}
    assert in_use(gateway, "few") == (0, 0)


async def test_a_successor_counts_what_it_takes_over(cluster: Cluster, tokens_file: Path) -> None:
    gateway, fake = await served(cluster, tokens_file)
    fake.hold_at = 1
    mine, services = batch_of("few", 6), batch_of("few", 3)
    await submit(gateway, "few", mine)
    await submit(gateway, "own", services)
    async with client_of(gateway, "few") as client:
        await client.open_batch(opened("few"))
        await client.add_samples("few", "open", groups(1))
        await client.add_samples("few", "open", groups(1, "q"))
        await client.cancel("few", "open", [t.SampleKey("q", 0)])
        await until(lambda: in_use(gateway, "few") == (7, 6 * 43 + 7), "one of them has ended")
    successor = await cluster.gateway(leading=False, tokens_file=tokens_file, token="own")
    await gateway.kill()
    await until(lambda: successor.gateway.leadership.term is not None, "the other gateway leads")
    await until(lambda: in_use(successor, "few") == (7, 6 * 43 + 7), "it has what was unfinished")
    await cluster.serving(successor, 1)
    with pytest.raises(grpc.aio.AioRpcError, match="7 unfinished samples; 4 more would exceed 10"):
        await submit(successor, "few", batch_of("few", 4))
    await submit(successor, "few", batch_of("few", 3))
    fake.hold_at = None
    events = [
        event
        async for event in successor.trainer.rollouts.StreamRollouts(
            rollout_pb2.StreamRolloutsRequest(run_id="few", batch_id=mine.batch_id),
            timeout=CALL,
            metadata=call_metadata("few"),
        )
        if event.HasField("sample")
    ]
    check_samples(mine, events)
    await until(lambda: in_use(successor, "few") == (0, 0), "all have ended")
