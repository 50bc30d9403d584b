"""A sample's way through assignments, losses and ends: whatever comes, it ends once and with its own tokens."""

from __future__ import annotations

from array import array
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from paceline import convert
from paceline.columns import TokenBuffer, VersionMark
from paceline.internal.v1 import generation_pb2
from paceline.times import duration, seconds_of
from paceline.v1 import sample_pb2
from services.gateway.journal.chunks import WHOLE, Head, PartialSample, TokenChunk, pack
from services.gateway.journal.record import collect, has_more, settle, undo
from services.gateway.state.messages import final_sample, work_item
from services.gateway.state.rollout_batch import RolloutBatch
from services.gateway.state.sample import BatchGroup, EventEffect, GatewaySample, SamplePhase
from tests.support.token_columns import columns
from tests.unit.gateway.scheduler_parts import record_of

STOP, LENGTH, ABORTED = (
    sample_pb2.FINISH_REASON_STOP,
    sample_pb2.FINISH_REASON_LENGTH,
    sample_pb2.FINISH_REASON_ABORTED,
)


def make(samples: int = 2, max_attempts: int = 3) -> RolloutBatch:
    return RolloutBatch(
        key=("run", "b"),
        policy_version=7,
        groups=[BatchGroup("p", [1, 2], sample_pb2.SamplingParams(max_tokens=50))],
        exactness=sample_pb2.Exactness(level=sample_pb2.EXACTNESS_LEVEL_EXACT),
        samples=[GatewaySample(index, 0, index, 100 + index) for index in range(samples)],
        accepted_at=1000.0,
        deadline_at=2000.0,
        max_attempts=max_attempts,
    )


def restore(batch: RolloutBatch, chunks: list[TokenChunk]) -> None:
    for chunk in chunks:
        sample = PartialSample(chunk.index, Head(1, chunk.end), chunk.payload).parse()
        assert sample is not None
        batch.restore(chunk.index, sample, 1)


def joined(payload: bytes) -> sample_pb2.Sample:
    """Return a sample as it is delivered, with one run of versions where chunks have several."""
    sample = sample_pb2.Sample.FromString(payload)
    whole = TokenBuffer()
    whole.extend(sample.tokens, sample.tokens.versions)
    sample.tokens.CopyFrom(whole.message())
    return sample


def finished(reason: sample_pb2.FinishReason, **fields: float) -> generation_pb2.Finished:
    return generation_pb2.Finished(finish_reason=reason, **fields)


def test_an_undisturbed_sample_is_assembled_with_its_provenance() -> None:
    batch = make()
    attempt = batch.assign(0, "i0", 1001.0)
    assert batch.extend(0, attempt, columns([5, 6], [-1.0, -2.0]), 1003.0)
    assert batch.extend(0, attempt, columns([7], [-0.5]), 1004.0)
    report = finished(STOP, queue_time=duration(0.5), decode_steps=2, verify_steps=1)
    report.draft_sources.add(drafter="suffix", drafted=4, accepted=1)
    assert batch.finish(0, attempt, report, 1005.0) is EventEffect.ENDED
    sample = final_sample(batch, batch.endings[0])
    assert (sample.prompt_id, sample.slot, sample.seed) == ("p", 0, 100)
    assert (list(sample.tokens.token_ids), list(sample.tokens.logprobs)) == ([5, 6, 7], [-1.0, -2.0, -0.5])
    assert (sample.finish_reason, sample.status) == (STOP, sample_pb2.SAMPLE_STATUS_COMPLETED)
    assert list(sample.tokens.versions) == [sample_pb2.VersionRun(tokens=3, policy_version=7)]
    provenance = sample.provenance
    assert (provenance.drafted, provenance.accepted, provenance.decode_steps) == (4, 1, 2)
    assert (seconds_of(provenance.queue_time), seconds_of(provenance.generation_time)) == (1.5, 3.5)
    assert (provenance.resubmissions, provenance.lossless) == (0, True)
    (part,) = provenance.instance_spans
    assert (part.instance_id, part.begin_token, part.end_token) == ("i0", 0, 3)
    assert (part.begin.seconds, part.end.seconds) == (1001, 1005)


