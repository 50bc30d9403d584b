"""Running samples of an instance, the table of them, and the interface of the streams that they belong to.

A sample is real if a caller waits for it, and a background sample if its stream says so. Background samples use
only capacity that real ones leave: they are ended, with the tokens they have, as soon as more than `threshold` real
samples are in the engine, or a real one has to wait.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from paceline.columns import TokenLists
from paceline.internal.v1 import generation_pb2 as pb
from paceline.times import duration
from paceline.v1 import fleet_pb2, sample_pb2
from services.contracts.rollout import StoredRollout
from services.generation.draft_cache.cache import agreement, is_better
from services.generation.draft_cache.origin import NOWHERE, Origin
from services.generation.engine.types import EngineLoad, EngineRequest, Finish, SampleStep, Verifier
from services.generation.loop.metrics import BackgroundMetrics
from services.platform.observability import tracing
from services.platform.observability.tracing import NO_SPAN, TraceSpan

if TYPE_CHECKING:
    from services.generation.engine.sampling.outputs import PromptScores


_FINISH_REASONS = {Finish.STOP: sample_pb2.FINISH_REASON_STOP, Finish.LENGTH: sample_pb2.FINISH_REASON_LENGTH}
# Weight of the newest verify step in a sample's mean acceptance.
_ACCEPTANCE_SMOOTHING = 0.2


class SampleStream(Protocol):
    """Interface of a stream to the engine loop. Methods are called in the engine thread."""

    background: bool
    """True if its samples run only while the engine has no real samples to run."""
    samples: dict[int, RunningSample]
    """Its samples in the engine, by handle."""

    def add(self, sample: RunningSample, now: float) -> None:
        """Add a sample that has entered the engine."""

    def reached(self, sample: RunningSample) -> None:
        """Record that a sample has `quota` unreported tokens."""

    def finish(self, sample: RunningSample, event: pb.Finished) -> None:
        """Record that a sample has ended."""

    def refuse(self, event: pb.Refused) -> None:
        """Record that an item is refused, or that its sample cannot continue."""

    def flush(
        self, load: fleet_pb2.InstanceLoad, policy_version: int, now: float, *, everything: bool = False
    ) -> None:
        """Send events and the tokens that are due to the event loop; with `everything` all tokens."""

    def put(self, event: Exception | None) -> None:
        """End the stream, with the error that the engine ended with, or None."""


@dataclass(slots=True)
class VerifiedTokens:
    """Draft tokens of a sample that were verified, and that were accepted; no message, whose fields are slow."""

    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True)
class RunningSample:
    """Sample in the engine. Times are seconds of the loop's clock; `tokens` were not reported yet.

    `response` holds all tokens, prefix included; `rollout` is the cached one of the same seed; `drafts` counts
    draft tokens by drafter.
    """

    handle: int
    request: EngineRequest
    stream: SampleStream
    arrived: float
    # True if its caller reads along: tokens are reported as they are generated. Otherwise they are reported in
    # checkpoints: at `quota` unreported tokens, or at the time `report_at`.
    streamed: bool = False
    quota: int = sys.maxsize
    report_at: float = math.inf
    started: float | None = None
    tokens: TokenLists = field(default_factory=TokenLists)
    # Scores of the prompt, until they are reported.
    prompt_scores: PromptScores | None = None
    generated: int = 0
    decode_steps: int = 0
    verify_steps: int = 0
    # Times of steps, as in pb.Finished.
    prefill_seconds: float = 0.0
    verify_seconds: float = 0.0
    plain_seconds: float = 0.0
    drafts: dict[str, VerifiedTokens] = field(default_factory=dict)
    # Log-probabilities under the current policy of the tokens among `tokens` that were taken over.
    verified_logprobs: list[float] = field(default_factory=list)
    # As in pb.Finished. `reused_prefix` of a LENIENT sample counts the tokens taken over.
    cached_tokens: int = 0
    reused_prefix: int = 0
    # Tokens whose KV was cached at the first step; None before it.
    cached_context: int | None = None
    origin: Origin = NOWHERE
    rollout: StoredRollout | None = None
    # Span from its arrival until it leaves the engine.
    trace: TraceSpan = NO_SPAN
    # Mean of draft tokens accepted in recent verify steps; 0 when nothing was verified.
    acceptance: float = 0.0
    # Number of moves between instances, and a callback for the first step after a move.
    migrations: int = 0
    resumed: Callable[[], None] | None = None
    # Version of the weights that sampled `tokens`; all tokens are reported before new weights are applied.
    policy_version: int | None = None
    # True if part of the KV that `tokens` were sampled with was computed by earlier versions.
    mixed_kv: bool = False
    # Stop string that ended it.
    stop_string: str = ""
    response: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.response = list(self.request.prefix)

    def follow(self, rollout: StoredRollout) -> bool:
        """Compare the sample with a rollout of its seed; return False if the rollout that it has is as good.

        Of a LENIENT sample only the cached rollout that it takes over is counted.
        """
        if self.rollout is not None and not is_better(rollout, self.rollout):
            return False
        self.rollout = rollout
        if self.request.verifier is not Verifier.LENIENT:
            self.cached_tokens = len(rollout.tokens)
        return True

    def record(self, step: SampleStep, began: float, ended: float, drafter: str) -> None:
        """Add the outcome of a step that took from `began` to `ended`."""
        tokens, drafted = step.token_ids, step.drafted
        if self.started is None:
            self.started = began
            self.cached_context = step.cached_context
            self.prefill_seconds += ended - began
            self.trace.event("first_step")
        elif drafted:
            self.verify_seconds += ended - began
        else:
            self.plain_seconds += ended - began
        self.tokens.extend(step)
        self.response += tokens
        self.generated += len(tokens)
        self.decode_steps += 1
        if step.reused:
            self.reused_prefix += step.reused
            self.verified_logprobs += step.verified_logprobs
        if step.prompt_scores is not None:
            self.prompt_scores = step.prompt_scores
        if step.stop_string:
            self.stop_string = step.stop_string
        if self.resumed is not None:
            self.resumed()
            self.resumed = None
        if drafted:
            weight = _ACCEPTANCE_SMOOTHING if self.verify_steps else 1.0
            self.acceptance += (step.accepted - self.acceptance) * weight
            self.verify_steps += 1
            count = self.drafts.get(drafter)
            if count is None:
                count = self.drafts[drafter] = VerifiedTokens()
            count.drafted += drafted
            count.accepted += step.accepted

    def entered(self, trace_parent: str) -> None:
        """Begin the sample's span under this traceparent, because it has entered the engine."""
        self.trace = tracing.begin(
            "generate",
            trace_parent,
            run_id=self.origin.run_id,
            prompt_id=self.request.prompt_id,
            slot=self.origin.slot,
            step=self.origin.step,
            prefix_tokens=len(self.request.prefix),
        )

    def left(self) -> None:
        """End the sample's span, because it has left the engine."""
        drafts = self.drafts.values()
        self.trace.end(
            tokens=self.generated,
            decode_steps=self.decode_steps,
            verify_steps=self.verify_steps,
            drafted=sum(count.drafted for count in drafts),
            accepted=sum(count.accepted for count in drafts),
        )

    def take_delta(self) -> pb.Delta | None:
        """Return the tokens since the last call; None if there are none."""
        if not self.tokens:
            return None
        delta = pb.Delta(
            handle=self.handle,
            tokens=self.tokens.take(self.policy_version, mixed_kv=self.mixed_kv),
            verified_logprobs=self.verified_logprobs,
            prompt_logprobs=None if self.prompt_scores is None else _prompt_logprobs(self.prompt_scores),
        )
        self.prompt_scores = None
        self.verified_logprobs = []
        return delta

    def finished(self, finish: Finish | None, now: float) -> pb.Finished:
        """Return the closing event; `finish` is None if the sample was ended from outside."""
        started = self.arrived if self.started is None else self.started
        reason = sample_pb2.FINISH_REASON_ABORTED if finish is None else _FINISH_REASONS[finish]
        if self.rollout is not None and self.request.verifier is not Verifier.LENIENT:
            self.reused_prefix = agreement(self.rollout, self.response)
        return pb.Finished(
            handle=self.handle,
            finish_reason=reason,
            draft_sources=[
                sample_pb2.DraftSource(drafter=name, drafted=count.drafted, accepted=count.accepted)
                for name, count in self.drafts.items()
            ],
            decode_steps=self.decode_steps,
            verify_steps=self.verify_steps,
            queue_time=duration(started - self.arrived),
            generation_time=duration(now - started if self.started is not None else 0.0),
            reused_prefix=self.reused_prefix,
            cached_tokens=self.cached_tokens,
            stop_string=self.stop_string,
            cached_context_tokens=self.cached_context or 0,
            prefill_time=duration(self.prefill_seconds),
            verify_time=duration(self.verify_seconds),
            plain_time=duration(self.plain_seconds),
        )


