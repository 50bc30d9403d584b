"""State machine of a batch: the instance of each sample, its progress, and its end.

Pure: times are passed in (unix seconds), nothing is sent or stored here. One sample goes

    WAITING -> ASSIGNED(instance, attempt) -> ENDED
       ^___________________|   instance lost, item refused, or handed over

    ASSIGNED(instance, attempt) -> ASSIGNED(another instance, next attempt)   moved with its KV
    ASSIGNED(instance, attempt) -> CALLING -> WAITING or ENDED                a tool call, and its answer

Each assignment is a new attempt; events of an earlier attempt are ignored, whoever sends them. A sample
that continues elsewhere does so from the tokens that it has, less the last one: that one is sampled again
(with the same noise, so the same token), so that the instance itself sees whether it ended the sample,
which nobody else can know for the model's own end-of-sequence token. Instances report in checkpoints: what a
lost one had not reported is generated again, and for EXACT samples is the same. A LENIENT sample continues
likewise, but nothing more is taken from its cached rollout: the token that is sampled again, and all after it,
are the policy's own. What a sample has when it calls, and what its environment gives, is not sampled again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from google.rpc import code_pb2

from paceline.internal.v1 import generation_pb2
from paceline.v1 import sample_pb2
from services.gateway.batches.batch_state import BatchState
from services.gateway.batches.calls import environment_likeliest
from services.gateway.batches.sample import EventEffect, GatewaySample, Likeliest, SamplePhase

_STATUS = {
    sample_pb2.FINISH_REASON_STOP: sample_pb2.SAMPLE_STATUS_COMPLETED,
    sample_pb2.FINISH_REASON_LENGTH: sample_pb2.SAMPLE_STATUS_TRUNCATED,
    sample_pb2.FINISH_REASON_ABORTED: sample_pb2.SAMPLE_STATUS_ABORTED,
    sample_pb2.FINISH_REASON_ABANDONED: sample_pb2.SAMPLE_STATUS_ABORTED,
}


@dataclass(slots=True)
class RolloutBatch(BatchState):
    """State of one batch, and the events that change it."""

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
        tokens: Sequence[int],
        logprobs: Sequence[float],
        now: float,
        verified: Sequence[float] = (),
        version: int | None = None,
        top: Likeliest | None = None,
    ) -> bool:
        """Append tokens from the instance; return False if the attempt is not the current one.

        `version` is the one that sampled them, by the instance's report; None: the batch's current one.
        `verified` are log-probabilities of the first of these tokens, which were taken from a cached rollout
        like all the sample's tokens before them; they are left out where that cannot be.
        """
        sample = self.samples[index]
        if not sample.is_running(attempt):
            return False
        lenient = self.exactness.level == sample_pb2.EXACTNESS_LEVEL_LENIENT
        if verified and lenient and len(sample.verified) == len(sample.tokens):
            sample.verified.extend(verified)
        before = sample.entries
        sample.append(tokens, logprobs, self.current_version if version is None else version, top)
        self.held_tokens += sample.entries - before
        span = sample.spans[-1]
        span.end_token, span.end = len(sample.tokens), now
        sample.first_step_at = sample.first_step_at or now
        self.unjournaled.add(index)
        return True

    def tell_prompt(self, index: int, attempt: int, told: sample_pb2.PromptLogprobs) -> None:
        """Record the log-probabilities of a sample's prompt, if the attempt is the current one."""
        sample = self.samples[index]
        if sample.is_running(attempt) and sample.prompt_logprobs is None:
            before, sample.prompt_logprobs = sample.entries, told
            self.held_tokens += sample.entries - before

    def finish(self, index: int, attempt: int, report: generation_pb2.Finished, now: float) -> EventEffect:
        """Record the end that the instance reports: a hand-over if it is no stop, no length and not asked for."""
        sample = self.samples[index]
        if not sample.is_running(attempt):
            return EventEffect.IGNORED
        sample.count(report)
        if sample.cancelled:
            return self.abort(index, now)
        if self.is_stale(index):
            # Its first tokens came after the update, or it was let go on.
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
        """Append what the environment gives to a calling sample, which waits for an instance then."""
        sample, before = self.samples[index], self.samples[index].entries
        assert sample.phase is SamplePhase.CALLING, f"sample {index} is {sample.phase}"
        begin, each = len(sample.tokens), self.group_of(index).sampling.top_logprobs
        top = Likeliest(*environment_likeliest(tokens, each))
        # It was given rather than sampled: its log-probability is 0.
        sample.append(tokens, [0.0] * len(tokens), sample.versions[-1][1], top)
        sample.environment.append((begin, len(sample.tokens)))
        self.held_tokens += sample.entries - before
        sample.phase, sample.fruitless = SamplePhase.WAITING, 0
        self.unjournaled.add(index)

    def end_call(self, index: int, reason: sample_pb2.FinishReason, now: float) -> EventEffect:
        """End a calling sample as it is."""
        sample = self.samples[index]
        assert sample.phase is SamplePhase.CALLING, f"sample {index} is {sample.phase}"
        return self.end_sample(sample, reason, _STATUS[reason], now)

    def lost(self, index: int, attempt: int, now: float) -> EventEffect:
        """Record that the instance was lost: the sample waits again, with the tokens that it has."""
        return self._leave(index, attempt, now, resubmission=True)

    def refused(self, index: int, attempt: int, now: float, reason: str = "") -> EventEffect:
        """Record that the instance would not take the sample just now, and why."""
        return self._leave(index, attempt, now, resubmission=False, reason=reason)

    def moved(
        self, index: int, attempt: int, instance_id: str, response_tokens: int, now: float
    ) -> int | None:
        """Record that another instance continues the sample after so many response tokens.

        Returns the number of the new attempt; None if the event is of an earlier attempt, or tokens are
        missing here.
        """
        sample = self.samples[index]
        if not sample.is_running(attempt):
            return None
        if len(self.group_of(index).prefix) + len(sample.tokens) != response_tokens:
            return None
        before = sample.spans[-1]
        sample.fruitless = 0 if before.end_token > before.begin_token else sample.fruitless
        before.end = now
        return sample.begin_attempt(instance_id, now)

    def fail(self, index: int, failure: sample_pb2.SampleFailure, now: float) -> EventEffect:
        """End a sample as FAILED, with the tokens that it has."""
        sample = self.samples[index]
        if sample.phase is SamplePhase.ENDED:
            return EventEffect.IGNORED
        reason, status = sample_pb2.FINISH_REASON_UNSPECIFIED, sample_pb2.SAMPLE_STATUS_FAILED
        return self.end_sample(sample, reason, status, now, failure)

    def cancel(self, index: int, keep_partial: bool) -> SamplePhase:
        """Mark a sample as cancelled; return its phase before.

        A sample that was cancelled already, or has ended, counts as ENDED and is left as it was.
        """
        sample = self.samples[index]
        if sample.cancelled or sample.phase is SamplePhase.ENDED:
            return SamplePhase.ENDED
        sample.cancelled, sample.keep_partial = True, keep_partial
        return sample.phase

    def abort(self, index: int, now: float) -> EventEffect:
        """End a sample as ABORTED, without its tokens if it was cancelled so."""
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
        """Let an unfinished sample wait again without its tokens; what its instance still sends is ignored."""
        old = self.samples[index]
        self.held_tokens -= old.entries
        self.unjournaled.discard(index)
        self.samples[index] = old.afresh()
        return EventEffect.WAITING

    def not_resumed(
        self, index: int, attempt: int, failure: sample_pb2.SampleFailure, now: float, *, renews: bool
    ) -> EventEffect:
        """Record that the instance's model does not go on from the sample's tokens.

        It begins again if it `renews` and can: it ends as FAILED where tokens came from its caller or from an
        environment, and after `max_attempts` losses.
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
        """Let a sample wait again. `blameless`: it was taken off its instance for the others' sake.

        `reason` is why its instance would not have it; empty: it was lost.
        """
        span = sample.spans[-1]
        gained = span.end_token - span.begin_token
        # One gained token is the one that will be sampled again: that is no progress.
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
        told = f"{sample.fruitless} attempts in a row brought no token; the last was on {last}"
        failure = sample_pb2.SampleFailure(code=code_pb2.UNAVAILABLE, reason=told)
        return self.fail(sample.index, failure, now)