def test_a_lost_sample_goes_on_from_all_but_its_last_token() -> None:
    batch = make()
    first = batch.assign(0, "i0", 1001.0)
    batch.extend(0, first, columns([5, 6, 7], [-1.0, -2.0, -3.0]), 1002.0)
    assert batch.lost(0, first, 1003.0) is EventEffect.WAITING
    second = batch.assign(0, "i1", 1004.0)
    item = work_item(batch, batch.samples[0], handle=9)
    assert (list(item.prompt_token_ids), list(item.prefix_token_ids)) == ([1, 2], [5, 6])
    assert (item.seed, item.policy_version, item.handle) == (100, 7, 9)
    batch.extend(0, second, columns([7, 8], [-3.0, -4.0]), 1005.0)
    batch.finish(0, second, finished(LENGTH), 1006.0)
    sample = final_sample(batch, batch.endings[0])
    assert list(sample.tokens.token_ids) == [5, 6, 7, 8]
    assert sample.status == sample_pb2.SAMPLE_STATUS_TRUNCATED
    assert sample.provenance.resubmissions == 1
    spans = [(s.instance_id, s.begin_token, s.end_token) for s in sample.provenance.instance_spans]
    assert spans == [("i0", 0, 2), ("i1", 2, 4)]


def test_events_of_an_earlier_attempt_change_nothing() -> None:
    batch = make()
    first = batch.assign(0, "i0", 1001.0)
    batch.lost(0, first, 1002.0)
    assert not batch.extend(0, first, columns([5], [-1.0]), 1003.0)
    second = batch.assign(0, "i1", 1004.0)
    assert not batch.extend(0, first, columns([5], [-1.0]), 1005.0)
    assert batch.finish(0, first, finished(STOP), 1005.0) is EventEffect.IGNORED
    assert batch.lost(0, first, 1005.0) is EventEffect.IGNORED
    assert batch.refused(0, first, 1005.0) is EventEffect.IGNORED
    assert batch.extend(0, second, columns([6], [-1.0]), 1006.0)
    assert list(batch.samples[0].tokens) == [6]


def test_being_refused_takes_no_tokens_away() -> None:
    batch = make()
    attempt = batch.assign(0, "i0", 1001.0)
    batch.extend(0, attempt, columns([5, 6, 7], [-1.0] * 3), 1002.0)
    batch.lost(0, attempt, 1003.0)
    for _ in range(2):
        assert batch.refused(0, batch.assign(0, "i1", 1004.0), 1004.0) is EventEffect.WAITING
    assert list(batch.samples[0].tokens) == [5, 6]
    assert batch.samples[0].resubmissions == 1


def test_attempts_without_a_token_end_in_failure() -> None:
    batch = make(max_attempts=3)
    for _ in range(2):
        assert batch.refused(0, batch.assign(0, "i0", 1001.0), 1001.0) is EventEffect.WAITING
    assert batch.refused(0, batch.assign(0, "i0", 1001.0), 1002.0) is EventEffect.ENDED
    sample = final_sample(batch, batch.endings[0])
    assert sample.status == sample_pb2.SAMPLE_STATUS_FAILED
    assert "3 attempts" in sample.error


def test_a_sample_that_takes_its_instances_with_it_is_failed() -> None:
    """It never lives to report anything, however many tokens it had there."""
    batch = make(max_attempts=16)
    for number in range(15):
        assert batch.lost(0, batch.assign(0, f"i{number}", 1001.0), 1003.0) is EventEffect.WAITING
    assert batch.lost(0, batch.assign(0, "i15", 1001.0), 1003.0) is EventEffect.ENDED
    assert final_sample(batch, batch.endings[0]).status == sample_pb2.SAMPLE_STATUS_FAILED


def test_the_first_step_is_when_the_instance_says_not_when_it_first_reported() -> None:
    batch = make()
    batch.lost(0, batch.assign(0, "i0", 1001.0), 1002.0)
    second = batch.assign(0, "i1", 1003.0)
    batch.extend(0, second, columns([5, 6], [-1.0, -2.0]), 1008.0)
    third = batch.moved(0, second, "i2", 2, 1009.0)
    assert third is not None
    batch.finish(0, third, finished(STOP, queue_time=duration(0.5)), 1010.0)
    provenance = final_sample(batch, batch.endings[0]).provenance
    assert (seconds_of(provenance.queue_time), seconds_of(provenance.generation_time)) == (3.5, 6.5)


