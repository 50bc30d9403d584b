"""A batch and its samples: who has which sample, how far it is, how it ended.

Pure: times are passed in (unix seconds), nothing is sent or stored here. One sample goes

    WAITING -> ASSIGNED(instance, attempt) -> ENDED
       ^___________________|   instance lost, item refused, or handed over

    ASSIGNED(instance, attempt) -> ASSIGNED(another instance, next attempt)   moved with its KV

Each assignment is a new attempt; events of an earlier attempt are ignored, whoever sends them. A sample
that goes on elsewhere does so from the tokens that it has, less the last one: that one is sampled again
(with the same noise, so the same token), and so the instance itself sees whether it ended the sample,
which nobody else can know for the model's own end-of-sequence token. A LENIENT sample goes on so too, but
nothing more is taken over from its cached rollout: the token that is sampled again, and all after it, are
the policy's own.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from paceline.internal.v1 import generation_pb2
from paceline.v1 import sample_pb2

BatchKey = tuple[str, str]


class Phase(enum.Enum):
    """Where a sample is."""

    WAITING = "waiting"
    ASSIGNED = "assigned"
    ENDED = "ended"


class Verdict(enum.Enum):
    """What an event did to a sample."""

    # The event belongs to an earlier attempt, or the sample has ended: nothing happened.
    IGNORED = "ignored"
    # Back in the queue.
    WAITING = "waiting"
    ENDED = "ended"


@dataclass(slots=True)
class Span:
    """Response tokens [begin_token, end_token) came from this instance between these unix seconds."""

    instance_id: str
    begin_token: int
    end_token: int
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """The samples of one prompt. `prefix` are response tokens that the caller brought along."""

    prompt_id: str
    prompt_token_ids: Sequence[int]
    sampling: sample_pb2.SamplingParams
    expected_tokens: int = 0
    prefix: Sequence[int] = ()


@dataclass(slots=True)
class SampleState:
    """One sample. `index` numbers the samples of the batch, group by group."""

    index: int
    group: int
    slot: int
    seed: int
    phase: Phase = Phase.WAITING
    instance_id: str = ""
    attempt: int = 0
    # uint32 and float32, same length.
    tokens: array[int] = field(default_factory=lambda: array("I"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    # LENIENT: float32, of the first tokens, which were taken over from a cached rollout: their
    # log-probabilities under the current policy.
    verified: array[float] = field(default_factory=lambda: array("f"))
    spans: list[Span] = field(default_factory=list)
    resubmissions: int = 0
    # Attempts in a row that brought no token.
    fruitless: int = 0
    # Tokens that the journal has.
    journaled: int = 0
    # Set once the sample is being cancelled: whether its tokens are to be delivered.
    cancelled: bool = False
    keep_partial: bool = True
    first_step_at: float = 0.0
    decode_steps: int = 0
    verify_steps: int = 0
    # drafter -> [drafted, accepted]
    drafts: dict[str, list[int]] = field(default_factory=dict)
    # Of the attempt that kept most of a cached rollout: how long that was, and how much was kept of it.
    cached_tokens: int = 0
    reused_prefix: int = 0

    @property
    def reuse(self) -> tuple[int, int]:
        """Length of the cached rollout, and how many of the sample's first tokens are also its own. An
        attempt that was lost has told of the tokens only, so the length is then known from below."""
        reused = min(max(self.reused_prefix, len(self.verified)), len(self.tokens))
        return max(self.cached_tokens, reused), reused

    def forget_tokens(self) -> None:
        """Forgets all tokens."""
        del self.tokens[:], self.logprobs[:], self.verified[:]


@dataclass(frozen=True, slots=True)
class Ending:
    """How a sample ended."""

    index: int
    finish_reason: sample_pb2.FinishReason
    status: sample_pb2.SampleStatus
    at: float
    error: str = ""


_STATUS = {
    sample_pb2.FINISH_REASON_STOP: sample_pb2.SAMPLE_STATUS_COMPLETED,
    sample_pb2.FINISH_REASON_LENGTH: sample_pb2.SAMPLE_STATUS_TRUNCATED,
    sample_pb2.FINISH_REASON_ABORTED: sample_pb2.SAMPLE_STATUS_ABORTED,
}


@dataclass(slots=True)
class Batch:
    """The state of one batch. `max_attempts` fruitless attempts in a row make a sample FAILED."""

    key: BatchKey
    policy_version: int
    groups: list[GroupSpec]
    exactness: sample_pb2.Exactness
    samples: list[SampleState]
    accepted_at: float
    deadline_at: float
    max_attempts: int
    step: int = 0
    # The run under which instances look up and keep rollouts; empty: they do not.
    cached_run: str = ""
    # Samples that have ended, in order, until somebody takes them.
    endings: list[Ending] = field(default_factory=list)
    # Samples with tokens that the journal does not have.
    unjournaled: set[int] = field(default_factory=set)
    ended: int = 0

    def is_done(self) -> bool:
        """Whether every sample has ended."""
        return self.ended == len(self.samples)

    def remaining(self) -> list[SampleState]:
        """The samples that have not ended."""
        return [sample for sample in self.samples if sample.phase is not Phase.ENDED]

    def assign(self, index: int, instance_id: str, now: float) -> int:
        """Gives a waiting sample to an instance; returns the number of the attempt."""
        sample = self.samples[index]
        assert sample.phase is Phase.WAITING, f"sample {index} is {sample.phase}"
        sample.phase, sample.instance_id = Phase.ASSIGNED, instance_id
        sample.attempt += 1
        have = len(sample.tokens)
        sample.spans.append(Span(instance_id, have, have, now, now))
        return sample.attempt

    def extend(
        self,
        index: int,
        attempt: int,
        tokens: Iterable[int],
        logprobs: Iterable[float],
        now: float,
        verified: Sequence[float] = (),
    ) -> bool:
        """Appends tokens from the instance; False when the attempt is not the current one. `verified` are
        log-probabilities of the first of these tokens, taken over as all the sample's tokens before them;
        what cannot be that is left out."""
        sample = self.samples[index]
        if sample.phase is not Phase.ASSIGNED or sample.attempt != attempt:
            return False
        lenient = self.exactness.level == sample_pb2.EXACTNESS_LEVEL_LENIENT
        if verified and lenient and len(sample.verified) == len(sample.tokens):
            sample.verified.extend(verified)
        sample.tokens.extend(tokens)
        sample.logprobs.extend(logprobs)
        span = sample.spans[-1]
        span.end_token, span.end = len(sample.tokens), now
        sample.first_step_at = sample.first_step_at or now
        self.unjournaled.add(index)
        return True

    def finish(self, index: int, attempt: int, report: generation_pb2.Finished, now: float) -> Verdict:
        """Takes the instance's word that the sample ended. An end that nobody asked for and that is
        neither a stop nor a length is a hand-over: the sample waits for another instance."""
        sample = self.samples[index]
        if sample.phase is not Phase.ASSIGNED or sample.attempt != attempt:
            return Verdict.IGNORED
        self._count(sample, report)
        if sample.cancelled:
            return self.abort(index, now)
        if report.finish_reason not in (sample_pb2.FINISH_REASON_STOP, sample_pb2.FINISH_REASON_LENGTH):
            return self._release(sample, now, resubmission=True, blameless=bool(report.resume_on))
        sample.spans[-1].end = now
        self._end(sample, report.finish_reason, _STATUS[report.finish_reason], now)
        return Verdict.ENDED

    def lost(self, index: int, attempt: int, now: float) -> Verdict:
        """The instance is gone: the sample waits again, with the tokens that it has."""
        return self._leave(index, attempt, now, resubmission=True)

    def moved(
        self, index: int, attempt: int, instance_id: str, response_tokens: int, now: float
    ) -> int | None:
        """The sample runs on another instance now, which goes on after so many response tokens. The number of
        the new attempt; None when this is of an earlier attempt, or when tokens are missing here."""
        sample = self.samples[index]
        have = len(sample.tokens)
        if sample.phase is not Phase.ASSIGNED or sample.attempt != attempt:
            return None
        if len(self.groups[sample.group].prefix) + have != response_tokens:
            return None
        before = sample.spans[-1]
        sample.fruitless = 0 if before.end_token > before.begin_token else sample.fruitless
        before.end, sample.instance_id = now, instance_id
        sample.attempt += 1
        sample.spans.append(Span(instance_id, have, have, now, now))
        return sample.attempt

    def refused(self, index: int, attempt: int, now: float) -> Verdict:
        """The instance would not take the sample just now."""
        return self._leave(index, attempt, now, resubmission=False)

    def fail(self, index: int, error: str, now: float) -> Verdict:
        """Ends a sample as FAILED, with the tokens that it has."""
        sample = self.samples[index]
        if sample.phase is Phase.ENDED:
            return Verdict.IGNORED
        self._end(sample, sample_pb2.FINISH_REASON_UNSPECIFIED, sample_pb2.SAMPLE_STATUS_FAILED, now, error)
        return Verdict.ENDED

    def cancel(self, index: int, keep_partial: bool) -> Phase:
        """Marks a sample as cancelled; returns its phase before. A sample that was cancelled already, or
        has ended, counts as ENDED and is left as it was."""
        sample = self.samples[index]
        if sample.cancelled or sample.phase is Phase.ENDED:
            return Phase.ENDED
        sample.cancelled, sample.keep_partial = True, keep_partial
        return sample.phase

    def abort(self, index: int, now: float) -> Verdict:
        """Ends a sample as ABORTED, without its tokens when it was cancelled so."""
        sample = self.samples[index]
        if sample.phase is Phase.ENDED:
            return Verdict.IGNORED
        if not sample.keep_partial:
            sample.forget_tokens()
            sample.spans = []
        self._end(sample, sample_pb2.FINISH_REASON_ABORTED, sample_pb2.SAMPLE_STATUS_ABORTED, now)
        return Verdict.ENDED

    def restore(self, index: int, tokens: bytes, logprobs: bytes) -> None:
        """Puts back the tokens of a waiting sample from the journal (packed uint32 and float32)."""
        sample = self.samples[index]
        count = min(len(tokens), len(logprobs)) // 4
        sample.tokens.frombytes(tokens[: count * 4])
        sample.logprobs.frombytes(logprobs[: count * 4])
        if count:
            # Who generated them is not journaled: the span names nobody.
            sample.resubmissions += 1
            sample.spans.append(Span("", 0, count, self.accepted_at, self.accepted_at))
            sample.first_step_at = self.accepted_at
            self._drop_last(sample)
        sample.journaled = len(sample.tokens)

    def mark_ended(self, index: int) -> None:
        """Notes that the journal already has this sample."""
        sample = self.samples[index]
        assert sample.phase is Phase.WAITING, f"sample {index} is {sample.phase}"
        sample.phase = Phase.ENDED
        self.ended += 1

    def _leave(self, index: int, attempt: int, now: float, *, resubmission: bool) -> Verdict:
        sample = self.samples[index]
        if sample.phase is not Phase.ASSIGNED or sample.attempt != attempt:
            return Verdict.IGNORED
        if sample.cancelled:
            return self.abort(index, now)
        return self._release(sample, now, resubmission=resubmission)

    def _release(
        self, sample: SampleState, now: float, *, resubmission: bool, blameless: bool = False
    ) -> Verdict:
        """`blameless`: it was taken off its instance for the others' sake."""
        span = sample.spans[-1]
        gained = span.end_token - span.begin_token
        # One gained token is the one that will be sampled again: that is no progress.
        sample.fruitless = 0 if gained > 1 else sample.fruitless + (not blameless)
        sample.resubmissions += resubmission
        instance_id, sample.instance_id = sample.instance_id, ""
        sample.phase = Phase.WAITING
        if gained:
            self._drop_last(sample)
        if sample.fruitless < self.max_attempts:
            return Verdict.WAITING
        return self.fail(
            sample.index,
            f"{sample.fruitless} attempts in a row brought no token; the last was on {instance_id}",
            now,
        )

    def _drop_last(self, sample: SampleState) -> None:
        if sample.tokens:
            sample.tokens.pop()
            sample.logprobs.pop()
            sample.journaled = min(sample.journaled, len(sample.tokens))
        have = len(sample.tokens)
        del sample.verified[have:]
        sample.reused_prefix = min(sample.reused_prefix, have)
        sample.spans = [span for span in sample.spans if span.begin_token < have]
        for span in sample.spans:
            span.end_token = min(span.end_token, have)

    def _end(
        self,
        sample: SampleState,
        reason: sample_pb2.FinishReason,
        status: sample_pb2.SampleStatus,
        now: float,
        error: str = "",
    ) -> None:
        sample.phase = Phase.ENDED
        self.unjournaled.discard(sample.index)
        self.endings.append(Ending(sample.index, reason, status, now, error))
        self.ended += 1

    def _count(self, sample: SampleState, report: generation_pb2.Finished) -> None:
        if len(sample.spans) == 1:
            sample.first_step_at = sample.spans[0].begin + report.queue_seconds
        sample.decode_steps += report.decode_steps
        sample.verify_steps += report.verify_steps
        for source in report.draft_sources:
            counts = sample.drafts.setdefault(source.drafter, [0, 0])
            counts[0] += source.drafted
            counts[1] += source.accepted
        # Each attempt tells of the whole response so far, not of its own part: the counts do not add up.
        if (report.reused_prefix, report.cached_tokens) > (sample.reused_prefix, sample.cached_tokens):
            sample.reused_prefix, sample.cached_tokens = report.reused_prefix, report.cached_tokens
