"""State of a batch: its terms, its samples, counts over them, and what the journal restores of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.v1 import sample_pb2
from services.contracts.gateway_keys import BatchKey
from services.gateway.batches.account import Account
from services.gateway.batches.calls import CallRules
from services.gateway.batches.group import BatchGroup
from services.gateway.batches.sample import (
    EventEffect,
    GatewaySample,
    GenerationSpan,
    Likeliest,
    SampleEnding,
    SamplePhase,
)


@dataclass(slots=True)
class BatchState:
    """State of one batch. `max_attempts` fruitless attempts in a row make a sample FAILED.

    `policy_version` is the one that was asked for, `current_version` the one under which unfinished samples go on:
    a later one after a weight update that lets samples continue. With `max_staleness`, that is every update, and
    samples whose first token is of a version further behind begin anew where the batch `regenerates`, else end.
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
    # The run under which instances look up and keep rollouts; empty: they do not.
    cached_run: str = ""
    # The batch id under which rewards of its samples come; empty: its own.
    rewarded_as: str = ""
    # Batches of higher priority are placed first; within one, runs share by weight.
    priority: int = 0
    weight: int = 1
    # Tokens of the samples that have not ended, the likeliest ones of each position included.
    held_tokens: int = 0
    # Samples that have ended, in order, until the journal takes them, and their tokens.
    endings: list[SampleEnding] = field(default_factory=list)
    ended_tokens: int = 0
    # Samples with tokens that the journal does not have.
    unjournaled: set[int] = field(default_factory=set)
    ended: int = 0
    # Its version is served no more, and its samples do not go on under a later one.
    superseded: bool = False
    # Groups may be added.
    open: bool = False
    max_staleness: int | None = None
    regenerates: bool = False
    # Where its samples call tools.
    tools: CallRules | None = None
    # On whose name they are in work, if a token's, and the most tokens that the unfinished ones may come to.
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

    def group_indexes(self, index: int) -> range:
        """Return the indexes of all samples in the group of a sample."""
        group = self.group_of(index)
        return range(group.first, group.first + group.count)

    def is_stale(self, index: int) -> bool:
        """Return True if an unfinished sample has tokens of a version that is too old."""
        sample = self.samples[index]
        if self.max_staleness is None or not sample.versions or sample.phase is SamplePhase.ENDED:
            return False
        return sample.versions[0][1] < self.current_version - self.max_staleness

    def end_sample(
        self,
        sample: GatewaySample,
        reason: sample_pb2.FinishReason,
        status: sample_pb2.SampleStatus,
        now: float,
        failure: sample_pb2.SampleFailure | None = None,
        stop_string: str = "",
    ) -> EventEffect:
        """End a sample as it is, for this reason; it counts as ended from now on."""
        sample.phase = SamplePhase.ENDED
        self.unjournaled.discard(sample.index)
        self.endings.append(SampleEnding(sample.index, reason, status, now, failure, stop_string))
        self.held_tokens -= sample.entries
        self.ended_tokens += sample.entries
        self.ended += 1
        self.most_tokens -= self.groups[sample.group].most_tokens
        return EventEffect.ENDED

    def restore(self, index: int, journaled: sample_pb2.Sample, chunks: int) -> None:
        """Restore the tokens of a waiting sample from its chunks in the journal: all that are not sampled again."""
        sample, count = self.samples[index], len(journaled.token_ids)
        for span in journaled.version_spans:
            sample.stamp(span.begin, span.policy_version)
        top = Likeliest(journaled.top_token_ids, journaled.top_logprobs)
        sample.append(journaled.token_ids, journaled.logprobs, sample.versions[-1][1], top)
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
        """Let a sample that has ended wait again, as if it had no token yet."""
        old = self.samples[index]
        assert old.phase is SamplePhase.ENDED, f"sample {index} is {old.phase}"
        self.samples[index] = old.afresh()
        self.ended -= 1
        self.most_tokens += self.groups[old.group].most_tokens
