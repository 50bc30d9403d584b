"""State of one sample in the gateway, and the group of samples that share its prompt. Pure.

A sample has four representations in the product: `paceline.types.Sample` in the SDK, `GatewaySample` here, the
running sample of an instance, and the engine's request. Other modules of the gateway refer to a sample by its batch
and index.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.columns import TokenBuffer, entries_of
from paceline.internal.v1 import generation_pb2
from paceline.times import seconds_of
from paceline.v1 import sample_pb2


@dataclass(frozen=True, slots=True)
class BatchGroup:
    """Samples of one prompt: `count` of them, from index `first`.

    `prefix` are response tokens from the caller, with their log-probabilities if known. `most_tokens` is the most
    tokens that a sample may have, if its batch has an account.
    """

    prompt_id: str
    prompt_token_ids: Sequence[int]
    sampling: sample_pb2.SamplingParams
    expected_tokens: int = 0
    prefix: Sequence[int] = ()
    prefix_logprobs: Sequence[float] = ()
    first: int = 0
    count: int = 1
    most_tokens: int = 0


class SamplePhase(enum.Enum):
    """Phase of a sample."""

    WAITING = "waiting"
    ASSIGNED = "assigned"
    # It has called a tool, and waits for tokens from its environment.
    CALLING = "calling"
    ENDED = "ended"


class EventEffect(enum.Enum):
    """Effect of an event on a sample."""

    # The event belongs to an earlier attempt, or the sample has ended: nothing happened.
    IGNORED = "ignored"
    # Back in the queue.
    WAITING = "waiting"
    CALLING = "calling"
    ENDED = "ended"


@dataclass(slots=True)
class GenerationSpan:
    """Response tokens [begin_token, end_token) and the instance that generated them, with unix seconds.

    It had the KV of the first `cached_context` of the previous tokens, which include the prompt.
    """

    instance_id: str
    begin_token: int
    end_token: int
    begin: float
    end: float
    cached_context: int = 0


@dataclass(frozen=True, slots=True)
class SampleEnding:
    """End of the sample with this index, at this time in unix seconds."""

    index: int
    finish_reason: sample_pb2.FinishReason
    status: sample_pb2.SampleStatus
    at: float
    failure: sample_pb2.SampleFailure | None = None
    stop_string: str = ""

    @property
    def error(self) -> str:
        """The failure as one text; empty: it did not fail."""
        failure = self.failure
        return "" if failure is None else f"{failure.field}: {failure.reason}".removeprefix(": ")

    @property
    def is_whole(self) -> bool:
        """Return True if the sample was completed or truncated, that is neither aborted nor failed."""
        return self.status in (sample_pb2.SAMPLE_STATUS_COMPLETED, sample_pb2.SAMPLE_STATUS_TRUNCATED)


@dataclass(slots=True)
class GatewaySample:
    """State of one sample. `index` numbers the samples of the batch, group by group."""

    index: int
    group: int
    slot: int
    seed: int
    phase: SamplePhase = SamplePhase.WAITING
    instance_id: str = ""
    # Number of the current or last attempt, from 1.
    attempt: int = 0
    columns: TokenBuffer = field(default_factory=TokenBuffer)
    # LENIENT: float32, log-probabilities under the current policy of the first tokens, which were taken from a
    # cached rollout.
    verified: array[float] = field(default_factory=lambda: array("f"))
    # Log-probabilities of the prompt, if requested and reported.
    prompt_logprobs: sample_pb2.TokenColumns | None = None
    spans: list[GenerationSpan] = field(default_factory=list)
    # Lengths of the response at which it called a tool, and [begin, end) of the tokens of its environment.
    calls: list[int] = field(default_factory=list)
    environment: list[tuple[int, int]] = field(default_factory=list)
    resubmissions: int = 0
    # Moves to another instance with its KV.
    migrations: int = 0
    # Attempts in a row that brought no token.
    fruitless: int = 0
    # Number of tokens that the journal has, and of their chunks.
    journaled: int = 0
    chunks: int = 0
    # True once the sample is being cancelled, and True if its tokens are to be delivered then.
    cancelled: bool = False
    keep_partial: bool = True
    # Time at which the sample was last placed, if it had no tokens; 0 if it resumed with a prefix.
    begun_at: float = 0.0
    # Time of the first engine step; the time of the first report until the instance reports the sample's wait.
    first_step_at: float = 0.0
    decode_steps: int = 0
    verify_steps: int = 0
    # Seconds in engines according to the instances, and the part in steps of each kind (as in pb.Finished).
    generation_seconds: float = 0.0
    prefill_seconds: float = 0.0
    verify_seconds: float = 0.0
    plain_seconds: float = 0.0
    # drafter -> [drafted, accepted]
    drafts: dict[str, list[int]] = field(default_factory=dict)
    # Length of the cached rollout, and number of tokens kept of it, in the attempt that kept most.
    cached_tokens: int = 0
    reused_prefix: int = 0

    def restarted(self) -> GatewaySample:
        """Return the sample waiting again without tokens, with the number of its attempts kept."""
        fresh = GatewaySample(self.index, self.group, self.slot, self.seed, attempt=self.attempt)
        fresh.cancelled, fresh.keep_partial = self.cancelled, self.keep_partial
        fresh.resubmissions, fresh.migrations = self.resubmissions + 1, self.migrations
        return fresh

    def is_running(self, attempt: int) -> bool:
        """Return True if this attempt is current and on an instance, so that its events count."""
        return self.phase is SamplePhase.ASSIGNED and self.attempt == attempt

    def begin_attempt(self, instance_id: str, now: float) -> int:
        """Begin an attempt on an instance and return its number."""
        self.phase, self.instance_id = SamplePhase.ASSIGNED, instance_id
        self.attempt += 1
        have = len(self.tokens)
        self.spans.append(GenerationSpan(instance_id, have, have, now, now))
        return self.attempt

    @property
    def tokens(self) -> array[int]:
        """The response tokens, uint32."""
        return self.columns.token_ids

    @property
    def entries(self) -> int:
        """Number of tokens in memory, including the top tokens of each position and the entries of the prompt."""
        reported = self.prompt_logprobs
        return entries_of(self.columns) + (0 if reported is None else entries_of(reported))

    @property
    def ends_with_environment(self) -> bool:
        """True if the last token is of the sample's environment."""
        return bool(self.environment) and self.environment[-1][1] == len(self.tokens)

    @property
    def settled(self) -> int:
        """Number of tokens, from the first on, that no later attempt samples again."""
        have = len(self.tokens)
        return have if self.phase is SamplePhase.CALLING or self.ends_with_environment else max(0, have - 1)

    def turns(self, begin: int = 0, end: int | None = None) -> bytes:
        """Return the calls and the environment spans in the tokens [begin, end), as fields of a Sample."""
        if not self.calls:
            return b""
        last = len(self.tokens) if end is None else end
        given = [
            sample_pb2.EnvironmentSpan(begin=first, end=behind)
            for first, behind in self.environment
            if begin <= first and behind <= last
        ]
        calls = [length for length in self.calls if begin < length <= last]
        return sample_pb2.Sample(environment_spans=given, calls=calls).SerializeToString()

    @property
    def reuse(self) -> tuple[int, int]:
        """Length of the cached rollout, and the number of the sample's first tokens that equal it.

        The length is a lower bound after a lost attempt, which reported only its tokens.
        """
        reused = min(max(self.reused_prefix, len(self.verified)), len(self.tokens))
        return max(self.cached_tokens, reused), reused

    def forget_tokens(self) -> None:
        """Drop all tokens."""
        self.columns.clear()
        del self.verified[:], self.calls[:], self.environment[:]
        self.prompt_logprobs = None
        self.journaled = self.chunks = 0

    def drop_last_token(self) -> None:
        """Drop the last token, which the next attempt samples again, and everything that refers to it."""
        have = max(0, len(self.tokens) - 1)
        self.columns.cut(have)
        del self.verified[have:]
        self.reused_prefix = min(self.reused_prefix, have)
        self.spans = [span for span in self.spans if span.begin_token < have]
        for span in self.spans:
            span.end_token = min(span.end_token, have)

    def count(self, report: generation_pb2.Finished) -> None:
        """Add an instance's counts of steps and drafts."""
        if self.begun_at:
            self.first_step_at = self.begun_at + seconds_of(report.queue_time)
        if self.spans:
            self.spans[-1].cached_context = report.cached_context_tokens
        self.decode_steps += report.decode_steps
        self.verify_steps += report.verify_steps
        self.generation_seconds += seconds_of(report.generation_time)
        self.prefill_seconds += seconds_of(report.prefill_time)
        self.verify_seconds += seconds_of(report.verify_time)
        self.plain_seconds += seconds_of(report.plain_time)
        for source in report.draft_sources:
            counts = self.drafts.setdefault(source.drafter, [0, 0])
            counts[0] += source.drafted
            counts[1] += source.accepted
        # Each attempt reports on the whole response so far, not only on its part, so these must not be summed.
        if (report.reused_prefix, report.cached_tokens) > (self.reused_prefix, self.cached_tokens):
            self.reused_prefix, self.cached_tokens = report.reused_prefix, report.cached_tokens
