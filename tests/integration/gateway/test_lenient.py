"""LENIENT through the gateway: what is asked for, taken over, delivered and kept; and l after its KL target."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from paceline.v1 import rollout_pb2, sample_pb2
from services.gateway.state.lenience import CEILING, next_lenience
from tests.integration.gateway.conftest import CALL, Cluster, RunningGateway, details, make_batch, until
from tests.integration.gateway.replica import Replica
from tests.support.fake_instance import Cached, FakeInstance, token_at, verified_logprob

LENIENT = sample_pb2.EXACTNESS_LEVEL_LENIENT
TARGET = 0.01


def lenient(**fields: Any) -> sample_pb2.Exactness:
    return sample_pb2.Exactness(level=LENIENT, **fields)


def cache(fake: FakeInstance, samples: list[sample_pb2.Sample]) -> None:
    """What the instance would find in the store."""
    for sample in samples:
        tokens = sample.tokens
        fake.cached[sample.prompt_id, sample.slot] = Cached(list(tokens.token_ids), list(tokens.logprobs))


async def rollout(
    gateway: RunningGateway, request: rollout_pb2.SubmitRolloutsRequest
) -> list[sample_pb2.Sample]:
    await gateway.trainer.submit(request)
    return [event.sample for event in await gateway.trainer.collect(request)]


async def report(
    gateway: RunningGateway, request: rollout_pb2.SubmitRolloutsRequest, **fields: Any
) -> rollout_pb2.ReportRewardsResponse:
    message = rollout_pb2.ReportRewardsRequest(run_id=request.run_id, batch_id=request.batch_id, **fields)
    return await gateway.trainer.rollouts.ReportRewards(message, timeout=CALL)


async def used(gateway: RunningGateway, exactness: sample_pb2.Exactness) -> float:
    """Return the l that a new batch gets."""
    request = make_batch(groups=1, samples=2, exactness=exactness)
    (lenience,) = {s.provenance.exactness.lenience for s in await rollout(gateway, request)}
    return lenience


async def test_a_second_epoch_takes_over_what_it_may_and_says_so(cluster: Cluster) -> None:
    store = await cluster.stack.enter_async_context(Replica(cluster.redis_url, cluster.namespace))
    gateway = await cluster.gateway()
    fake = await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    wanted = lenient(lenience=1.5, reuse_delay=1, diversity_floor=0.25)
    sizes: dict[str, Any] = {"groups": 2, "samples": 3, "max_tokens": 20, "ignore_eos": True}
    first = await rollout(gateway, make_batch(**sizes, exactness=wanted))
    assert {s.provenance.lossless for s in first} == {False}
    assert {(s.provenance.reused_prefix, s.provenance.cached_tokens) for s in first} == {(0, 0)}
    await until(lambda: len(store.rollouts()) == 6, "the first epoch is in the store")
    cache(fake, first)
    before = {(sample.prompt_id, sample.slot): sample for sample in first}

    fake.keep = 7
    request = make_batch(**sizes, exactness=wanted)
    request.step = 4
    for sample in await rollout(gateway, request):
        old = before[sample.prompt_id, sample.slot]
        assert sample.seed != old.seed
        assert list(sample.tokens.token_ids[:7]) == list(old.tokens.token_ids[:7])
        assert list(sample.tokens.logprobs[:7]) == list(old.tokens.logprobs[:7]), "those of the cached policy"
        rest = [token_at(sample.seed, position, 0) for position in range(7, 20)]
        assert list(zip(sample.tokens.token_ids[7:], sample.tokens.logprobs[7:], strict=True)) == rest
        provenance = sample.provenance
        assert (provenance.reused_prefix, provenance.cached_tokens) == (7, 20)
        assert not provenance.lossless
        assert provenance.exactness == wanted
        assert sample.status == sample_pb2.SAMPLE_STATUS_TRUNCATED
    item = fake.accepted[-1]
    assert (item.run_id, item.step, item.exactness) == ("run", 4, wanted)
    assert {(each.prompt_id, each.slot) for each in fake.accepted} == set(before)

    def refreshed() -> bool:
        return all(kept.step == 4 for kept in store.rollouts().values())

    await until(refreshed, "the second epoch has replaced the first")
    for kept in store.rollouts().values():
        now = [verified_logprob(int(token), at, 0) for at, token in enumerate(kept.tokens[:7])]
        assert kept.logprobs[:7].tolist() == now, "those of the policy that verified"
    level = {"level": "lenient"}
    assert gateway.metric("whole_samples_total", **level) == 12
    assert gateway.metric("whole_sample_tokens_total", **level) == 240
    assert gateway.metric("cached_samples_total", **level) == 6
    assert gateway.metric("cached_tokens_total", **level) == 120
    assert gateway.metric("reused_prefix_tokens_total", **level) == 42
    assert gateway.metric("fully_reused_samples_total", **level) == 0
    assert gateway.metric("lenience", run="run") == 1.5


async def test_a_sample_taken_over_from_end_to_end_is_fully_reused(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    fake = await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    exactness = lenient(lenience=2.0)
    cache(fake, await rollout(gateway, make_batch(exactness=exactness)))
    fake.keep = 1000
    again = make_batch(exactness=exactness)
    again.step = 4
    for sample in await rollout(gateway, again):
        cached = fake.cached[sample.prompt_id, sample.slot]
        assert list(sample.tokens.token_ids) == list(cached.tokens)
        assert sample.provenance.reused_prefix == len(cached.tokens)
    assert gateway.metric("fully_reused_samples_total", level="lenient") == 12


async def test_how_far_exact_samples_agree_with_what_was_cached_is_told(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    fake = await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    first = await rollout(gateway, make_batch(groups=1, samples=2, max_tokens=20, ignore_eos=True))
    cache(fake, first)
    changed = fake.cached["p0", 1]
    fake.cached["p0", 1] = Cached([*changed.tokens[:5], 999, *changed.tokens[6:]], changed.logprobs)
    samples = await rollout(gateway, make_batch(groups=1, samples=2, max_tokens=20, ignore_eos=True))
    told = {s.slot: (s.provenance.reused_prefix, s.provenance.cached_tokens) for s in samples}
    assert told == {0: (20, 20), 1: (5, 20)}
    assert all(sample.provenance.lossless for sample in samples)
    assert gateway.metric("fully_reused_samples_total", level="exact") == 1


async def test_a_lenient_sample_that_lost_its_instance_goes_on_as_the_policy_has_it(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    fakes = [await cluster.instance("i0")]
    await cluster.serving(gateway, 1)
    sizes: dict[str, Any] = {"groups": 1, "samples": 2, "max_tokens": 30, "ignore_eos": True}
    first = await rollout(gateway, make_batch(**sizes, exactness=lenient(lenience=1.5)))
    cache(fakes[0], first)
    fakes[0].keep, fakes[0].hold_at = 25, 12
    request = make_batch(**sizes, exactness=lenient(lenience=1.5))
    request.step = 4
    await gateway.trainer.submit(request)
    # The gateway has all twelve: the fake flushes every fourth step, held or not.
    batch = gateway.gateway.leadership.leading().batches.by_key["run", request.batch_id].batch
    await until(lambda: [len(s.tokens) for s in batch.samples] == [12, 12], "twelve tokens have arrived")
    fakes.append(await cluster.instance("i1"))
    cache(fakes[1], first)
    fakes[1].keep = 25
    await cluster.serving(gateway, 2)
    await fakes[0].kill()
    before = {sample.slot: sample for sample in first}
    for event in await gateway.trainer.collect(request):
        sample, old = event.sample, before[event.sample.slot]
        assert list(sample.tokens.token_ids[:11]) == list(old.tokens.token_ids[:11])
        rest = [token_at(sample.seed, position, 0) for position in range(11, 30)]
        assert list(zip(sample.tokens.token_ids[11:], sample.tokens.logprobs[11:], strict=True)) == rest
        assert sample.provenance.reused_prefix == 11
        assert sample.provenance.resubmissions == 1


async def test_an_instance_that_tells_nonsense_costs_its_connection_and_no_sample(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    fakes = [await cluster.instance(name) for name in ("i0", "i1")]
    fakes[0].surplus_verified = [-1.0] * 100
    await cluster.serving(gateway, 2)
    request = make_batch(ignore_eos=True, exactness=lenient(lenience=1.5))
    samples = await rollout(gateway, request)
    assert {s.status for s in samples} == {sample_pb2.SAMPLE_STATUS_TRUNCATED}
    for sample in samples:
        wanted = [token_at(sample.seed, position, 0) for position in range(40)]
        assert list(zip(sample.tokens.token_ids, sample.tokens.logprobs, strict=True)) == wanted
    assert {span.instance_id for s in samples for span in s.provenance.instance_spans} == {"i1"}


async def test_one_lenient_sample_can_be_generated_and_its_deltas_stay_true(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    fakes = [await cluster.instance("i0")]
    await cluster.serving(gateway, 1)
    request = rollout_pb2.GenerateRequest(
        run_id="run",
        prompt_id="p0",
        prompt_token_ids=[1, 2],
        exactness=lenient(lenience=1.5),
        sampling=sample_pb2.SamplingParams(max_tokens=30, ignore_eos=True),
    )
    tokens = [500 + position for position in range(30)]
    for fake in fakes:
        fake.cached["p0", 0] = Cached(tokens, [-1.0] * 30)
        fake.keep, fake.hold_at = 25, 12
    call = gateway.trainer.rollouts.Generate(request, timeout=CALL)
    received: list[int] = []
    while len(received) < 11:
        received += (await call.read()).delta.token_ids
    assert received == tokens[:11], "the last token may still change, so it is not sent yet"
    fakes.append(await cluster.instance("i1"))
    await cluster.serving(gateway, 2)
    await fakes[0].kill()
    while event := await call.read():
        received += event.delta.token_ids
        last = event.sample
    assert received == list(last.tokens.token_ids)
    assert last.tokens.token_ids[11] != tokens[11]
    assert last.provenance.reused_prefix == 11
    assert fakes[1].accepted[0].run_id == "run"


async def test_what_is_wrong_with_a_lenient_request_is_named(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    fake = await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    wanted = {
        "exactness.lenience": lenient(),
        "exactness.kl_target": lenient(kl_target=-1.0),
        "exactness.reuse_delay": sample_pb2.Exactness(reuse_delay=1),
    }
    for field, exactness in wanted.items():
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await gateway.trainer.submit(make_batch(exactness=exactness))
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        (violation,) = details(error.value)["BadRequest"].field_violations
        assert violation.field == field
    nameless = rollout_pb2.GenerateRequest(prompt_token_ids=[1], exactness=lenient(lenience=1.5))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await gateway.trainer.rollouts.Generate(nameless, timeout=CALL).read()
    fields = {violation.field for violation in details(error.value)["BadRequest"].field_violations}
    assert fields == {"run_id", "prompt_id"}
    assert fake.accepted == []


# The KL target -----------------------------------------------------------------------------------------


async def test_l_follows_the_reported_kl_and_survives_a_restart(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    exactness = lenient(lenience=1.5, kl_target=TARGET)
    expected = 1.5
    for kl in (0.001, 0.0, 0.004):
        request = make_batch(groups=1, samples=2, exactness=exactness)
        samples = await rollout(gateway, request)
        assert {s.provenance.exactness.lenience for s in samples} == {expected}
        assert {s.provenance.exactness.kl_target for s in samples} == {TARGET}
        assert gateway.metric("lenience", run="run") == expected
        await report(gateway, request, kl=kl)
        expected = next_lenience(expected, kl, TARGET)
    assert 1.5 < expected <= CEILING
    await gateway.kill()
    successor = await cluster.gateway()
    await cluster.serving(successor, 1)
    assert await used(successor, exactness) == expected
    # A report of the last gateway's batch, repeated to this one, has been taken in before.
    await report(successor, request, kl=0.004)
    assert await used(successor, exactness) == expected


async def test_the_same_report_again_changes_nothing(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    exactness = lenient(kl_target=TARGET)
    request = make_batch(groups=1, samples=2, exactness=exactness)
    await rollout(gateway, request)
    rewards = [rollout_pb2.Reward(prompt_id="p0", slot=slot, reward=slot) for slot in (0, 1, 7)]
    for _ in range(3):
        reply = await report(gateway, request, rewards=rewards, kl=0.002, clip_fraction=0.25)
        assert reply.matched == 2
    assert await used(gateway, exactness) == next_lenience(1.0, 0.002, TARGET)
    assert gateway.metric("reward", run="run") == 0.5
    assert gateway.metric("reported_kl", run="run") == 0.002
    assert gateway.metric("reported_clip_fraction", run="run") == 0.25


async def test_samples_of_a_batch_keep_their_l_through_a_restart(cluster: Cluster) -> None:
    """Whatever l has come to meanwhile: a batch has one."""
    first = await cluster.gateway()
    fake = await cluster.instance("i0")
    await cluster.serving(first, 1)
    exactness = lenient(lenience=1.5, kl_target=TARGET)
    reported = [make_batch(groups=1, samples=1, exactness=exactness) for _ in range(2)]
    for each in reported:
        await rollout(first, each)
    await report(first, reported[0], kl=1.0)
    moved = next_lenience(1.5, 1.0, TARGET)
    fake.hold_at = 3
    request = make_batch(exactness=exactness, ignore_eos=True)
    await first.trainer.submit(request)
    await until(lambda: len(fake.running()) == 12, "the batch runs")
    await report(first, reported[1], kl=1.0)
    await first.kill()
    await until(lambda: not fake.running(), "the instance has dropped the samples")
    fake.accepted.clear()
    second = await cluster.gateway()
    await cluster.serving(second, 1)
    fake.hold_at = None
    events = await second.trainer.collect(request)
    assert {event.sample.provenance.exactness.lenience for event in events} == {moved}
    assert {item.exactness.lenience for item in fake.accepted} == {moved}
    assert await used(second, exactness) == next_lenience(moved, 1.0, TARGET) < moved < 1.5


async def test_runs_and_batches_without_a_target_keep_their_l(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    fixed = make_batch(groups=1, samples=1, exactness=lenient(lenience=1.5))
    await rollout(gateway, fixed)
    await report(gateway, fixed, kl=5.0)
    assert await used(gateway, lenient(lenience=1.5)) == 1.5
    adaptive = lenient(lenience=1.5, kl_target=TARGET)
    moved = make_batch(groups=1, samples=1, exactness=adaptive)
    moved.run_id = "other"
    await rollout(gateway, moved)
    await report(gateway, moved, kl=5.0)
    assert await used(gateway, adaptive) == 1.5, "another run's report"


async def test_rewards_of_exact_batches_are_matched_too(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    fake = await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    request = make_batch(groups=2, samples=2)
    samples = await rollout(gateway, request)
    rewards = [rollout_pb2.Reward(prompt_id=s.prompt_id, slot=s.slot, reward=1.0) for s in samples]
    assert (await report(gateway, request, rewards=rewards)).matched == 4
    fake.hold_at = 2
    running = make_batch(groups=2, samples=2, ignore_eos=True)
    await gateway.trainer.submit(running)
    assert (await report(gateway, running, rewards=rewards)).matched == 0, "none has ended"


async def test_a_report_of_what_is_not_there_or_not_a_number_is_refused(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    request = make_batch(groups=1, samples=1)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await report(gateway, request, kl=0.1)
    assert error.value.code() is grpc.StatusCode.NOT_FOUND
    await rollout(gateway, request)
    wrong = [rollout_pb2.Reward(prompt_id="p0", slot=0, reward=float("nan"))]
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await report(gateway, request, rewards=wrong, kl=-1.0, clip_fraction=2.0)
    fields = {violation.field for violation in details(error.value)["BadRequest"].field_violations}
    assert fields == {"kl", "clip_fraction", "rewards[0].reward"}
