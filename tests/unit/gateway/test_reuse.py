"""Reuse of cached rollouts in the provenance of a sample, whatever happened on the way."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from paceline.internal.v1 import generation_pb2
from paceline.v1 import rollout_pb2, sample_pb2
from services.contracts.rollout import RolloutKind, StoredRollout
from services.contracts.seeds import sample_seed
from services.gateway.feeds.history import rollout_of
from services.gateway.journal.record import collect
from services.gateway.state.messages import BatchBuilder, exactness_of, final_sample, work_item
from services.gateway.state.rollout_batch import RolloutBatch
from services.gateway.state.sample import BatchGroup, EventEffect, GatewaySample
from tests.support.token_columns import columns
from tests.unit.gateway.scheduler_parts import record_of

EXACT, LENIENT = sample_pb2.EXACTNESS_LEVEL_EXACT, sample_pb2.EXACTNESS_LEVEL_LENIENT
STOP, ABORTED = sample_pb2.FINISH_REASON_STOP, sample_pb2.FINISH_REASON_ABORTED


def make(level: sample_pb2.ExactnessLevel = LENIENT) -> RolloutBatch:
    return RolloutBatch(
        key=("run", "b"),
        policy_version=7,
        groups=[BatchGroup("p", [1, 2], sample_pb2.SamplingParams(max_tokens=50))],
        exactness=sample_pb2.Exactness(level=level, lenience=1.5 if level == LENIENT else None),
        samples=[GatewaySample(0, 0, 3, 100)],
        accepted_at=1000.0,
        deadline_at=2000.0,
        max_attempts=3,
        step=5,
        cached_run="run",
    )


def finished(reason: sample_pb2.FinishReason = STOP, **fields: int) -> generation_pb2.Finished:
    return generation_pb2.Finished(finish_reason=reason, **fields)


def end(batch: RolloutBatch, attempt: int, **fields: int) -> sample_pb2.Provenance:
    assert batch.finish(0, attempt, finished(**fields), 1009.0) is EventEffect.ENDED
    return final_sample(batch, batch.endings[0]).provenance


def kept(batch: RolloutBatch) -> StoredRollout:
    rollout = rollout_of(batch, batch.endings[0])
    assert rollout is not None
    return rollout


def test_a_lenient_sample_is_marked_and_its_history_carries_the_verified_log_probabilities() -> None:
    batch = make()
    attempt = batch.assign(0, "i0", 1001.0)
    batch.extend(0, attempt, columns([5, 6], [-1.0, -2.0]), 1002.0, [-1.5, -2.5])
    batch.extend(0, attempt, columns([7, 8], [-3.0, -4.0]), 1003.0, [-3.5])
    batch.extend(0, attempt, columns([9], [-5.0]), 1004.0)
    provenance = end(batch, attempt, reused_prefix=3, cached_tokens=4)
    assert (provenance.reused_prefix, provenance.cached_tokens, provenance.lossless) == (3, 4, False)
    assert provenance.exactness == sample_pb2.Exactness(level=LENIENT, lenience=1.5)
    sample = final_sample(batch, batch.endings[0])
    assert list(sample.tokens.logprobs) == [-1.0, -2.0, -3.0, -4.0, -5.0]
    rollout = kept(batch)
    assert rollout.logprobs.tolist() == [-1.5, -2.5, -3.5, -4.0, -5.0]
    assert rollout.tokens.tolist() == [5, 6, 7, 8, 9]
    assert (rollout.run_id, rollout.prompt_id, rollout.slot, rollout.seed) == ("run", "p", 3, 100)
    assert (rollout.version, rollout.step, rollout.kind, rollout.finished) == (
        7,
        5,
        RolloutKind.HISTORY,
        True,
    )


def test_what_is_kept_does_not_go_with_the_tokens() -> None:
    batch = make(EXACT)
    attempt = batch.assign(0, "i0", 1001.0)
    batch.extend(0, attempt, columns([5, 6], [-1.0, -2.0]), 1002.0)
    end(batch, attempt)
    rollout = kept(batch)
    collect(batch, record_of(batch))
    assert not batch.samples[0].tokens
    assert (rollout.tokens.tolist(), rollout.logprobs.tolist()) == ([5, 6], [-1.0, -2.0])
    assert (rollout.tokens.dtype, rollout.logprobs.dtype) == (np.uint32, np.float32)


def test_a_lenient_sample_that_is_resumed_counts_what_it_still_has_of_its_cached_rollout() -> None:
    """The token that is sampled again is the policy's own, though it was taken over before."""
    batch = make()
    first = batch.assign(0, "i0", 1001.0)
    batch.extend(0, first, columns([5, 6, 7], [-1.0, -2.0, -3.0]), 1002.0, [-1.5, -2.5, -3.5])
    assert batch.lost(0, first, 1003.0) is EventEffect.WAITING
    second = batch.assign(0, "i1", 1004.0)
    assert list(work_item(batch, batch.samples[0], 1).prefix_token_ids) == [5, 6]
    batch.extend(0, second, columns([70, 8], [-0.5, -4.0]), 1005.0)
    provenance = end(batch, second)
    # The instance that was lost could not say how long the cached rollout was: at least so long.
    assert (provenance.reused_prefix, provenance.cached_tokens) == (2, 2)
    assert kept(batch).logprobs.tolist() == [-1.5, -2.5, -0.5, -4.0]


