"""Finished samples reach the draft store, and whatever becomes of it, samples reach their trainer."""

from __future__ import annotations

import pytest

from paceline.v1 import rollout_pb2, sample_pb2
from services.contracts.rollout import RolloutKind
from services.gateway.feeds.history import HistoryWriter
from tests.integration.gateway.conftest import CALL, Cluster, check_samples, make_batch, until
from tests.integration.gateway.replica import Replica

LEVELS = [
    sample_pb2.EXACTNESS_LEVEL_EXACT,
    sample_pb2.EXACTNESS_LEVEL_COUPLED_HISTORY,
    sample_pb2.EXACTNESS_LEVEL_REJECTION,
]


async def store_of(cluster: Cluster) -> Replica:
    return await cluster.stack.enter_async_context(Replica(cluster.redis_url, cluster.namespace))


@pytest.mark.parametrize("level", LEVELS)
async def test_every_whole_sample_is_kept_as_it_was_delivered(
    cluster: Cluster, level: sample_pb2.ExactnessLevel
) -> None:
    store = await store_of(cluster)
    gateway = await cluster.gateway()
    for name in ("i0", "i1"):
        await cluster.instance(name)
    await cluster.serving(gateway, 2)
    request = make_batch(groups=5, samples=4, exactness=sample_pb2.Exactness(level=level))
    await gateway.trainer.submit(request)
    samples = [event.sample for event in await gateway.trainer.collect(request)]
    await until(lambda: len(store.rollouts()) == 20, "the store has them all")
    assert {sample.status for sample in samples} == {
        sample_pb2.SAMPLE_STATUS_COMPLETED,
        sample_pb2.SAMPLE_STATUS_TRUNCATED,
    }
    for sample in samples:
        kept = store.rollouts()[sample.prompt_id, sample.slot, 0]
        assert kept.tokens.tolist() == list(sample.tokens.token_ids)
        assert kept.logprobs.tolist() == list(sample.tokens.logprobs)
        assert (kept.run_id, kept.step, kept.seed) == ("run", 3, sample.seed)
        assert (kept.kind, kept.finished) == (RolloutKind.HISTORY, True)
    await until(lambda: gateway.metric("history_rollouts_total", outcome="stored") == 20, "it is counted")


async def test_samples_of_generate_calls_are_kept_with_what_their_caller_brought(cluster: Cluster) -> None:
    store = await store_of(cluster)
    gateway = await cluster.gateway()
    fake = await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    asked = rollout_pb2.GenerateRequest(
        run_id="run", prompt_id="p", slot=3, step=2, prompt_token_ids=[1], run_seed=5
    )
    asked.sampling.max_tokens, asked.sampling.ignore_eos = 30, True
    generate = gateway.trainer.rollouts.Generate
    *_, whole = [event.sample async for event in generate(asked, timeout=CALL)]
    await until(lambda: ("p", 3, 0) in store.rollouts(), "it is stored")
    kept = store.rollouts()["p", 3, 0]
    assert (kept.run_id, kept.step, kept.seed, kept.kind) == ("run", 2, whole.seed, RolloutKind.HISTORY)
    assert kept.tokens.tolist() == list(whole.tokens.token_ids)
    assert (fake.accepted[-1].run_id, fake.accepted[-1].prompt_id) == ("run", "p"), (
        "it drafts from earlier ones"
    )
    # Another one goes on with its first tokens: what is kept is whole again.
    asked.prompt_id = "resumed"
    asked.prefix_token_ids.extend(whole.tokens.token_ids[:10])
    asked.prefix_logprobs.extend(whole.tokens.logprobs[:10])
    *_, rest = [event.sample async for event in generate(asked, timeout=CALL)]
    assert len(rest.tokens.token_ids) == 20
    await until(lambda: ("resumed", 3, 0) in store.rollouts(), "it is stored")
    kept = store.rollouts()["resumed", 3, 0]
    assert kept.tokens.tolist() == [*whole.tokens.token_ids[:10], *rest.tokens.token_ids]
    assert kept.logprobs.tolist() == [*whole.tokens.logprobs[:10], *rest.tokens.logprobs]
    asked.prompt_id = "unknown"
    del asked.prefix_logprobs[:]
    assert [event async for event in generate(asked, timeout=CALL)]
    asked.prompt_id = "last"
    del asked.prefix_token_ids[:]
    assert [event async for event in generate(asked, timeout=CALL)]
    await until(lambda: ("last", 3, 0) in store.rollouts(), "what comes later is stored later")
    assert {prompt for prompt, *_ in store.rollouts()} == {"p", "resumed", "last"}