def test_an_attempt_that_brought_tokens_starts_the_count_again() -> None:
    batch = make(max_attempts=2)
    for round_number in range(5):
        attempt = batch.assign(0, "i0", 1001.0)
        batch.extend(0, attempt, columns([1, 2], [-1.0, -1.0]), 1001.0)
        assert batch.lost(0, attempt, 1002.0) is EventEffect.WAITING
        assert len(batch.samples[0].tokens) == round_number + 1


@pytest.mark.parametrize("keep", [True, False])
def test_a_cancelled_sample_ends_as_aborted_with_or_without_tokens(keep: bool) -> None:
    batch = make()
    attempt = batch.assign(0, "i0", 1001.0)
    batch.extend(0, attempt, columns([5, 6], [-1.0, -1.0]), 1002.0)
    assert batch.cancel(0, keep) is SamplePhase.ASSIGNED
    assert batch.cancel(0, not keep) is SamplePhase.ENDED
    batch.extend(0, attempt, columns([7], [-1.0]), 1003.0)
    assert batch.finish(0, attempt, finished(STOP), 1004.0) is EventEffect.ENDED
    sample = final_sample(batch, batch.endings[0])
    assert (sample.status, sample.finish_reason) == (sample_pb2.SAMPLE_STATUS_ABORTED, ABORTED)
    assert list(sample.tokens.token_ids) == ([5, 6, 7] if keep else [])
    assert len(sample.tokens.versions) == keep


def test_a_cancelled_sample_whose_instance_is_lost_is_not_sent_elsewhere() -> None:
    batch = make()
    attempt = batch.assign(0, "i0", 1001.0)
    batch.extend(0, attempt, columns([5], [-1.0]), 1002.0)
    batch.cancel(0, keep_partial=True)
    assert batch.lost(0, attempt, 1003.0) is EventEffect.ENDED
    assert list(final_sample(batch, batch.endings[0]).tokens.token_ids) == [5]


def test_an_end_that_nobody_asked_for_is_a_hand_over() -> None:
    batch = make()
    attempt = batch.assign(0, "i0", 1001.0)
    batch.extend(0, attempt, columns([5, 6], [-1.0, -1.0]), 1002.0)
    assert batch.finish(0, attempt, finished(ABORTED, decode_steps=2), 1003.0) is EventEffect.WAITING
    assert list(batch.samples[0].tokens) == [5]
    assert batch.samples[0].decode_steps == 2


def test_one_that_is_handed_on_for_the_others_sake_is_not_to_blame() -> None:
    batch = make(max_attempts=2)
    for number in range(5):
        attempt = batch.assign(0, f"i{number}", 1000.0)
        report = finished(ABORTED, resume_on=f"i{number + 1}")
        assert batch.finish(0, attempt, report, 1001.0) is EventEffect.WAITING
    assert batch.samples[0].resubmissions == 5


def test_the_stop_string_that_ended_a_sample_is_told() -> None:
    batch = make()
    attempt = batch.assign(0, "i0", 1001.0)
    batch.extend(0, attempt, columns([5], [-1.0]), 1002.0)
    batch.finish(0, attempt, generation_pb2.Finished(finish_reason=STOP, stop_string="###"), 1003.0)
    assert final_sample(batch, batch.endings[0]).stop_string == "###"


def test_nonfinite_logprobs_are_reported_by_position() -> None:
    batch = make()
    attempt = batch.assign(0, "i0", 1001.0)
    batch.extend(0, attempt, columns([5, 6, 7, 8], [-1.0, float("-inf"), float("nan"), -3.0e38]), 1002.0)
    batch.finish(0, attempt, finished(STOP), 1003.0)
    assert list(final_sample(batch, batch.endings[0]).nonfinite_logprobs) == [1, 2]


def test_unfinished_samples_are_journaled_once_they_have_grown_enough() -> None:
    batch = make()
    record, attempt = record_of(batch), batch.assign(0, "i0", 1001.0)
    batch.extend(0, attempt, columns([5, 6, 7], [-1.0, -2.0, -3.0]), 1002.0)
    assert not collect(batch, record, 3)
    assert not has_more(batch, record)
    batch.extend(0, attempt, columns([8], [-4.0]), 1003.0)
    (chunk,) = collect(batch, record, 3).extensions
    assert (chunk.number, chunk.begin, chunk.end) == (0, 0, 3)
    batch.extend(0, attempt, columns([9], [-5.0]), 1004.0)
    assert not collect(batch, record, 3)