def test_a_lenient_sample_that_is_handed_over_keeps_the_count_of_the_first_attempt() -> None:
    batch = make()
    first = batch.assign(0, "i0", 1001.0)
    batch.extend(0, first, columns([5, 6, 7], [-1.0, -2.0, -3.0]), 1002.0, [-1.5, -2.5])
    report = finished(ABORTED, reused_prefix=2, cached_tokens=9)
    assert batch.finish(0, first, report, 1003.0) is EventEffect.WAITING
    second = batch.assign(0, "i1", 1004.0)
    batch.extend(0, second, columns([7, 8], [-3.0, -4.0]), 1005.0)
    provenance = end(batch, second)
    assert (provenance.reused_prefix, provenance.cached_tokens) == (2, 9)


def test_a_token_that_was_taken_over_and_is_sampled_again_counts_no_more() -> None:
    batch = make()
    first = batch.assign(0, "i0", 1001.0)
    batch.extend(0, first, columns([5, 6, 7], [-1.0, -2.0, -3.0]), 1002.0, [-1.5, -2.5, -3.5])
    batch.finish(0, first, finished(ABORTED, reused_prefix=3, cached_tokens=9), 1003.0)
    second = batch.assign(0, "i1", 1004.0)
    batch.extend(0, second, columns([70, 8], [-0.5, -4.0]), 1005.0)
    provenance = end(batch, second)
    assert (provenance.reused_prefix, provenance.cached_tokens) == (2, 9)


def test_a_lenient_sample_left_without_tokens_begins_anew() -> None:
    batch = make()
    first = batch.assign(0, "i0", 1001.0)
    batch.extend(0, first, columns([5], [-1.0]), 1002.0, [-1.5])
    batch.lost(0, first, 1003.0)
    second = batch.assign(0, "i1", 1004.0)
    batch.extend(0, second, columns([5, 6], [-1.0, -2.0]), 1005.0, [-1.5, -2.5])
    provenance = end(batch, second, reused_prefix=2, cached_tokens=2)
    assert (provenance.reused_prefix, provenance.cached_tokens) == (2, 2)
    assert kept(batch).logprobs.tolist() == [-1.5, -2.5]