async def test_samples_that_were_cut_short_and_those_without_a_name_are_not_kept(cluster: Cluster) -> None:
    store = await store_of(cluster)
    gateway = await cluster.gateway()
    fake = await cluster.instance("i0")
    fake.hold_at = 4
    await cluster.serving(gateway, 1)
    request = make_batch(groups=1, samples=3, ignore_eos=True)
    await gateway.trainer.submit(request)
    await until(lambda: [s.length for s in fake.running()] == [4] * 3, "all are held")
    cancel = rollout_pb2.CancelRolloutsRequest(
        run_id="run",
        batch_id=request.batch_id,
        keep_partial=True,
        samples=[rollout_pb2.SampleKey(prompt_id="p0", slot=slot) for slot in (0, 2)],
    )
    await gateway.trainer.rollouts.CancelRollouts(cancel, timeout=CALL)
    fake.hold_at = None
    await gateway.trainer.collect(request)
    single = rollout_pb2.GenerateRequest(run_id="run", prompt_token_ids=[1], sampling=request.sampling)
    assert [event async for event in gateway.trainer.rollouts.Generate(single, timeout=CALL)]
    # What comes later is stored later: once it is there, the rest would be.
    last = make_batch(groups=1, samples=1)
    last.groups[0].prompt_id = "last"
    await gateway.trainer.submit(last)
    await until(lambda: ("last", 0, 0) in store.rollouts(), "the last one is stored")
    assert set(store.rollouts()) == {("p0", 1, 0), ("last", 0, 0)}
    assert gateway.metric("whole_samples_total", level="exact") == 3
    assert gateway.metric("history_rollouts_total", outcome="not_stored") == 0


async def test_without_a_store_samples_are_delivered_and_it_finds_them_when_it_comes(
    cluster: Cluster,
) -> None:
    gateway = await cluster.gateway()
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    request = make_batch()
    await gateway.trainer.submit(request)
    check_samples(request, await gateway.trainer.collect(request))
    store = await store_of(cluster)
    await until(lambda: len(store.rollouts()) == 12, "the store has what waited for it")


async def test_a_store_that_dies_under_load_disturbs_nobody_and_its_successor_is_used(
    cluster: Cluster,
) -> None:
    store = await store_of(cluster)
    gateway = await cluster.gateway()
    fake = await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    first = make_batch()
    await gateway.trainer.submit(first)
    check_samples(first, await gateway.trainer.collect(first))
    await until(lambda: len(store.rollouts()) == 12, "the store is in use")
    fake.hold_at = 5
    second = make_batch(groups=5, samples=8, ignore_eos=True)
    await gateway.trainer.submit(second)
    await until(lambda: [s.length for s in fake.running()] == [5] * 40, "all are held")
    await store.kill()
    fake.hold_at = None
    check_samples(second, await gateway.trainer.collect(second))
    assert gateway.metric("instance_losses_total", instance_id="i0") == 0
    successor = await store_of(cluster)
    await until(lambda: len(successor.rollouts()) == 40, "the successor has what its predecessor missed")


async def test_history_can_be_turned_off(cluster: Cluster) -> None:
    store = await store_of(cluster)
    silent = await cluster.gateway(history=False)
    await cluster.instance("i0")
    await cluster.serving(silent, 1)
    request = make_batch()
    await silent.trainer.submit(request)
    check_samples(request, await silent.trainer.collect(request))
    await silent.kill()
    # The next gateway keeps what comes: had the first kept anything, it would be there before.
    gateway = await cluster.gateway()
    await cluster.serving(gateway, 1)
    last = make_batch(groups=1, samples=1)
    last.groups[0].prompt_id = "last"
    await gateway.trainer.submit(last)
    await until(lambda: ("last", 0, 0) in store.rollouts(), "the last one is stored")
    assert set(store.rollouts()) == {("last", 0, 0)}


async def test_a_mistake_in_keeping_history_costs_history_only(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: HistoryWriter) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(HistoryWriter, "run", broken)
    gateway = await cluster.gateway()
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    term = gateway.gateway.leadership.leading()
    for _ in range(2):
        request = make_batch()
        await gateway.trainer.submit(request)
        check_samples(request, await gateway.trainer.collect(request))
    assert gateway.gateway.leadership.leading() is term