def test_a_sample_that_ends_is_written_without_its_chunks_and_they_make_it_whole() -> None:
    batch, other = make(), make()
    record, writes = record_of(batch), []
    for each in (batch, other):
        attempt = each.assign(0, "i0", 1001.0)
        each.extend(0, attempt, columns([5, 6, 7], [-1.0, -2.0, float("nan")]), 1002.0)
        if each is batch:
            writes.append(collect(batch, record))
        each.extend(0, attempt, columns([8, 300_000], [-4.0, -5.0]), 1003.0)
        if each is batch:
            writes.append(collect(batch, record))
        each.finish(0, attempt, finished(STOP), 1005.0)
    chunks = [chunk for write in writes for chunk in write.extensions]
    assert [(chunk.number, chunk.begin, chunk.end) for chunk in chunks] == [(0, 0, 2), (1, 2, 4)]
    (ended,) = collect(batch, record).ended
    assert list(sample_pb2.Sample.FromString(ended.rest).tokens.token_ids) == [300_000]
    # However it is put together, it is what it would be without chunks.
    stored = b"".join(chunk.payload for chunk in chunks) + ended.rest
    want = final_sample(other, other.endings[0]).SerializeToString(deterministic=True)
    for payload in (stored, ended.payload):
        assert joined(payload).SerializeToString(deterministic=True) == want


def test_a_sample_whose_chunks_are_torn_is_written_whole_and_kept_until_then() -> None:
    batch = make()
    record, attempt = record_of(batch), batch.assign(0, "i0", 1001.0)
    batch.extend(0, attempt, columns([5, 6, 7], [-1.0, -2.0, -3.0]), 1002.0)
    settle(batch, record, collect(batch, record), [])
    batch.finish(0, attempt, finished(STOP), 1005.0)
    write = collect(batch, record)
    assert [ended.head for ended in write.ended] == [Head(1, 2)]
    settle(batch, record, write, [0])
    assert (write.ended, record.safe) == ([], 0)
    assert has_more(batch, record)
    (ended,) = collect(batch, record).ended
    assert (ended.head, ended.rest) == (WHOLE, ended.payload)
    assert list(sample_pb2.Sample.FromString(ended.payload).tokens.token_ids) == [5, 6, 7]


def test_an_undone_chunk_is_written_again_with_what_came_meanwhile() -> None:
    batch = make()
    record, attempt = record_of(batch), batch.assign(0, "i0", 1001.0)
    batch.extend(0, attempt, columns([5, 6, 7], [-1.0, -2.0, -3.0]), 1002.0)
    settle(batch, record, collect(batch, record), [])
    batch.extend(0, attempt, columns([8], [-4.0]), 1003.0)
    write = collect(batch, record)
    batch.extend(0, attempt, columns([9], [-5.0]), 1003.0)
    undo(batch, write)
    (chunk,) = collect(batch, record).extensions
    assert (chunk.number, chunk.begin, chunk.end) == (1, 2, 4)


def test_restored_samples_go_on_from_the_journal() -> None:
    batch = make()
    attempt = batch.assign(0, "i0", 1001.0)
    batch.extend(0, attempt, columns([5, 6, 7], [-1.0, -2.0, -3.0]), 1002.0)
    fresh = make()
    restore(fresh, collect(batch, record_of(batch)).extensions)
    assert list(fresh.samples[0].tokens) == [5, 6]
    assert fresh.samples[0].resubmissions == 1
    attempt = fresh.assign(0, "i1", 1005.0)
    fresh.extend(0, attempt, columns([7, 8], [-3.0, -4.0]), 1006.0)
    (chunk,) = collect(fresh, record_of(fresh)).extensions
    assert (chunk.number, chunk.begin, chunk.end) == (1, 2, 3)
    fresh.finish(0, attempt, finished(STOP), 1007.0)
    assert list(final_sample(fresh, fresh.endings[0]).tokens.token_ids) == [5, 6, 7, 8]


def chunk_of(tokens: list[int], logprobs: list[float]) -> bytes:
    return pack(TokenBuffer(array("I", tokens), array("f", logprobs), versions=[VersionMark(0, 7)]))


@pytest.mark.parametrize(
    "spoilt", [chunk_of([1, 2], [0.0]), chunk_of([1], [0.0]), chunk_of([1, 2], [0.0, 0.0])[:-1], b"?"]
)
def test_chunks_that_are_not_what_their_head_promises_are_of_no_use(spoilt: bytes) -> None:
    assert PartialSample(0, Head(1, 2), chunk_of([1, 2], [0.0, 0.0])).parse() is not None
    assert PartialSample(0, Head(1, 2), spoilt).parse() is None


