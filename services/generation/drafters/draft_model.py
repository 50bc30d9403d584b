"""Drafter with a draft model, and the metrics of each kind of draft model (quantized self-draft, EAGLE-3 head)."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING, ClassVar, Self

from prometheus_client import CollectorRegistry

from services.generation.engine.types import EngineSampleState, ModelProposal
from services.generation.speculation.acceptance import AcceptanceTable
from services.generation.speculation.drafter import (
    DrafterSetting,
    Proposal,
    Proposals,
    ProposalsByName,
    TokenDrafter,
)
from services.generation.speculation.plan import LengthChooser, context_of
from services.platform.observability.metrics import MetricSet, counter, gauge, histogram
from services.step_time.estimator import StepTimeEstimator

if TYPE_CHECKING:
    from services.generation.engine.draft_models.interface import DraftModelClient

_REFRESH_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
# Seconds for which the model is prepared in a step, and in a slice of idle time.
_STEP_SLICE, _IDLE_SLICE = 1e-3, 1e-2
# Prior acceptance of the first drafted token, and of any after an accepted one.
_PRIOR = 0.85
# Bounds of the buckets of draft probability, and the prior acceptance in each: under coupled sampling the target
# mostly draws the same token, even an unlikely one.
_EDGES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95)
_PRIORS = (0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98)


class DraftModelMetrics(MetricSet):
    """Cost of one draft model. Used by the engine thread only."""

    gain = gauge(
        "predicted_gain_ratio", "Predicted speedup by the draft model in the latest step; 1: it did not run."
    )
    memory_bytes = gauge("memory_bytes", "Memory of the draft model's weights.")
    draft_tokens = counter("draft_tokens_total", "Tokens drafted.")
    draft_steps = counter("draft_steps_total", "Draft steps.")
    draft_seconds = counter("draft_seconds_total", "Time of draft steps.")

    def built(self, work: float, wall: float, nbytes: int) -> None:
        """Record that the model became ready in `wall` seconds, with `work` seconds of work; 0: at the start."""
        self.memory_bytes.set(nbytes)

    def decided(self, gain: float) -> None:
        """Record the predicted gain of running the model, as a factor; 1 if it does not run."""
        self.gain.set(gain)

    def drafted(self, tokens: int, steps: int, seconds: float, caught_up: int) -> None:
        """Record drafted tokens, draft steps (one token per sample each) and the tokens prefilled before them."""
        self.draft_tokens.inc(tokens)
        self.draft_steps.inc(steps)
        self.draft_seconds.inc(seconds)

    def swapped(self, version: int) -> None:
        """Record the version of new weights."""


class QuantizedDrafterMetrics(DraftModelMetrics, prefix="paceline_quantized_"):
    """Cost of the quantized self-draft, whose weights are quantized again with every policy version."""

    refresh_seconds = histogram(
        "refresh_seconds",
        "Time to quantize the weights after an update: spent (work), until done (wall).",
        _REFRESH_BUCKETS,
        "time",
    )

    def built(self, work: float, wall: float, nbytes: int) -> None:
        """Record that the quantized weights became ready."""
        super().built(work, wall, nbytes)
        if wall:
            self.refresh_seconds.labels("work").observe(work)
            self.refresh_seconds.labels("wall").observe(wall)


class Eagle3Metrics(DraftModelMetrics, prefix="paceline_eagle3_"):
    """Cost of the EAGLE-3 head, which is trained online and has separate versions."""

    version = gauge("drafter_version", "Version of the EAGLE-3 head that drafts; 0: the initial one.")
    swaps = counter("swaps_total", "Heads that replaced another in the running engine.")
    refused = counter("refused_total", "Heads refused: broken, or not for this model.")
    caught_up = counter(
        "caught_up_tokens_total",
        "Tokens that the head prefilled before drafting, including those that a step added.",
    )

    def drafted(self, tokens: int, steps: int, seconds: float, caught_up: int) -> None:
        """Record draft steps and the tokens prefilled before them."""
        super().drafted(tokens, steps, seconds, caught_up)
        self.caught_up.inc(caught_up)

    def swapped(self, version: int) -> None:
        """Record the version of the new head."""
        self.version.set(version)
        self.swaps.inc()


@dataclass(slots=True)
class _Draft:
    """Tokens drafted for a sample from response position `begin` on, and how many of them were compared."""

    begin: int
    tokens: list[int]
    buckets: list[int]
    compared: int = 0
    mismatched: bool = False


@dataclass(slots=True)
class AcceptanceCounts:
    """Drafts compared with responses, their tokens, and the tokens before the first mismatch."""

    drafts: int = 0
    tokens: int = 0
    accepted: int = 0


class DraftModelDrafter(TokenDrafter):
    """Decides when the draft model runs, for which samples and how deep, and proposes its tokens.

    The draft model runs only where its passes, which are timed like the target's steps, are predicted to pay, and
    for samples whose other proposals are worse. Drafted tokens that were not verified are proposed again while the
    response agrees with them. A sample may be drafted for from any step on.

    Acceptance is learned by comparing every drafted token with the response, verified or not: by position in the
    draft, which decides how deep to draft, and by the probability with which the model drew it, which gives the
    acceptance of a proposal.
    """

    sequential = True
    Metrics: ClassVar[type[DraftModelMetrics]] = DraftModelMetrics

    def __init__(
        self,
        engine: DraftModelClient,
        worth: LengthChooser,
        *,
        metrics: DraftModelMetrics | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Begin with the model that the engine has.

        Args:
            engine: runs the draft model.
            worth: says how many tokens are worth drafting for each sample; 0 where the drafter is not wanted.
            metrics: of the cost.
            clock: seconds.
        """
        self.name = engine.name
        # Outcomes since the weights in use were swapped in.
        self.compared = AcceptanceCounts()
        self._engine = engine
        self._worth = worth
        self.pass_time = StepTimeEstimator()
        """Times of the draft model's passes."""
        self.metrics = metrics or self.Metrics(CollectorRegistry())
        self._clock = clock
        self._drafts: dict[str, _Draft] = {}
        self._by_position = AcceptanceTable([_PRIOR] * engine.most_tokens)
        self._by_probability = AcceptanceTable(_PRIORS)
        # Time at which the model was first found not ready, and seconds spent on preparing it since.
        self._stale_since: float | None = None
        self._built_seconds = 0.0
        self.metrics.built(0.0, 0.0, engine.nbytes)

    @classmethod
    def build(cls, setting: DrafterSetting) -> Self:
        """Return the drafter of the engine's model of this name."""
        model = setting.draft_models[cls.name]
        return cls(model, setting.worth, metrics=cls.Metrics(setting.registry))

    def end(self, sample_id: str, response: Sequence[int]) -> None:
        """Compare the rest of the draft with the response, and forget the sample."""
        draft = self._drafts.pop(sample_id, None)
        if draft is not None:
            self._compare(draft, response)
            self._close(draft)

    def swapped(self, version: int) -> None:
        """Begin with new weights of this version, and forget half of the acceptance learned with the old ones."""
        self._drafts.clear()
        self.compared = AcceptanceCounts()
        self._half_forget()
        self.metrics.swapped(version)

    def idle_work(self) -> bool:
        """Prepare the model while the engine idles; return True if there is more to do."""
        return self._engine.building and not self._prepared(_IDLE_SLICE)

    def propose(
        self, samples: Sequence[EngineSampleState], window: int, others: ProposalsByName
    ) -> Proposals | None:
        """Return proposals for the samples for which drafting pays or tokens of an earlier draft remain.

        Args:
            samples: of the next step.
            window: most tokens of a proposal.
            others: proposals of the other drafters, by name.
        """
        if not samples or not self._prepared(_STEP_SLICE):
            return None
        unverified: list[Proposal | None] = [None] * len(samples)
        if self._drafts:
            unverified = [self._unverified(sample, window) for sample in samples]
            others = {**others, self.name: Proposals.of(unverified)}
        acceptance = self._by_position.probabilities[: min(window, self._engine.most_tokens)]
        chosen = self._worth(self.name, samples, list(others.values()), window, acceptance, self.pass_time)
        self.metrics.decided(chosen.gain)
        requested = {
            sample.sample_id: length
            for sample, length in zip(samples, chosen.tokens.tolist(), strict=True)
            if length
        }
        if not requested and not any(unverified):
            return None
        made = self._run(samples, requested) if requested else {}
        proposals = [
            self._propose(sample, made[sample.sample_id], window) if sample.sample_id in made else earlier
            for sample, earlier in zip(samples, unverified, strict=True)
        ]
        return Proposals.of(proposals) if any(proposals) else None

    def _prepared(self, seconds: float) -> bool:
        """Return True if the model is ready for the served weights, else continue to prepare it."""
        if self._engine.ready and self._stale_since is None:
            return True
        began = self._clock()
        if self._stale_since is None:
            self._stale_since = began
            self._drafts.clear()
        ready = self._engine.build(seconds)
        self._built_seconds += self._clock() - began
        if ready:
            self.metrics.built(self._built_seconds, self._clock() - self._stale_since, self._engine.nbytes)
            self._stale_since, self._built_seconds = None, 0.0
            self._half_forget()
        return ready

    def _half_forget(self) -> None:
        """Move acceptance halfway to the priors, so that new weights are tried where the old ones did not pay."""
        self._by_position = _half_known(self._by_position, [_PRIOR] * self._engine.most_tokens)
        self._by_probability = _half_known(self._by_probability, _PRIORS)

    def _run(
        self, samples: Sequence[EngineSampleState], lengths: Mapping[str, int]
    ) -> Mapping[str, ModelProposal]:
        """Draft, and learn how long it took."""
        began = self._clock()
        drafted = self._engine.propose(lengths)
        seconds, made = self._clock() - began, drafted.proposals
        steps = max((len(proposal.tokens) for proposal in made.values()), default=0)
        # If samples had to catch up first, the time is not only of draft steps.
        usual = drafted.caught_up <= len(made) * (self._engine.most_tokens + 1)
        if steps and usual:
            context = context_of([sample for sample in samples if sample.sample_id in made])
            self.pass_time.observe(len(made), len(made), context, seconds / steps)
        tokens = sum(len(proposal.tokens) for proposal in made.values())
        self.metrics.drafted(tokens, steps, seconds, drafted.caught_up)
        return made

    def _propose(self, sample: EngineSampleState, made: ModelProposal, window: int) -> Proposal:
        """Replace the sample's last draft by a new one, and return its beginning."""
        buckets = [bisect_right(_EDGES, exp(logprob)) for logprob in made.logprobs]
        last = self._drafts.get(sample.sample_id)
        if last is not None:
            self._close(last)
        self._drafts[sample.sample_id] = draft = _Draft(len(sample.response), made.tokens, buckets)
        return self._remaining(draft, window)

    def _unverified(self, sample: EngineSampleState, window: int) -> Proposal | None:
        """Return the rest of an earlier draft, if the response agrees with it so far."""
        draft = self._drafts.get(sample.sample_id)
        if draft is None:
            return None
        self._compare(draft, sample.response)
        if draft.mismatched or draft.compared == len(draft.tokens):
            self._close(self._drafts.pop(sample.sample_id))
            return None
        return self._remaining(draft, window)

    def _remaining(self, draft: _Draft, window: int) -> Proposal:
        part = slice(draft.compared, draft.compared + window)
        known = self._by_probability.probabilities
        return Proposal(draft.tokens[part], [known[bucket] for bucket in draft.buckets[part]])

    def _compare(self, draft: _Draft, response: Sequence[int]) -> None:
        """Compare drafted tokens with the response, up to the first mismatch."""
        while not draft.mismatched and draft.compared < len(draft.tokens):
            place = draft.begin + draft.compared
            if place >= len(response):
                return
            same = response[place] == draft.tokens[draft.compared]
            self._by_position.observe(draft.compared, 1, int(same))
            self._by_probability.observe(draft.buckets[draft.compared], 1, int(same))
            draft.compared += 1
            draft.mismatched = not same

    def _close(self, draft: _Draft) -> None:
        """Count a draft that is not compared any further; tokens after a mismatch count as rejected."""
        if draft.compared:
            self.compared.drafts += 1
            self.compared.tokens += len(draft.tokens) if draft.mismatched else draft.compared
            self.compared.accepted += draft.compared - draft.mismatched


class QuantizedDrafter(DraftModelDrafter):
    """Drafts with a quantized copy of the weights."""

    name = "quantized"
    Metrics = QuantizedDrafterMetrics


class Eagle3Drafter(DraftModelDrafter):
    """Drafts with a trained EAGLE-3 head."""

    name = "eagle3"
    Metrics = Eagle3Metrics
    metrics: Eagle3Metrics


def _half_known(table: AcceptanceTable, priors: Sequence[float]) -> AcceptanceTable:
    """Return a new table whose priors are halfway between the learned acceptance and the old priors."""
    return AcceptanceTable([(a + b) / 2 for a, b in zip(table.probabilities, priors, strict=True)])
