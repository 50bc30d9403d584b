"""Stop strings, likeliest tokens and what is told of prompts survive whatever happens to a sample."""

from __future__ import annotations

import pytest

from paceline.v1 import rollout_pb2, sample_pb2
from services.contracts.seeds import sample_seed
from services.gateway.config import GatewayConfig
from services.platform.redis.connection import connect
from tests.integration.gateway.conftest import Cluster, chunked_tokens, make_batch, until
from tests.support.fake_instance import FakeInstance, likeliest_at, response_of, told_of_prompt
from tests.support.instances import item

LENGTH, HELD = 40, 12


def _batch() -> rollout_pb2.SubmitRolloutsRequest:
    """Return a batch most of whose samples end by a word that they have behind position 20."""
    request = make_batch(groups=4, samples=4, ignore_eos=True, max_tokens=LENGTH)
    for group in request.groups:
        group.sampling.CopyFrom(request.sampling)
        of_slots = [_tokens(request, group.prompt_id, slot) for slot in range(group.samples)]
        early = {token for tokens in of_slots for token in tokens[:HELD]}
        ends = [next(token for token in tokens[20:] if token not in early) for tokens in of_slots[:3]]
        group.sampling.stop.extend(f"w{token}" for token in ends)
        group.sampling.top_logprobs, group.sampling.prompt_logprobs = 2, 1
    return request


def _tokens(request: rollout_pb2.SubmitRolloutsRequest, prompt_id: str, slot: int) -> list[int]:
    seed = sample_seed(request.run_seed, request.step, prompt_id, slot)
    return response_of(seed, 0, LENGTH, ignore_eos=True)[0]


def _check(request: rollout_pb2.SubmitRolloutsRequest, sample: sample_pb2.Sample) -> None:
    """The sample is what an undisturbed run gives."""
    (group,) = [group for group in request.groups if group.prompt_id == sample.prompt_id]
    whole, stop = _tokens(request, sample.prompt_id, sample.slot), list(group.sampling.stop)
    end = next((place + 1 for place, token in enumerate(whole) if f"w{token}" in stop), LENGTH)
    assert list(sample.tokens.token_ids) == whole[:end]
    assert sample.stop_string == (f"w{whole[end - 1]}" if end < LENGTH else "")
    told = [likeliest_at(token, 2) for token in whole[:end]]
    assert list(sample.tokens.top_token_ids) == [token for tokens, _ in told for token in tokens]
    assert list(sample.tokens.top_logprobs) == [value for _, values in told for value in values]
    asked = item(1, group.prompt_token_ids, prompt_logprobs=1)
    assert sample.prompt_logprobs == told_of_prompt(asked)


async def _held(fakes: list[FakeInstance]) -> None:
    lengths = [HELD] * 16
    await until(lambda: [s.length for fake in fakes for s in fake.running()] == lengths, "all are half done")


@pytest.mark.parametrize("how", ["undisturbed", "killed", "moved", "restarted"])
async def test_samples_are_told_whole(cluster: Cluster, how: str) -> None:
    gateway = await cluster.gateway()
    fakes = [await cluster.instance(name) for name in ("i0", "i1")]
    for fake in fakes:
        fake.hold_at = HELD
    await cluster.serving(gateway, 2)
    request = _batch()
    await gateway.trainer.submit(request)
    await _held(fakes)
    if how == "killed":
        batch = gateway.gateway.leadership.leading().batches.by_key["run", request.batch_id].batch
        await until(lambda: min(len(s.tokens) for s in batch.samples) >= 8, "the gateway has some of each")
        fakes[1].accepted.clear()
        await fakes.pop(0).kill()
        await _held(fakes)
        # What was told already is not computed again.
        assert fakes[0].accepted
        assert not any(each.sampling.HasField("prompt_logprobs") for each in fakes[0].accepted)
    elif how == "moved":
        for number, sample in enumerate(moving := fakes[0].running()):
            fakes[0].move(sample, f"m{number}", fakes[1])
        await until(lambda: len(fakes[1].claimed) == len(moving) > 0, "all are claimed")
    elif how == "restarted":
        journal = connect(GatewayConfig(redis_url=cluster.redis_url))

        async def has_some() -> bool:
            return bool(await chunked_tokens(journal, cluster.namespace, request))

        await until(has_some, "the journal has tokens of some")
        await gateway.kill()
        await journal.aclose()
        for fake in fakes:
            await until(lambda fake=fake: not fake.running(), "the instances have dropped the samples")
            fake.accepted.clear()
        gateway = await cluster.gateway()
        await cluster.serving(gateway, 2)
        await _held(fakes)
        resumed = [each for fake in fakes for each in fake.accepted if each.prefix_token_ids]
        assert resumed
        assert all(each.sampling.HasField("prompt_logprobs") for each in resumed)
    for fake in fakes:
        fake.hold_at = None
    events = await gateway.trainer.collect(request)
    assert len(events) == 16
    for event in events:
        _check(request, event.sample)
    assert any(event.sample.stop_string for event in events)