def test_a_moved_sample_goes_on_as_a_new_attempt_that_is_no_resubmission() -> None:
    batch = make()
    first = batch.assign(0, "i0", 1001.0)
    batch.extend(0, first, columns([5, 6], [-1.0, -1.0]), 1002.0)
    second = batch.moved(0, first, "i1", 2, 1003.0)
    assert second == first + 1
    assert not batch.extend(0, first, columns([9], [-1.0]), 1004.0), "the donor has nothing more to say"
    assert batch.extend(0, second, columns([7], [-1.0]), 1004.0)
    assert batch.finish(0, second, finished(STOP, decode_steps=3), 1005.0) is EventEffect.ENDED
    sample = final_sample(batch, batch.endings[0])
    assert list(sample.tokens.token_ids) == [5, 6, 7]
    spans = [(s.instance_id, s.begin_token, s.end_token) for s in sample.provenance.instance_spans]
    assert spans == [("i0", 0, 2), ("i1", 2, 3)]
    assert (sample.provenance.resubmissions, sample.provenance.decode_steps) == (0, 3)
    assert sample.provenance.migrations == 1


def test_a_moved_sample_that_is_lost_before_it_brought_anything_keeps_all_its_tokens() -> None:
    batch = make()
    first = batch.assign(0, "i0", 1001.0)
    batch.extend(0, first, columns([5, 6], [-1.0, -1.0]), 1002.0)
    second = batch.moved(0, first, "i1", 2, 1003.0)
    assert second is not None
    assert batch.lost(0, second, 1004.0) is EventEffect.WAITING
    # The donor went on after them, so none of them was the last.
    assert list(batch.samples[0].tokens) == [5, 6]
    assert batch.samples[0].resubmissions == 1


def test_a_moved_sample_counts_the_prefix_that_its_caller_brought() -> None:
    batch = make()
    batch.groups[0] = BatchGroup("p", [1, 2], sample_pb2.SamplingParams(max_tokens=50), prefix=(3, 4))
    first = batch.assign(0, "i0", 1001.0)
    batch.extend(0, first, columns([5], [-1.0]), 1002.0)
    assert batch.moved(0, first, "i1", 1, 1003.0) is None
    assert batch.moved(0, first, "i1", 3, 1003.0) == first + 1


