"""The Work stream of a real instance: samples in, tokens out."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import grpc
import pytest

from bench.rollout.modelled import StepReader
from paceline.internal.v1 import generation_pb2 as pb
from paceline.times import seconds_of
from paceline.v1 import fleet_pb2, sample_pb2
from tests.integration.generation.conftest import PROMPT, Policy, draft_always, prompt_of
from tests.support.instances import CALL, InstanceProcess, calling
from tests.support.models import END_TOKEN, VOCAB_SIZE

MODEL_LENGTH = 512
# Long enough that a caller can act while the sample runs.
LONG: dict[str, Any] = {"max_tokens": MODEL_LENGTH - PROMPT, "ignore_eos": True}


async def test_every_sample_gets_its_tokens_exactly_once(policy: Policy) -> None:
    items = [
        policy.item(handle, max_tokens=1 + 3 * handle, stop_token_ids=[handle, handle + 100])
        for handle in range(1, 49)
    ]
    outcomes = await policy.ask(*items)
    for handle, outcome in outcomes.items():
        assert outcome.refused is None
        assert outcome.finished is not None
        assert all(math.isfinite(value) and value <= 0 for value in outcome.logprobs)
        stops = {END_TOKEN, handle, handle + 100}
        body, last = outcome.tokens[:-1], outcome.tokens[-1]
        assert not stops & set(body)
        if outcome.reason == "STOP":
            assert last in stops
        else:
            assert outcome.reason == "LENGTH"
            assert len(outcome.tokens) == 1 + 3 * handle
        assert 0 < outcome.finished.decode_steps <= len(outcome.tokens)
        assert seconds_of(outcome.finished.generation_time) > 0
    assert {outcome.reason for outcome in outcomes.values()} == {"STOP", "LENGTH"}
    assert len({tuple(outcome.tokens[:8]) for outcome in outcomes.values()}) > 40


async def test_every_step_is_logged_with_its_samples_drafts_and_context(
    policy: Policy, step_logs: Path
) -> None:
    log = StepReader(step_logs / "shared.jsonl")
    log.since()
    fields: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "run_id": "logged"}
    await draft_always(policy.address, "logged")
    # The suffix index drafts the second one from the first.
    for seed in (1, 1):
        outcome = (await policy.ask(policy.item(7, seed=seed, **fields)))[7]
        assert outcome.finished is not None
        steps = log.since()
        drafted = sum(source.drafted for source in outcome.finished.draft_sources)
        assert len(steps) == outcome.finished.decode_steps
        assert sum(step.drafted for step in steps) == drafted
        assert {step.samples for step in steps} == {1}
        assert steps[0].context == PROMPT
        # A step's tokens are its drafts and the newest one; the first has as much of the prompt as was not cached.
        assert all(step.rows == step.drafted + 1 for step in steps[1:])
        assert PROMPT < steps[-1].context < PROMPT + 60
    assert drafted > 0


async def test_the_same_seed_gives_the_same_tokens_in_any_company(policy: Policy) -> None:
    alone = await policy.tokens([5])
    together = await policy.tokens(range(1, 20))
    again = await policy.ask(policy.item(5), policy.item(6, prompt_of(5)))
    assert alone[5] == together[5] == again[5].tokens
    assert again[6].tokens != alone[5]


async def test_a_response_says_load_and_version(policy: Policy) -> None:
    async with calling(policy.address) as caller:
        await caller.send([policy.item(1)])
        await caller.ended(1)
        last = caller.responses[-1]
    assert last.policy_version == policy.version
    assert last.load.generated_tokens >= 40
    assert 0 < seconds_of(last.load.step_time) < 10


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "empty prompt": ({"prompt": []}, "prompt_token_ids"),
    "token past the vocabulary": ({"prompt": [5, VOCAB_SIZE]}, "prompt_token_ids[1]"),
    "huge token": ({"prompt": [2**32 - 1]}, "prompt_token_ids[0]"),
    "prompt without room": ({"prompt": [5] * MODEL_LENGTH}, "prompt_token_ids"),
    "bad prefix": ({"prefix_token_ids": [1, 2, 600]}, "prefix_token_ids[2]"),
    "bad draft": ({"reference_token_ids": [700]}, "reference_token_ids[0]"),
    "negative temperature": ({"temperature": -1}, "sampling.temperature"),
    "NaN temperature": ({"temperature": math.nan}, "sampling.temperature"),
    "zero top_p": ({"top_p": 0}, "sampling.top_p"),
    "negative top_k": ({"top_k": -1}, "sampling.top_k"),
    "min_p above one": ({"min_p": 1.5}, "sampling.min_p"),
    "no tokens wanted": ({"max_tokens": 0}, "sampling.max_tokens"),
    "too many tokens wanted": ({"max_tokens": 9999}, "sampling.max_tokens"),
    "min above max": ({"min_tokens": 9, "max_tokens": 5}, "sampling.min_tokens"),
    "unknown stop token": ({"stop_token_ids": [512]}, "sampling.stop_token_ids[0]"),
    "unknown logprobs mode": ({"logprobs_mode": 77}, "sampling.logprobs_mode"),
}


async def test_bad_items_are_refused_by_field_and_harm_no_other(policy: Policy) -> None:
    good = list(range(1, 9))
    alone = await policy.tokens(good)
    bad = {100 + i: (dict(fields), field) for i, (fields, field) in enumerate(BAD.values())}
    bad_items = [
        policy.item(handle, fields.pop("prompt", None), **fields) for handle, (fields, _) in bad.items()
    ]
    mixed = [
        each for pair in zip([policy.item(h) for h in good] * 2, bad_items, strict=True) for each in pair
    ]
    once = {each.handle: each for each in mixed}
    outcomes = await policy.ask(*once.values())
    for handle, (_, field) in bad.items():
        refused = outcomes[handle].refused
        assert refused is not None
        assert refused.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert refused.field == field
        assert refused.message
        assert not outcomes[handle].tokens
    assert {handle: outcomes[handle].tokens for handle in good} == alone


@pytest.mark.parametrize("ahead", [1, 5])
async def test_another_policy_version_is_refused(policy: Policy, ahead: int) -> None:
    outcomes = await policy.ask(policy.item(1, policy_version=policy.version + ahead), policy.item(2))
    refused = outcomes[1].refused
    assert refused is not None
    assert refused.code == grpc.StatusCode.FAILED_PRECONDITION.value[0]
    assert f"served is {policy.version}" in refused.message
    assert outcomes[2].reason == "LENGTH"


async def test_every_level_is_served_and_one_that_is_not_known_is_refused(policy: Policy) -> None:
    levels = [*sample_pb2.ExactnessLevel.values(), 99]
    items = [policy.item(1 + level, exactness={"level": level}) for level in levels]
    outcomes = await policy.ask(*items)
    assert {level for level in levels if outcomes[1 + level].refused is not None} == {99}
    refused = outcomes[100].refused
    assert refused is not None
    assert refused.code == grpc.StatusCode.UNIMPLEMENTED.value[0]


@pytest.mark.parametrize("cut", [1, 17, 31, 59])
async def test_a_prefix_is_gone_on_with_as_if_nothing_had_happened(policy: Policy, cut: int) -> None:
    handles = range(1, 7)
    fields: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
    whole = await policy.ask(*[policy.item(handle, **fields) for handle in handles])
    resumed = await policy.ask(
        *[policy.item(h, prefix_token_ids=whole[h].tokens[:cut], **fields) for h in handles]
    )
    for handle in handles:
        assert resumed[handle].tokens == whole[handle].tokens[cut:]
        assert resumed[handle].logprobs == pytest.approx(whole[handle].logprobs[cut:], abs=1e-4)
        assert resumed[handle].reason == "LENGTH"


async def test_a_prefix_that_is_complete_ends_at_once(policy: Policy) -> None:
    tokens = (await policy.tokens([1], ignore_eos=True))[1]
    filling = [5] * (MODEL_LENGTH - PROMPT)
    outcomes = await policy.ask(
        policy.item(1, prefix_token_ids=tokens, ignore_eos=True),
        policy.item(2, prefix_token_ids=[*tokens[:3], END_TOKEN]),
        policy.item(3, prefix_token_ids=[*tokens[:3], 77], stop_token_ids=[77]),
        policy.item(4, prefix_token_ids=filling, max_tokens=None, ignore_eos=True),
    )
    assert [outcomes[handle].reason for handle in (1, 2, 3, 4)] == ["LENGTH", "STOP", "STOP", "LENGTH"]
    assert not any(outcome.tokens for outcome in outcomes.values())


async def test_a_prefix_longer_than_the_response_may_be_is_refused(policy: Policy) -> None:
    outcomes = await policy.ask(
        policy.item(1, prefix_token_ids=[5] * 41),
        policy.item(2, prefix_token_ids=[5] * (MODEL_LENGTH - PROMPT + 1), max_tokens=None),
    )
    for outcome in outcomes.values():
        assert outcome.refused is not None
        assert outcome.refused.field == "prompt_token_ids"


async def test_a_given_draft_changes_the_steps_and_not_the_tokens(policy: Policy) -> None:
    await draft_always(policy.address, "given")
    fields: dict[str, Any] = {"max_tokens": 80, "ignore_eos": True, "run_id": "given"}
    plain = await policy.ask(policy.item(1, **fields))
    tokens = plain[1].tokens
    wrong = [*tokens[:20], (tokens[20] + 1) % VOCAB_SIZE, *tokens[21:50], *tokens[55:]]
    for draft, most_steps in ((tokens, 12), (wrong, 30), ([9] * 80, 80)):
        outcome = (await policy.ask(policy.item(1, reference_token_ids=draft, **fields)))[1]
        assert outcome.tokens == tokens
        assert outcome.logprobs == pytest.approx(plain[1].logprobs, abs=1e-4)
        assert outcome.finished is not None
        assert outcome.finished.decode_steps <= most_steps
    drafted = (await policy.ask(policy.item(1, reference_token_ids=tokens, **fields)))[1]
    assert drafted.finished is not None
    # The suffix drafter knows the text by now too: whose offer is taken is the plan's affair.
    sources = drafted.finished.draft_sources
    assert sum(each.drafted for each in sources) == sum(each.accepted for each in sources) > 60


async def test_abort_keeps_the_tokens_so_far(policy: Policy) -> None:
    whole = await policy.tokens([1, 2], **LONG)
    async with policy.midway([1, 2], **LONG) as (caller,):
        await caller.send(abort=[1, 99])
        await caller.ended(1)
        await policy.resume()
        await caller.ended(2)
    aborted = caller.of(1)
    assert aborted.reason == "ABORTED"
    assert 0 < len(aborted.tokens) < len(whole[1])
    assert aborted.tokens == whole[1][: len(aborted.tokens)]
    assert caller.of(2).tokens == whole[2]


async def test_a_caller_that_goes_away_takes_only_its_samples_along(policy: Policy) -> None:
    handles = [1, 2, 3]
    whole = await policy.tokens(handles, **LONG)
    async with policy.midway(handles, streams=2, **LONG) as (gone, stays):
        gone.leave()
        await policy.until_samples(3)
        await policy.resume()
        outcomes = await stays.ended(*handles)
    assert {handle: outcome.tokens for handle, outcome in outcomes.items()} == whole


async def test_pause_holds_every_sample_and_resume_changes_no_token(policy: Policy) -> None:
    handles = [1, 2, 3]
    whole = await policy.tokens(handles, **LONG)
    async with policy.midway(handles, **LONG) as (caller,):
        before = (await policy.look()).instance
        assert before.state == fleet_pb2.INSTANCE_STATE_PAUSED
        # Taken while paused: it waits.
        await caller.send([policy.item(4)])
        await policy.until_samples(4)
        after = (await policy.look()).instance
        assert after.load.steps == before.load.steps
        await policy.resume()
        outcomes = await caller.ended(*handles, 4)
    assert {handle: outcomes[handle].tokens for handle in handles} == whole
    assert (await policy.look()).instance.state == fleet_pb2.INSTANCE_STATE_SERVING


async def test_calls_that_are_given_up_do_not_harm_the_engine(policy: Policy) -> None:
    whole = await policy.tokens([1, 2], **LONG)

    async def given_up_after(seconds: float) -> bool:
        """Cancel a call after so many seconds; return False if it was answered before."""
        call = policy.stub.ResumeEngine(pb.ResumeEngineRequest(), timeout=CALL)
        if seconds:
            await asyncio.wait({asyncio.ensure_future(call.code())}, timeout=seconds)
        return bool(call.cancel())

    async with calling(policy.address) as caller:
        await caller.send([policy.item(handle, **LONG) for handle in (1, 2)])
        await caller.started(1, 2)
        # Around the time that a step takes: calls are given up before, while and after they are heard. How fast the
        # machine answers decides which; the first one is given up before it is sent, the last one is answered.
        given_up = [await given_up_after(seconds) for seconds in [*(0.0001 * i for i in range(100)), CALL]]
        for _ in range(20):
            async with calling(policy.address) as leaver:
                await leaver.send([policy.item(1)])
        outcomes = await caller.ended(1, 2)
    assert given_up[0]
    assert not given_up[-1]
    assert {handle: outcome.tokens for handle, outcome in outcomes.items()} == whole


async def test_status_describes_the_instance(policy: Policy, instance: InstanceProcess) -> None:
    described = (await policy.look()).instance
    assert described.instance_id == "shared"
    assert described.address == instance.address
    assert described.metrics_address == instance.metrics_address
    assert (described.vocab_size, described.max_model_len, described.max_running) == (512, 512, 32)
    assert described.epoch > 0


async def test_metrics_count_what_was_generated_and_drafted(
    policy: Policy, instance: InstanceProcess
) -> None:
    # A sample whose caller has gone is ended between two steps, which may be after its last test. What was counted
    # of its drafts is published with the end of another one at the latest.
    await policy.until_samples(0)
    await draft_always(policy.address, "counted")
    fields: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "run_id": "counted"}
    await policy.ask(policy.item(2, **fields))
    before = instance.metrics()
    plain = (await policy.ask(policy.item(1, **fields)))[1]
    drafted = await policy.ask(policy.item(1, reference_token_ids=plain.tokens, **fields))
    after = instance.metrics()

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown("paceline_generation_tokens_total") == 60
    assert grown("paceline_generation_step_seconds_count") < 60
    finished = [outcome.finished for outcome in (plain, drafted[1]) if outcome.finished is not None]
    sources = [source for each in finished for source in each.draft_sources]
    for kind in ("drafted", "accepted"):
        for drafter in ("reference", "suffix"):
            expected = sum(getattr(source, kind) for source in sources if source.drafter == drafter)
            series = [
                name for name in after if name.startswith(f"paceline_speculation_{kind}_tokens_total{{")
            ]
            assert sum(grown(name) for name in series if f'drafter="{drafter}"' in name) == expected
    assert sum(source.accepted for source in sources) > 20
    steps = [name for name in after if name.startswith("paceline_speculation_verify_steps_total")]
    assert sum(map(grown, steps)) == sum(each.verify_steps for each in finished)
    assert after["paceline_generation_policy_version"] == policy.version
    assert after["paceline_generation_running_samples"] == 0
