"""State machine of a batch: the instance of each sample, its progress, and its end. Pure.

Times are passed in (unix seconds); nothing is sent or stored here. The phases of a sample are

    WAITING -> ASSIGNED(instance, attempt) -> ENDED
       ^___________________|   instance lost, item refused, or handed over

    ASSIGNED(instance, attempt) -> ASSIGNED(another instance, next attempt)   moved with its KV
    ASSIGNED(instance, attempt) -> CALLING -> WAITING or ENDED                a tool call, and its answer

Each assignment is a new attempt; events of an earlier attempt are ignored, whoever sends them. A sample continues
elsewhere from its tokens without the last one. That token is sampled again, with the same noise, so it is the same.
This lets the instance itself see whether the token ended the sample: only the instance knows the model's
end-of-sequence token. Instances report in checkpoints: tokens that a lost instance had not reported are generated
again, and for EXACT samples are the same. A LENIENT sample continues in the same way, but takes nothing more from
its cached rollout: the token that is sampled again, and all later tokens, are the policy's own. Tokens before a
tool call, and tokens of the environment, are not sampled again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

from google.rpc import code_pb2

from paceline.columns import TokenBuffer, VersionRun
from paceline.internal.v1 import generation_pb2
from paceline.v1 import rollout_pb2, sample_pb2
from services.contracts.gateway_keys import BatchKey
from services.gateway.state.calls import CallRules
from services.gateway.state.sample import (
    BatchGroup,
    EventEffect,
    GatewaySample,
    GenerationSpan,
    SampleEnding,
    SamplePhase,
)

_STATUS = {
    sample_pb2.FINISH_REASON_STOP: sample_pb2.SAMPLE_STATUS_COMPLETED,
    sample_pb2.FINISH_REASON_LENGTH: sample_pb2.SAMPLE_STATUS_TRUNCATED,
    sample_pb2.FINISH_REASON_ABORTED: sample_pb2.SAMPLE_STATUS_ABORTED,
    sample_pb2.FINISH_REASON_ABANDONED: sample_pb2.SAMPLE_STATUS_ABORTED,
}


@dataclass(frozen=True, slots=True)
class Account:
    """Account of a caller with a quota: the name of its access token, and the longest sequence of the model."""

    name: str
    model_len: int

    def to_text(self) -> str:
        """Return the account for the journal, so that a successor counts its samples."""
        return f"{self.model_len}:{self.name}"

    @classmethod
    def from_text(cls, stored: str) -> Self | None:
        """Parse the result of `to_text`; None for an empty text (no account)."""
        length, _, name = stored.partition(":")
        return cls(name, int(length)) if name else None

    def most_tokens(self, prompt_tokens: int, sampling: sample_pb2.SamplingParams) -> int:
        """Return the most tokens that a sample may have, prompt and response."""
        if not sampling.HasField("max_tokens"):
            return self.model_len
        return min(self.model_len, prompt_tokens + sampling.max_tokens)

    def tokens_of(self, groups: Iterable[rollout_pb2.Group], sampling: sample_pb2.SamplingParams) -> int:
        """Return the most tokens that groups may have; `sampling` applies to groups without parameters."""
        return sum(
            group.samples
            * self.most_tokens(
                len(group.prompt_token_ids), group.sampling if group.HasField("sampling") else sampling
            )
            for group in groups
        )


@dataclass(slots=True)
class RolloutBatch:
    """State of one batch, and the events that change it.

    `max_attempts` fruitless attempts in a row make a sample FAILED. `policy_version` is the requested version,
    `current_version` the version under which unfinished samples continue: a later one after a weight update that
    lets samples continue. With `max_staleness` every update does; samples whose first token is of an older version
    than that allows restart if the batch `regenerates`, and end otherwise.
    """

    key: BatchKey
    policy_version: int
    groups: list[BatchGroup]
    exactness: sample_pb2.Exactness
    samples: list[GatewaySample]
    accepted_at: float
    deadline_at: float
    max_attempts: int
    step: int = 0
    # The run under which instances look up and cache rollouts; empty: they do not.
    cached_run: str = ""
    # The batch id under which rewards of its samples are reported; empty: its own.
    rewarded_as: str = ""
    # Batches of higher priority are placed first; within one, runs share by weight.
    priority: int = 0
    weight: int = 1
    # Tokens of the samples that have not ended, including the top tokens of each position.
    held_tokens: int = 0
    # Samples that have ended, in order, until the journal takes them, and their tokens.
    endings: list[SampleEnding] = field(default_factory=list)
    ended_tokens: int = 0
    # Samples with tokens that the journal does not have.
    unjournaled: set[int] = field(default_factory=set)
    ended: int = 0
    # Its version is no longer served, and its samples may not continue under a later one.
    superseded: bool = False
    # Groups may be added.
    open: bool = False
    max_staleness: int | None = None
    regenerates: bool = False
    # Set if its samples may call tools.
    tools: CallRules | None = None
    # Account of its samples, if any, and the most tokens that the unfinished ones may have.
    account: Account | None = None
    most_tokens: int = 0
    current_version: int = field(init=False)

    def __post_init__(self) -> None:
        self.current_version = self.policy_version

    @property
    def unfinished(self) -> int:
        """Number of samples that have not ended."""
        return len(self.samples) - self.ended

    def is_done(self) -> bool:
        """Return True if every sample has ended."""
        return self.ended == len(self.samples)

    def group_of(self, index: int) -> BatchGroup:
        """Return the group of a sample."""
        return self.groups[self.samples[index].group]

    def is_stale(self, index: int) -> bool:
        """Return True if an unfinished sample has tokens of a version that is too old."""
        sample = self.samples[index]
        if self.max_staleness is None or not sample.columns.versions or sample.phase is SamplePhase.ENDED:
            return False
        return sample.columns.versions[0][1] < self.current_version - self.max_staleness

    def end_sample(
        self,
        sample: GatewaySample,
        reason: sample_pb2.FinishReason,
        status: sample_pb2.SampleStatus,
        now: float,
        failure: sample_pb2.SampleFailure | None = None,
        stop_string: str = "",
    ) -> EventEffect:
        """End a sample with its current tokens, for this reason."""
        sample.phase = SamplePhase.ENDED
        self.unjournaled.discard(sample.index)
        self.endings.append(SampleEnding(sample.index, reason, status, now, failure, stop_string))
        self.held_tokens -= sample.entries
        self.ended_tokens += sample.entries
        self.ended += 1
        self.most_tokens -= self.groups[sample.group].most_tokens
        return EventEffect.ENDED

    def restore(self, index: int, journaled: sample_pb2.Sample, chunks: int) -> None:
        """Restore the tokens of a waiting sample from its chunks in the journal."""
        sample, count = self.samples[index], len(journaled.tokens.token_ids)
        sample.columns.extend(journaled.tokens, journaled.tokens.versions)
        sample.calls.extend(journaled.calls)
        sample.environment.extend((span.begin, span.end) for span in journaled.environment_spans)
        if sample.calls and sample.calls[-1] == count:
            sample.phase = SamplePhase.CALLING
        self.held_tokens += sample.entries
        sample.journaled, sample.chunks = count, chunks
        sample.resubmissions += 1
        # The journal does not know the instance, so the span names none.
        sample.spans.append(GenerationSpan("", 0, count, self.accepted_at, self.accepted_at))
        sample.first_step_at = self.accepted_at

    def mark_ended(self, index: int) -> None:
        """Record that the journal already has this sample."""
        sample = self.samples[index]
        assert sample.phase is SamplePhase.WAITING, f"sample {index} is {sample.phase}"
        sample.phase = SamplePhase.ENDED
        self.ended += 1
        self.most_tokens -= self.groups[sample.group].most_tokens

    def reopen(self, index: int) -> None:
        """Let an ended sample wait again, without tokens."""
        old = self.samples[index]
        assert old.phase is SamplePhase.ENDED, f"sample {index} is {old.phase}"
        self.samples[index] = old.restarted()
        self.ended -= 1
        self.most_tokens += self.groups[old.group].most_tokens

    def assign(self, index: int, instance_id: str, now: float) -> int:
        """Assign a waiting sample to an instance; return the number of the attempt."""
        sample = self.samples[index]
        assert sample.phase is SamplePhase.WAITING, f"sample {index} is {sample.phase}"
        sample.begun_at = 0.0 if sample.tokens else now
        return sample.begin_attempt(instance_id, now)

    def extend(
        self,
        index: int,
        attempt: int,
        tokens: sample_pb2.TokenColumns,
        now: float,
        verified: Sequence[float] = (),
    ) -> bool:
        """Append tokens from the instance; return False if the attempt is not the current one.

        Without versions they are of the batch's current version. `verified` are the log-probabilities of the first
        of these tokens, if they were taken from a cached rollout. They are ignored unless all earlier tokens of the
        sample were as well, and the level is LENIENT.
        """
        sample = self.samples[index]
        if not sample.is_running(attempt):
            return False
        lenient = self.exactness.level == sample_pb2.EXACTNESS_LEVEL_LENIENT
        if verified and lenient and len(sample.verified) == len(sample.tokens):
            sample.verified.extend(verified)
        before = sample.entries
        own = tokens.versions or (VersionRun(len(tokens.token_ids), self.current_version),)
        sample.columns.extend(tokens, own if tokens.token_ids else ())
        self.held_tokens += sample.entries - before
        span = sample.spans[-1]
        span.end_token, span.end = len(sample.tokens), now
        sample.first_step_at = sample.first_step_at or now
        self.unjournaled.add(index)
        return True

    def set_prompt_logprobs(self, index: int, attempt: int, reported: sample_pb2.TokenColumns) -> None:
        """Record the log-probabilities of a sample's prompt, if the attempt is the current one."""
        sample = self.samples[index]
        if sample.is_running(attempt) and sample.prompt_logprobs is None:
            before, sample.prompt_logprobs = sample.entries, reported
            self.held_tokens += sample.entries - before

    def finish(self, index: int, attempt: int, report: generation_pb2.Finished, now: float) -> EventEffect:
        """Record the end that the instance reports: a hand-over unless it is a stop, a length, or requested."""
        sample = self.samples[index]
        if not sample.is_running(attempt):
            return EventEffect.IGNORED
        sample.count(report)
        if sample.cancelled:
            return self.abort(index, now)
        if self.is_stale(index):
            # Its first tokens arrived after the update, or it continued through the update.
            return self.renew(index) if self.regenerates else self.abort(index, now)
        if report.finish_reason not in (sample_pb2.FINISH_REASON_STOP, sample_pb2.FINISH_REASON_LENGTH):
            return self._release(sample, now, resubmission=True, blameless=bool(report.resume_on))
        sample.spans[-1].end = now
        reason, tools = report.finish_reason, self.tools
        stopped = reason == sample_pb2.FINISH_REASON_STOP and len(sample.tokens) > 0
        if tools is not None and stopped and tools.is_call(sample.tokens[-1], report.stop_string):
            if len(sample.calls) < tools.most:
                sample.phase = SamplePhase.CALLING
                sample.calls.append(len(sample.tokens))
                self.unjournaled.add(index)
                return EventEffect.CALLING
            reason = sample_pb2.FINISH_REASON_LENGTH
        return self.end_sample(sample, reason, _STATUS[reason], now, None, report.stop_string)

    def answer(self, index: int, tokens: Sequence[int]) -> None:
        """Append the tokens of the environment to a calling sample, which then waits for an instance."""
        sample, before = self.samples[index], self.samples[index].entries
        assert sample.phase is SamplePhase.CALLING, f"sample {index} is {sample.phase}"
        begin = len(sample.tokens)
        # In runs of versions they count with the tokens before them.
        sample.columns.extend(TokenBuffer.given(tokens, self.group_of(index).sampling.top_logprobs))
        sample.environment.append((begin, len(sample.tokens)))
        self.held_tokens += sample.entries - before
        sample.phase, sample.fruitless = SamplePhase.WAITING, 0
        self.unjournaled.add(index)

    def end_call(self, index: int, reason: sample_pb2.FinishReason, now: float) -> EventEffect:
        """End a calling sample with its current tokens."""
        sample = self.samples[index]
        assert sample.phase is SamplePhase.CALLING, f"sample {index} is {sample.phase}"
        return self.end_sample(sample, reason, _STATUS[reason], now)

    def lost(self, index: int, attempt: int, now: float) -> EventEffect:
        """Record that the instance was lost: the sample waits again, with its tokens."""
        return self._leave(index, attempt, now, resubmission=True)

    def refused(self, index: int, attempt: int, now: float, reason: str = "") -> EventEffect:
        """Record that the instance refused the sample for now, and the reason."""
        return self._leave(index, attempt, now, resubmission=False, reason=reason)

    def moved(
        self, index: int, attempt: int, instance_id: str, response_tokens: int, now: float
    ) -> int | None:
        """Record that another instance continues the sample after `response_tokens` tokens.

        Returns the number of the new attempt; None if the event is of an earlier attempt, or tokens are missing
        here.
        """
        sample = self.samples[index]
        if not sample.is_running(attempt):
            return None
        if len(self.group_of(index).prefix) + len(sample.tokens) != response_tokens:
            return None
        before = sample.spans[-1]
        sample.fruitless = 0 if before.end_token > before.begin_token else sample.fruitless
        before.end = now
        sample.migrations += 1
        return sample.begin_attempt(instance_id, now)

    def fail(self, index: int, failure: sample_pb2.SampleFailure, now: float) -> EventEffect:
        """End a sample as FAILED, with its current tokens."""
        sample = self.samples[index]
        if sample.phase is SamplePhase.ENDED:
            return EventEffect.IGNORED
        reason, status = sample_pb2.FINISH_REASON_UNSPECIFIED, sample_pb2.SAMPLE_STATUS_FAILED
        return self.end_sample(sample, reason, status, now, failure)

    def cancel(self, index: int, keep_partial: bool) -> SamplePhase:
        """Mark a sample as cancelled; return its previous phase.

        Returns ENDED, and changes nothing, if the sample was cancelled already or has ended.
        """
        sample = self.samples[index]
        if sample.cancelled or sample.phase is SamplePhase.ENDED:
            return SamplePhase.ENDED
        sample.cancelled, sample.keep_partial = True, keep_partial
        return sample.phase

    def abort(self, index: int, now: float) -> EventEffect:
        """End a sample as ABORTED, without its tokens if it was cancelled without `keep_partial`."""
        sample = self.samples[index]
        if sample.phase is SamplePhase.ENDED:
            return EventEffect.IGNORED
        if not sample.keep_partial:
            self.held_tokens -= sample.entries
            sample.forget_tokens()
            sample.spans = []
        reason = sample_pb2.FINISH_REASON_ABORTED
        return self.end_sample(sample, reason, _STATUS[reason], now)

    def renew(self, index: int) -> EventEffect:
        """Let an unfinished sample wait again without its tokens; later messages of its instance are ignored."""
        old = self.samples[index]
        self.held_tokens -= old.entries
        self.unjournaled.discard(index)
        self.samples[index] = old.restarted()
        return EventEffect.WAITING

    def resume_refused(
        self, index: int, attempt: int, failure: sample_pb2.SampleFailure, now: float, *, renews: bool
    ) -> EventEffect:
        """Record that the instance's model cannot continue from the sample's tokens.

        The sample restarts if it `renews`, unless tokens came from its caller or from an environment, or after
        `max_attempts` resubmissions; otherwise it ends as FAILED.
        """
        sample = self.samples[index]
        if not sample.is_running(attempt):
            return EventEffect.IGNORED
        if sample.cancelled:
            return self.abort(index, now)
        given = self.group_of(index).prefix or sample.calls
        if not renews or given or sample.resubmissions >= self.max_attempts:
            return self.fail(index, failure, now)
        return self.renew(index)

    def _leave(
        self, index: int, attempt: int, now: float, *, resubmission: bool, reason: str = ""
    ) -> EventEffect:
        sample = self.samples[index]
        if not sample.is_running(attempt):
            return EventEffect.IGNORED
        if sample.cancelled:
            return self.abort(index, now)
        return self._release(sample, now, resubmission=resubmission, reason=reason)

    def _release(
        self,
        sample: GatewaySample,
        now: float,
        *,
        resubmission: bool,
        blameless: bool = False,
        reason: str = "",
    ) -> EventEffect:
        """Let a sample wait again. `blameless`: its instance gave it up in favour of others.

        `reason` is the instance's reason to refuse it; empty: the instance was lost.
        """
        span = sample.spans[-1]
        gained = span.end_token - span.begin_token
        # A single gained token will be sampled again, so it is no progress.
        sample.fruitless = 0 if gained > 1 else sample.fruitless + (not blameless)
        sample.resubmissions += resubmission
        instance_id, sample.instance_id = sample.instance_id, ""
        sample.phase = SamplePhase.WAITING
        if gained:
            self.held_tokens -= sample.entries
            sample.drop_last_token()
            self.held_tokens += sample.entries
        if sample.fruitless < self.max_attempts:
            return EventEffect.WAITING
        last = f"{instance_id}: {reason}" if reason else instance_id
        text = f"{sample.fruitless} attempts in a row brought no token; the last was on {last}"
        failure = sample_pb2.SampleFailure(code=code_pb2.UNAVAILABLE, reason=text)
        return self.fail(sample.index, failure, now)