class SampleMachine(RuleBasedStateMachine):
    """One sample under any order of events, against the response that it must end with.

    The journal is modelled as the script keeps it: chunks, of which each ends those after it. The log-probability
    of a token is the negative version that sampled it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.batch = make(samples=1, max_attempts=5)
        self.truth = list(range(100, 160))
        self.journal: list[bytes] = []
        self.payloads: list[bytes] = []
        self.now = 1001.0
        self.version = 7

    @property
    def sample(self) -> GatewaySample:
        return self.batch.samples[0]

    @rule()
    def update(self) -> None:
        self.version += 1
        self.batch.current_version = self.version

    @rule(wanted=st.integers(1, 6), behind=st.integers(0, 1), mixed=st.booleans())
    def progress(self, wanted: int, behind: int, mixed: bool) -> None:
        if self.sample.phase is SamplePhase.WAITING:
            self.batch.assign(0, f"i{self.sample.attempt % 3}", self.now)
        if self.sample.phase is SamplePhase.ASSIGNED:
            have = len(self.sample.tokens)
            tokens = self.truth[have : have + wanted]
            version = self.version - behind
            logprobs = [-(version + mixed / 2)] * len(tokens)
            top_token_ids, top_logprobs = likeliest_of(tokens)
            new = columns(
                tokens,
                logprobs,
                version,
                mixed_kv=mixed,
                top_token_ids=top_token_ids,
                top_logprobs=top_logprobs,
            )
            assert self.batch.extend(0, self.sample.attempt, new, self.now)
            if have + len(tokens) == len(self.truth):
                self.batch.finish(0, self.sample.attempt, finished(STOP), self.now)

    @rule()
    def lose(self) -> None:
        self.batch.lost(0, self.sample.attempt, self.now)

    @rule()
    def refuse(self) -> None:
        if self.sample.phase is SamplePhase.WAITING:
            self.batch.assign(0, "full", self.now)
            self.batch.refused(0, self.sample.attempt, self.now)

    @rule(missing=st.booleans())
    def move(self, missing: bool) -> None:
        if self.sample.phase is SamplePhase.ASSIGNED:
            old, have = self.sample.attempt, len(self.sample.tokens)
            new = self.batch.moved(0, old, "there", have + missing, self.now)
            assert new == (None if missing else old + 1)

    @rule(old=st.integers(0, 3))
    def late_event(self, old: int) -> None:
        attempt = self.sample.attempt - 1 - old
        assert not self.batch.extend(0, attempt, columns([1], [0.0]), self.now)
        assert self.batch.finish(0, attempt, finished(STOP), self.now) is EventEffect.IGNORED

    @rule()
    def write_journal(self) -> None:
        write = collect(self.batch, record_of(self.batch))
        for chunk in write.extensions:
            assert chunk.number <= len(self.journal)
            self.journal[chunk.number :] = [chunk.payload]
        for ended in write.ended:
            self.payloads.append(b"".join(self.journal[: ended.head.chunks]) + ended.rest)
            assert joined(ended.payload) == joined(self.payloads[-1])

    @rule()
    def restart(self) -> None:
        if self.payloads or self.sample.phase is SamplePhase.ENDED:
            return
        self.batch = make(samples=1, max_attempts=5)
        self.batch.current_version = self.version
        sample = joined(b"".join(self.journal))
        if sample.tokens.token_ids:
            self.batch.restore(0, sample, len(self.journal))

    @invariant()
    def tokens_are_a_prefix_of_the_truth(self) -> None:
        tokens = list(self.sample.tokens)
        assert tokens == self.truth[: len(tokens)]
        assert len(self.sample.columns.logprobs) == len(tokens)
        own = self.sample.columns
        assert (list(own.top_token_ids), list(own.top_logprobs)) == likeliest_of(tokens)

    @invariant()
    def tokens_of_unfinished_samples_are_counted(self) -> None:
        running = self.sample.phase is not SamplePhase.ENDED
        assert self.batch.held_tokens == (3 * len(self.sample.tokens) if running else 0)

    @invariant()
    def spans_tell_who_sampled_each_token(self) -> None:
        sample = sample_pb2.Sample(tokens=self.sample.columns.message())
        assert versions_of(sample) == [-logprob for logprob in self.sample.columns.logprobs]

    @invariant()
    def delivered_at_most_once_and_whole(self) -> None:
        assert len(self.payloads) <= 1
        for payload in self.payloads:
            sample = sample_pb2.Sample.FromString(payload)
            if sample.status == sample_pb2.SAMPLE_STATUS_COMPLETED:
                assert list(sample.tokens.token_ids) == self.truth
            told = (list(sample.tokens.top_token_ids), list(sample.tokens.top_logprobs))
            assert told == likeliest_of(list(sample.tokens.token_ids))
            spans = [(s.begin_token, s.end_token) for s in sample.provenance.instance_spans]
            covered = [token for begin, end in spans for token in range(begin, end)]
            assert covered == list(range(len(sample.tokens.token_ids)))
            assert versions_of(sample) == [-logprob for logprob in sample.tokens.logprobs]
            spans = convert.sample(sample).version_spans
            marks = [(span.policy_version, span.mixed_kv) for span in spans]
            assert all(before != after for before, after in pairwise(marks))
            assert sample.provenance.lossless == (not any(mixed for _, mixed in marks))


def likeliest_of(tokens: list[int]) -> tuple[list[int], list[float]]:
    """Return two likeliest tokens for each of these, and their log-probabilities."""
    return [each for token in tokens for each in (token + 1, token + 2)], [-0.5, -1.5] * len(tokens)


def versions_of(sample: sample_pb2.Sample) -> list[float]:
    """Return the version of each token, half more with KV of several."""
    return [
        run.policy_version + run.mixed_kv / 2 for run in sample.tokens.versions for _ in range(run.tokens)
    ]


TestSampleMachine = SampleMachine.TestCase
TestSampleMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_tokens_of_any_size_survive_the_journal(tokens: list[int]) -> None:
    batch = make()
    attempt = batch.assign(0, "i0", 1001.0)
    batch.extend(0, attempt, columns(tokens, [-0.25] * len(tokens)), 1002.0)
    write = collect(batch, record_of(batch))
    fresh = make()
    restore(fresh, write.extensions)
    assert list(fresh.samples[0].tokens) == tokens[:-1]
