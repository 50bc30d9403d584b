"""A sample's way through assignments, losses and ends: whatever comes, it ends once and with its own tokens."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from paceline.internal.v1 import generation_pb2
from paceline.v1 import sample_pb2
from services.gateway.assemble import collect, final_sample, work_item
from services.gateway.batch import Batch, GroupSpec, Phase, SampleState, Verdict

STOP, LENGTH, ABORTED = (
    sample_pb2.FINISH_REASON_STOP,
    sample_pb2.FINISH_REASON_LENGTH,
    sample_pb2.FINISH_REASON_ABORTED,
)


def make(samples: int = 2, max_attempts: int = 3) -> Batch:
    return Batch(
        key=("run", "b"),
        policy_version=7,
        groups=[GroupSpec("p", [1, 2], sample_pb2.SamplingParams(max_tokens=50))],
        exactness=sample_pb2.Exactness(level=sample_pb2.EXACTNESS_LEVEL_EXACT),
        samples=[SampleState(index, 0, index, 100 + index) for index in range(samples)],
        accepted_at=1000.0,
        deadline_at=2000.0,
        max_attempts=max_attempts,
    )


def finished(reason: sample_pb2.FinishReason, **fields: float) -> generation_pb2.Finished:
    return generation_pb2.Finished(finish_reason=reason, **fields)


def test_an_undisturbed_sample_is_assembled_with_its_provenance() -> None:
    batch = make()
    attempt = batch.assign(0, "i0", 1001.0)
    assert batch.extend(0, attempt, [5, 6], [-1.0, -2.0], 1003.0)
    assert batch.extend(0, attempt, [7], [-0.5], 1004.0)
    report = finished(STOP, queue_seconds=0.5, decode_steps=2, verify_steps=1)
    report.draft_sources.add(drafter="suffix", drafted=4, accepted=1)
    assert batch.finish(0, attempt, report, 1005.0) is Verdict.ENDED
    sample = final_sample(batch, batch.endings[0])
    assert (sample.prompt_id, sample.slot, sample.seed) == ("p", 0, 100)
    assert (list(sample.token_ids), list(sample.logprobs)) == ([5, 6, 7], [-1.0, -2.0, -0.5])
    assert (sample.finish_reason, sample.status) == (STOP, sample_pb2.SAMPLE_STATUS_COMPLETED)
    (span,) = sample.version_spans
    assert (span.begin, span.end, span.policy_version) == (0, 3, 7)
    provenance = sample.provenance
    assert (provenance.drafted, provenance.accepted, provenance.decode_steps) == (4, 1, 2)
    assert (provenance.queue_seconds, provenance.generation_seconds) == (1.5, 3.5)
    assert (provenance.resubmissions, provenance.lossless) == (0, True)
    (part,) = provenance.instance_spans
    assert (part.instance_id, part.begin_token, part.end_token) == ("i0", 0, 3)
    assert (part.begin.seconds, part.end.seconds) == (1001, 1005)


def test_a_lost_sample_goes_on_from_all_but_its_last_token() -> None:
    batch = make()
    first = batch.assign(0, "i0", 1001.0)
    batch.extend(0, first, [5, 6, 7], [-1.0, -2.0, -3.0], 1002.0)
    assert batch.lost(0, first, 1003.0) is Verdict.WAITING
    second = batch.assign(0, "i1", 1004.0)
    item = work_item(batch, batch.samples[0], handle=9)
    assert (list(item.prompt_token_ids), list(item.prefix_token_ids)) == ([1, 2], [5, 6])
    assert (item.seed, item.policy_version, item.handle) == (100, 7, 9)
    batch.extend(0, second, [7, 8], [-3.0, -4.0], 1005.0)
    batch.finish(0, second, finished(LENGTH), 1006.0)
    sample = final_sample(batch, batch.endings[0])
    assert list(sample.token_ids) == [5, 6, 7, 8]
    assert sample.status == sample_pb2.SAMPLE_STATUS_TRUNCATED
    assert sample.provenance.resubmissions == 1
    spans = [(s.instance_id, s.begin_token, s.end_token) for s in sample.provenance.instance_spans]
    assert spans == [("i0", 0, 2), ("i1", 2, 4)]


def test_events_of_an_earlier_attempt_change_nothing() -> None:
    batch = make()
    first = batch.assign(0, "i0", 1001.0)
    batch.lost(0, first, 1002.0)
    assert not batch.extend(0, first, [5], [-1.0], 1003.0)
    second = batch.assign(0, "i1", 1004.0)
    assert not batch.extend(0, first, [5], [-1.0], 1005.0)
    assert batch.finish(0, first, finished(STOP), 1005.0) is Verdict.IGNORED
    assert batch.lost(0, first, 1005.0) is Verdict.IGNORED
    assert batch.refused(0, first, 1005.0) is Verdict.IGNORED
    assert batch.extend(0, second, [6], [-1.0], 1006.0)
    assert list(batch.samples[0].tokens) == [6]


def test_being_refused_takes_no_tokens_away() -> None:
    batch = make()
    attempt = batch.assign(0, "i0", 1001.0)
    batch.extend(0, attempt, [5, 6, 7], [-1.0] * 3, 1002.0)
    batch.lost(0, attempt, 1003.0)
    for _ in range(2):
        assert batch.refused(0, batch.assign(0, "i1", 1004.0), 1004.0) is Verdict.WAITING
    assert list(batch.samples[0].tokens) == [5, 6]
    assert batch.samples[0].resubmissions == 1


def test_attempts_without_a_token_end_in_failure() -> None:
    batch = make(max_attempts=3)
    for _ in range(2):
        assert batch.refused(0, batch.assign(0, "i0", 1001.0), 1001.0) is Verdict.WAITING
    assert batch.refused(0, batch.assign(0, "i0", 1001.0), 1002.0) is Verdict.ENDED
    sample = final_sample(batch, batch.endings[0])
    assert sample.status == sample_pb2.SAMPLE_STATUS_FAILED
    assert "3 attempts" in sample.error


def test_an_attempt_that_brought_tokens_starts_the_count_again() -> None:
    batch = make(max_attempts=2)
    for round_number in range(5):
        attempt = batch.assign(0, "i0", 1001.0)
        batch.extend(0, attempt, [1, 2], [-1.0, -1.0], 1001.0)
        assert batch.lost(0, attempt, 1002.0) is Verdict.WAITING
        assert len(batch.samples[0].tokens) == round_number + 1


@pytest.mark.parametrize("keep", [True, False])
def test_a_cancelled_sample_ends_as_aborted_with_or_without_tokens(keep: bool) -> None:
    batch = make()
    attempt = batch.assign(0, "i0", 1001.0)
    batch.extend(0, attempt, [5, 6], [-1.0, -1.0], 1002.0)
    assert batch.cancel(0, keep) is Phase.ASSIGNED
    assert batch.cancel(0, not keep) is Phase.ENDED
    batch.extend(0, attempt, [7], [-1.0], 1003.0)
    assert batch.finish(0, attempt, finished(STOP), 1004.0) is Verdict.ENDED
    sample = final_sample(batch, batch.endings[0])
    assert (sample.status, sample.finish_reason) == (sample_pb2.SAMPLE_STATUS_ABORTED, ABORTED)
    assert list(sample.token_ids) == ([5, 6, 7] if keep else [])
    assert len(sample.version_spans) == keep


def test_a_cancelled_sample_whose_instance_is_lost_is_not_sent_elsewhere() -> None:
    batch = make()
    attempt = batch.assign(0, "i0", 1001.0)
    batch.extend(0, attempt, [5], [-1.0], 1002.0)
    batch.cancel(0, keep_partial=True)
    assert batch.lost(0, attempt, 1003.0) is Verdict.ENDED
    assert list(final_sample(batch, batch.endings[0]).token_ids) == [5]


def test_an_end_that_nobody_asked_for_is_a_hand_over() -> None:
    batch = make()
    attempt = batch.assign(0, "i0", 1001.0)
    batch.extend(0, attempt, [5, 6], [-1.0, -1.0], 1002.0)
    assert batch.finish(0, attempt, finished(ABORTED, decode_steps=2), 1003.0) is Verdict.WAITING
    assert list(batch.samples[0].tokens) == [5]
    assert batch.samples[0].decode_steps == 2


def test_one_that_is_handed_on_for_the_others_sake_is_not_to_blame() -> None:
    batch = make(max_attempts=2)
    for number in range(5):
        attempt = batch.assign(0, f"i{number}", 1000.0)
        report = finished(ABORTED, resume_on=f"i{number + 1}")
        assert batch.finish(0, attempt, report, 1001.0) is Verdict.WAITING
    assert batch.samples[0].resubmissions == 5


def test_nonfinite_logprobs_are_reported_by_position() -> None:
    batch = make()
    attempt = batch.assign(0, "i0", 1001.0)
    batch.extend(0, attempt, [5, 6, 7, 8], [-1.0, float("-inf"), float("nan"), -3.0e38], 1002.0)
    batch.finish(0, attempt, finished(STOP), 1003.0)
    assert list(final_sample(batch, batch.endings[0]).nonfinite_logprobs) == [1, 2]


def test_restored_samples_go_on_from_the_journal() -> None:
    batch = make()
    attempt = batch.assign(0, "i0", 1001.0)
    batch.extend(0, attempt, [5, 6, 7], [-1.0, -2.0, -3.0], 1002.0)
    (extension,) = collect(batch).extensions
    fresh = make()
    fresh.restore(0, extension.tokens, extension.logprobs)
    assert list(fresh.samples[0].tokens) == [5, 6]
    assert fresh.samples[0].resubmissions == 1
    attempt = fresh.assign(0, "i1", 1005.0)
    fresh.extend(0, attempt, [7, 8], [-3.0, -4.0], 1006.0)
    (extension,) = collect(fresh).extensions
    assert extension.offset == 8
    fresh.finish(0, attempt, finished(STOP), 1007.0)
    assert list(final_sample(fresh, fresh.endings[0]).token_ids) == [5, 6, 7, 8]


def test_a_half_written_extension_restores_what_is_whole() -> None:
    batch = make()
    batch.restore(0, b"\1\0\0\0\2\0\0\0\3\0\0\0", b"\0\0\0\0\0\0\0\0\0")
    assert list(batch.samples[0].tokens) == [1]


def test_a_moved_sample_goes_on_as_a_new_attempt_that_is_no_resubmission() -> None:
    batch = make()
    first = batch.assign(0, "i0", 1001.0)
    batch.extend(0, first, [5, 6], [-1.0, -1.0], 1002.0)
    second = batch.moved(0, first, "i1", 2, 1003.0)
    assert second == first + 1
    assert not batch.extend(0, first, [9], [-1.0], 1004.0), "the donor has nothing more to say"
    assert batch.extend(0, second, [7], [-1.0], 1004.0)
    assert batch.finish(0, second, finished(STOP, decode_steps=3), 1005.0) is Verdict.ENDED
    sample = final_sample(batch, batch.endings[0])
    assert list(sample.token_ids) == [5, 6, 7]
    spans = [(s.instance_id, s.begin_token, s.end_token) for s in sample.provenance.instance_spans]
    assert spans == [("i0", 0, 2), ("i1", 2, 3)]
    assert (sample.provenance.resubmissions, sample.provenance.decode_steps) == (0, 3)


def test_a_moved_sample_that_is_lost_before_it_brought_anything_keeps_all_its_tokens() -> None:
    batch = make()
    first = batch.assign(0, "i0", 1001.0)
    batch.extend(0, first, [5, 6], [-1.0, -1.0], 1002.0)
    second = batch.moved(0, first, "i1", 2, 1003.0)
    assert second is not None
    assert batch.lost(0, second, 1004.0) is Verdict.WAITING
    # The donor went on after them, so none of them was the last.
    assert list(batch.samples[0].tokens) == [5, 6]
    assert batch.samples[0].resubmissions == 1


def test_a_moved_sample_counts_the_prefix_that_its_caller_brought() -> None:
    batch = make()
    batch.groups[0] = GroupSpec("p", [1, 2], sample_pb2.SamplingParams(max_tokens=50), prefix=(3, 4))
    first = batch.assign(0, "i0", 1001.0)
    batch.extend(0, first, [5], [-1.0], 1002.0)
    assert batch.moved(0, first, "i1", 1, 1003.0) is None
    assert batch.moved(0, first, "i1", 3, 1003.0) == first + 1


class SampleMachine(RuleBasedStateMachine):
    """One sample under any order of events, against the response that it must end with.

    The journal is modelled as the script keeps it: bytes written at an offset.
    """

    def __init__(self) -> None:
        super().__init__()
        self.batch = make(samples=1, max_attempts=5)
        self.truth = list(range(100, 160))
        self.journal = {"tokens": bytearray(), "logprobs": bytearray()}
        self.payloads: list[bytes] = []
        self.now = 1001.0

    @property
    def sample(self) -> SampleState:
        return self.batch.samples[0]

    @rule(wanted=st.integers(1, 6))
    def progress(self, wanted: int) -> None:
        if self.sample.phase is Phase.WAITING:
            self.batch.assign(0, f"i{self.sample.attempt % 3}", self.now)
        if self.sample.phase is Phase.ASSIGNED:
            have = len(self.sample.tokens)
            tokens = self.truth[have : have + wanted]
            assert self.batch.extend(0, self.sample.attempt, tokens, [-1.0] * len(tokens), self.now)
            if have + len(tokens) == len(self.truth):
                self.batch.finish(0, self.sample.attempt, finished(STOP), self.now)

    @rule()
    def lose(self) -> None:
        self.batch.lost(0, self.sample.attempt, self.now)

    @rule()
    def refuse(self) -> None:
        if self.sample.phase is Phase.WAITING:
            self.batch.assign(0, "full", self.now)
            self.batch.refused(0, self.sample.attempt, self.now)

    @rule(missing=st.booleans())
    def move(self, missing: bool) -> None:
        if self.sample.phase is Phase.ASSIGNED:
            old, have = self.sample.attempt, len(self.sample.tokens)
            new = self.batch.moved(0, old, "there", have + missing, self.now)
            assert new == (None if missing else old + 1)

    @rule(old=st.integers(0, 3))
    def late_event(self, old: int) -> None:
        attempt = self.sample.attempt - 1 - old
        assert not self.batch.extend(0, attempt, [1], [0.0], self.now)
        assert self.batch.finish(0, attempt, finished(STOP), self.now) is Verdict.IGNORED

    @rule()
    def write_journal(self) -> None:
        write = collect(self.batch)
        for extension in write.extensions:
            for name, data in (("tokens", extension.tokens), ("logprobs", extension.logprobs)):
                assert extension.offset <= len(self.journal[name])
                self.journal[name][extension.offset : extension.offset + len(data)] = data
        self.payloads += [ended.payload for ended in write.ended]

    @rule()
    def restart(self) -> None:
        if self.payloads or self.sample.phase is Phase.ENDED:
            return
        self.batch = make(samples=1, max_attempts=5)
        self.batch.restore(0, bytes(self.journal["tokens"]), bytes(self.journal["logprobs"]))

    @invariant()
    def tokens_are_a_prefix_of_the_truth(self) -> None:
        tokens = list(self.sample.tokens)
        assert tokens == self.truth[: len(tokens)]
        assert len(self.sample.logprobs) == len(tokens)

    @invariant()
    def delivered_at_most_once_and_whole(self) -> None:
        assert len(self.payloads) <= 1
        for payload in self.payloads:
            sample = sample_pb2.Sample.FromString(payload)
            if sample.status == sample_pb2.SAMPLE_STATUS_COMPLETED:
                assert list(sample.token_ids) == self.truth
            spans = [(s.begin_token, s.end_token) for s in sample.provenance.instance_spans]
            covered = [token for begin, end in spans for token in range(begin, end)]
            assert covered == list(range(len(sample.token_ids)))


TestSampleMachine = SampleMachine.TestCase
TestSampleMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_tokens_of_any_size_survive_the_journal(tokens: list[int]) -> None:
    batch = make()
    attempt = batch.assign(0, "i0", 1001.0)
    batch.extend(0, attempt, tokens, [-0.25] * len(tokens), 1002.0)
    write = collect(batch)
    fresh = make()
    for extension in write.extensions:
        fresh.restore(0, extension.tokens, extension.logprobs)
    assert list(fresh.samples[0].tokens) == tokens[:-1]