def test_after_a_restart_the_delivered_log_probabilities_are_kept() -> None:
    batch = make()
    attempt = batch.assign(0, "i0", 1001.0)
    batch.extend(0, attempt, columns([5, 6, 7], [-1.0, -2.0, -3.0]), 1002.0, [-1.5, -2.5, -3.5])
    (chunk,) = collect(batch, record_of(batch)).extensions
    fresh = make()
    stored = sample_pb2.Sample.FromString(chunk.payload)
    fresh.restore(0, stored, 1)
    attempt = fresh.assign(0, "i1", 1005.0)
    fresh.extend(0, attempt, columns([8], [-4.0]), 1006.0)
    provenance = end(fresh, attempt)
    assert (provenance.reused_prefix, provenance.cached_tokens, provenance.lossless) == (0, 0, False)
    assert kept(fresh).logprobs.tolist() == [-1.0, -2.0, -4.0]


def test_each_attempt_of_an_exact_sample_tells_of_the_whole_response() -> None:
    batch = make(EXACT)
    first = batch.assign(0, "i0", 1001.0)
    batch.extend(0, first, columns([5, 6, 7], [-1.0] * 3), 1002.0)
    batch.finish(0, first, finished(ABORTED, reused_prefix=3, cached_tokens=8), 1003.0)
    second = batch.assign(0, "i1", 1004.0)
    batch.extend(0, second, columns([7, 8, 9], [-1.0] * 3), 1005.0)
    provenance = end(batch, second, reused_prefix=4, cached_tokens=8)
    assert (provenance.reused_prefix, provenance.cached_tokens, provenance.lossless) == (4, 8, True)


def test_an_instance_that_finds_no_rollout_does_not_hide_what_another_found() -> None:
    batch = make(EXACT)
    first = batch.assign(0, "i0", 1001.0)
    batch.extend(0, first, columns([5, 6, 7], [-1.0] * 3), 1002.0)
    batch.finish(0, first, finished(ABORTED, reused_prefix=2, cached_tokens=8), 1003.0)
    second = batch.assign(0, "i1", 1004.0)
    batch.extend(0, second, columns([7, 8], [-1.0] * 2), 1005.0)
    provenance = end(batch, second)
    assert (provenance.reused_prefix, provenance.cached_tokens) == (2, 8)


@pytest.mark.parametrize("level", [EXACT, sample_pb2.EXACTNESS_LEVEL_REJECTION])
def test_verified_log_probabilities_of_what_is_not_lenient_are_left_out(
    level: sample_pb2.ExactnessLevel,
) -> None:
    batch = make(level)
    attempt = batch.assign(0, "i0", 1001.0)
    batch.extend(0, attempt, columns([5], [-1.0]), 1002.0, [-9.0])
    assert end(batch, attempt).reused_prefix == 0
    assert kept(batch).logprobs.tolist() == [-1.0]


def test_verified_log_probabilities_after_a_token_without_are_left_out() -> None:
    batch = make()
    attempt = batch.assign(0, "i0", 1001.0)
    batch.extend(0, attempt, columns([5], [-1.0]), 1002.0)
    batch.extend(0, attempt, columns([6], [-2.0]), 1003.0, [-9.0])
    end(batch, attempt)
    assert kept(batch).logprobs.tolist() == [-1.0, -2.0]


def test_a_count_beyond_the_response_is_cut() -> None:
    batch = make(EXACT)
    attempt = batch.assign(0, "i0", 1001.0)
    batch.extend(0, attempt, columns([5, 6], [-1.0] * 2), 1002.0)
    provenance = end(batch, attempt, reused_prefix=9, cached_tokens=5)
    assert (provenance.reused_prefix, provenance.cached_tokens) == (2, 5)


def test_samples_cut_short_or_without_numbers_are_not_kept() -> None:
    aborted = make()
    attempt = aborted.assign(0, "i0", 1001.0)
    aborted.extend(0, attempt, columns([5], [-1.0]), 1002.0)
    aborted.cancel(0, True)
    aborted.abort(0, 1003.0)
    assert rollout_of(aborted, aborted.endings[0]) is None
    failed = make()
    attempt = failed.assign(0, "i0", 1001.0)
    failed.extend(0, attempt, columns([5], [-1.0]), 1002.0)
    failed.fail(0, "broken", 1003.0)
    assert rollout_of(failed, failed.endings[0]) is None
    odd = make()
    attempt = odd.assign(0, "i0", 1001.0)
    odd.extend(0, attempt, columns([5], [float("nan")]), 1002.0)
    odd.finish(0, attempt, finished(), 1003.0)
    assert rollout_of(odd, odd.endings[0]) is None