def _prompt_logprobs(scores: PromptScores) -> sample_pb2.TokenColumns:
    return sample_pb2.TokenColumns(
        logprobs=scores.logprobs.tolist(),
        top_token_ids=scores.top_token_ids.ravel().tolist(),
        top_logprobs=scores.top_logprobs.ravel().tolist(),
    )


class SampleTable(dict[str, RunningSample]):
    """Running samples by id. Changed by the engine thread only.

    `background` holds the ids of background samples; `background_steps` counts the engine steps that had some.
    """

    def __init__(self, metrics: BackgroundMetrics, threshold: int = 0) -> None:
        super().__init__()
        self.background: set[str] = set()
        self.background_steps = 0
        self._metrics = metrics
        self._threshold = threshold

    @property
    def real_count(self) -> int:
        """Number of real samples."""
        return len(self) - len(self.background)

    def background_samples(self) -> list[RunningSample]:
        """Return the background samples in order of arrival."""
        return [sample for sample_id, sample in self.items() if sample_id in self.background]

    def origin_of(self, sample_id: str) -> Origin | None:
        """Return the run and step of a real sample; None for any other sample."""
        sample = self.get(sample_id)
        if sample is None or not sample.origin.run_id or sample_id in self.background:
            return None
        return sample.origin

    def add(self, sample: RunningSample) -> None:
        """Add a sample that has entered the engine."""
        sample_id = sample.request.sample_id
        self[sample_id] = sample
        if sample.stream.background:
            self.background.add(sample_id)
            self._metrics.samples.set(len(self.background))

    def remove(self, sample_id: str) -> None:
        """Remove a sample that has left the engine."""
        del self[sample_id]
        if sample_id in self.background:
            self.background.discard(sample_id)
            self._metrics.samples.set(len(self.background))

    def allows_background(self, real: int) -> bool:
        """Return True if background samples may be in the engine together with `real` real ones."""
        return real <= self._threshold

    def real_load(self, load: EngineLoad) -> EngineLoad:
        """Return the part of an engine's load that real samples cause.

        KV of background samples is freed as soon as it is needed, so it does not count while only they run.
        Together with real samples their KV cannot be distinguished, and all of it counts.
        """
        if not self.background:
            return load
        real = self.real_count
        running = min(real, load.running)
        return EngineLoad(running, real - running, load.kv_usage if real else 0.0)

    def record_background_step(self, seconds: float, tokens: int, forked: int, real: int) -> None:
        """Count a step of background samples and their forks, in which `real` real samples ran too."""
        self.background_steps += 1
        self._metrics.record_step(seconds, tokens, forked, real > 0)

    def record_yield(self, samples: int, seconds: float) -> None:
        """Count background samples that were ended `seconds` after a real one arrived."""
        self._metrics.yielded.inc(samples)
        self._metrics.yield_seconds.observe(seconds)