def test_a_discarded_sample_has_reused_nothing() -> None:
    batch = make()
    attempt = batch.assign(0, "i0", 1001.0)
    batch.extend(0, attempt, columns([5, 6], [-1.0] * 2), 1002.0, [-1.5] * 2)
    batch.cancel(0, keep_partial=False)
    batch.finish(0, attempt, finished(ABORTED, reused_prefix=2, cached_tokens=4), 1003.0)
    sample = final_sample(batch, batch.endings[0])
    assert list(sample.tokens.token_ids) == []
    assert sample.provenance.reused_prefix == 0


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6), st.booleans()), max_size=12))
def test_verified_log_probabilities_are_always_of_the_first_tokens(
    events: list[tuple[int, int, bool]],
) -> None:
    """Whatever is received and lost: never more of them than tokens, and each that of its token."""
    batch = make()
    batch.max_attempts = 1000
    state = batch.samples[0]
    attempt = batch.assign(0, "i0", 1001.0)
    for tokens, verified, lost in events:
        begin = len(state.tokens)
        new = range(begin, begin + tokens)
        values = [float(position) for position in new][:verified]
        batch.extend(0, attempt, columns(new, [-1.0] * tokens), 1002.0, values)
        if lost:
            batch.lost(0, attempt, 1003.0)
            attempt = batch.assign(0, "i0", 1004.0)
        assert len(state.verified) <= len(state.tokens)
        assert list(state.verified) == list(range(len(state.verified)))
        assert state.reuse[1] <= len(state.tokens)


def test_instances_are_told_where_the_sample_belongs() -> None:
    batch = make()
    item = work_item(batch, batch.samples[0], handle=1)
    assert (item.run_id, item.prompt_id, item.slot, item.step) == ("run", "p", 3, 5)
    assert item.exactness.lenience == 1.5


BUILDER = BatchBuilder(max_seconds=1.0, max_attempts=1)


def test_lenient_batches_have_the_l_that_was_chosen_and_new_noise_in_every_step() -> None:
    wanted = sample_pb2.Exactness(
        level=LENIENT, lenience=1.2, kl_target=0.01, reuse_delay=1, diversity_floor=0.5
    )
    request = rollout_pb2.SubmitRolloutsRequest(run_id="run", batch_id="b", step=4, exactness=wanted)
    request.groups.add(prompt_id="p", prompt_token_ids=[1], samples=1)
    batch = BUILDER.from_submission(request, accepted_at=0.0, lenience=1.7)
    used = sample_pb2.Exactness()
    used.CopyFrom(wanted)
    used.lenience = 1.7
    assert batch.exactness == used
    assert batch.samples[0].seed == sample_seed(0, 4, "p", 0) != sample_seed(0, 5, "p", 0)
    assert (batch.step, batch.cached_run) == (4, "run")


def test_generate_has_rollouts_under_its_names_if_it_has_both() -> None:
    for prompt_id, run in (("p", "run"), ("", "")):
        request = rollout_pb2.GenerateRequest(run_id="run", prompt_id=prompt_id, step=2)
        batch = BUILDER.from_generate(request, ("run", "g"), 0, accepted_at=0.0)
        assert (batch.cached_run, batch.step, batch.rewarded_as) == (run, 2, "generate/2")


def test_other_levels_carry_their_name_only() -> None:
    assert exactness_of(sample_pb2.Exactness()) == sample_pb2.Exactness(level=EXACT)
    assert exactness_of(sample_pb2.Exactness(level=EXACT), 1.5) == sample_pb2.Exactness(level=EXACT)
    assert exactness_of(sample_pb2.Exactness(level=LENIENT, kl_target=0.1)).lenience == 1.0
