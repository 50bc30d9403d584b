"""A drafter with a model of its own, as the loop sees it: when to run it, for whom, how deep, for what promise.

The model is run only where the step-time model says that its draft steps pay, for samples whose other drafts are
worse. What it drafted and was not verified is offered again while the response goes on as it says.

How likely its tokens are kept is learned by comparing every drafted token with the response, verified or not: by
place in the draft, for how deep to go, and by the probability that the model drew it with, for what is offered.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import Protocol

import numpy as np

from services.generation.drafting.acceptance import AcceptanceTable
from services.generation.drafting.drafter import Arrival, DraftContext, Offer, Offers
from services.generation.drafting.lengths import Batch, Lengths, choose_lengths, row_price, standing
from services.generation.drafting.plan import context_of, rooms
from services.generation.engine.types import Drafted, Proposal, SampleState
from services.policy.correction import CorrectedStepTime
from services.policy.drafter_time import DrafterTime
from services.policy.knobs import Knobs

# Seconds of getting the model ready beside a step, and at once while the engine idles.
_SLICE, _IDLE_SLICE = 1e-3, 1e-2
# Before anything was seen, the first drafted token is kept with this probability, and any after a kept one.
_PRIOR = 0.85
# Draft probabilities at which a new bucket begins, and the acceptance in each before anything was seen: with shared
# noise even an unlikely token is mostly the target's too.
_EDGES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95)
_PRIORS = (0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98)


class ModelEngine(Protocol):
    """What is used of `services.generation.engine.model_drafts.ModelDrafts`."""

    name: str
    most_tokens: int

    @property
    def ready(self) -> bool: ...
    @property
    def building(self) -> bool: ...
    @property
    def nbytes(self) -> int: ...
    def build(self, seconds: float) -> bool: ...
    def propose(self, lengths: Mapping[str, int]) -> Drafted: ...


class ModelMetrics(Protocol):
    """Where the cost of the model is counted."""

    def built(self, work: float, wall: float, nbytes: int) -> None: ...
    def decided(self, gain: float) -> None: ...
    def drafted(self, tokens: int, steps: int, seconds: float, caught_up: int) -> None: ...
    def swapped(self, version: int) -> None: ...


class Terms(Protocol):
    """By what the decision is made, as it is at each step; such as a `SteeredPlan`."""

    @property
    def step_time(self) -> CorrectedStepTime | None:
        """Predicted times of steps; None: there are none."""

    @property
    def knobs(self) -> Knobs:
        """The mode, and the least gain that is worth it."""

    def wanted(self, drafter: str, samples: Sequence[SampleState]) -> Sequence[bool] | bool:
        """Whether the drafter may make offers, for every sample alike or for each."""


@dataclass(slots=True)
class _Draft:
    """What was drafted for a sample from response position `begin` on, and how much of it was compared."""

    begin: int
    tokens: list[int]
    buckets: list[int]
    compared: int = 0
    mismatched: bool = False


@dataclass(slots=True)
class Compared:
    """Drafts that were compared with responses, their tokens, and how many came before the first that differed."""

    drafts: int = 0
    tokens: int = 0
    accepted: int = 0


class OwnModelDrafter:
    """Runs the model and offers its tokens. Sequential: it wants to know what the other drafters offer."""

    def __init__(
        self,
        engine: ModelEngine,
        terms: Terms,
        drafter_time: DrafterTime | None = None,
        *,
        metrics: ModelMetrics | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            engine: has the model.
            terms: by what the decision is made.
            drafter_time: of draft steps. Without it, without a step-time model, and in the mode `fixed`, every
                sample is drafted for that is not offered more by others.
            metrics: where its cost is counted.
            clock: seconds.
        """
        self.name = engine.name
        # Of the weights that are in use, since they are.
        self.compared = Compared()
        self._engine = engine
        self._terms = terms
        self._drafter_time = drafter_time
        self._metrics = metrics
        self._clock = clock
        self._drafts: dict[str, _Draft] = {}
        self._by_place = AcceptanceTable([_PRIOR] * engine.most_tokens)
        self._by_probability = AcceptanceTable(_PRIORS)
        # When the model was first seen not to be ready, and seconds spent on getting it ready since.
        self._stale_since: float | None = None
        self._built_seconds = 0.0
        if metrics is not None:
            metrics.built(0.0, 0.0, engine.nbytes)

    def begin(self, context: DraftContext) -> None:
        """Nothing: a sample may be drafted for from any step on."""

    def adopt(self, arrival: Arrival) -> None:
        """Nothing: the model needs no rollouts."""

    def learn(self, sample_id: str, drafted: int, accepted: int) -> None:
        """Nothing: the next offer sees the tokens themselves."""

    def end(self, sample_id: str, response: Sequence[int]) -> None:
        """Compare what is left to be compared, and forget the sample."""
        draft = self._drafts.pop(sample_id, None)
        if draft is not None:
            self._compare(draft, response)
            self._close(draft)

    def swapped(self, version: int) -> None:
        """The model has weights of this version from now on: what is known of the old ones is half forgotten."""
        self._drafts.clear()
        self.compared = Compared()
        self._half_forget()
        if self._metrics is not None:
            self._metrics.swapped(version)

    def tend(self) -> bool:
        """Go on getting the model ready while the engine idles; whether there is more to do."""
        return self._engine.building and not self._prepared(_IDLE_SLICE)

    def offer(self, samples: Sequence[SampleState], window: int) -> Offers | None:
        """As `offer_beside`, without other offers."""
        return self.offer_beside(samples, window, {})

    def offer_beside(
        self, samples: Sequence[SampleState], window: int, others: Mapping[str, Offers]
    ) -> Offers | None:
        """Draft for the samples for which it pays.

        Args:
            samples: of the coming step.
            window: most tokens of an offer.
            others: what the other drafters offer, by name.
        """
        wanted = self._terms.wanted(self.name, samples)
        if wanted is False or not samples or not self._prepared(_SLICE):
            return None
        left: list[Offer | None] = [None] * len(samples)
        if self._drafts:
            left = [self._left(sample, window) for sample in samples]
            others = {**others, self.name: Offers.of(left)}
        chosen = self._decide(samples, window, list(others.values()))
        lengths = chosen.tokens if wanted is True else np.where(wanted, chosen.tokens, 0)
        if self._metrics is not None:
            self._metrics.decided(chosen.gain)
        asked = {
            sample.sample_id: length
            for sample, length in zip(samples, lengths.tolist(), strict=True)
            if length
        }
        if not asked and not any(left):
            return None
        made = self._run(samples, asked) if asked else {}
        offers = [
            self._offer(sample, made[sample.sample_id], window) if sample.sample_id in made else rest
            for sample, rest in zip(samples, left, strict=True)
        ]
        return Offers.of(offers) if any(offers) else None

    def _prepared(self, seconds: float) -> bool:
        """Whether the model is ready for the weights that are served; goes on with it if not."""
        if self._engine.ready and self._stale_since is None:
            return True
        began = self._clock()
        if self._stale_since is None:
            self._stale_since = began
            self._drafts.clear()
        ready = self._engine.build(seconds)
        self._built_seconds += self._clock() - began
        if ready:
            if self._metrics is not None:
                self._metrics.built(
                    self._built_seconds, self._clock() - self._stale_since, self._engine.nbytes
                )
            self._stale_since, self._built_seconds = None, 0.0
            self._half_forget()
        return ready

    def _half_forget(self) -> None:
        """Of other weights half as much is known: enough to try again where it did not pay."""
        self._by_place = _half_known(self._by_place, [_PRIOR] * self._engine.most_tokens)
        self._by_probability = _half_known(self._by_probability, _PRIORS)

    def _decide(self, samples: Sequence[SampleState], window: int, others: Sequence[Offers]) -> Lengths:
        """How many tokens to draft for each sample."""
        most = min(window, self._engine.most_tokens)
        room = np.minimum(rooms(samples), most)
        acceptance = self._by_place.probabilities[:most]
        step_time = self._terms.step_time
        knobs = self._terms.knobs
        if step_time is None or self._drafter_time is None or knobs.mode == "fixed":
            _, expected = standing(samples, others, window, 0.0)
            worse = expected < np.multiply.accumulate(acceptance).sum()
            return Lengths(np.where(worse, np.maximum(room, 0), 0))
        context = context_of(samples)
        rows, expected = standing(samples, others, window, row_price(step_time, len(samples), context))
        batch = Batch(room, rows, expected, context)
        return choose_lengths(batch, acceptance, step_time, self._drafter_time, knobs.margin)

    def _run(self, samples: Sequence[SampleState], wanted: Mapping[str, int]) -> Mapping[str, Proposal]:
        """Draft, and learn how long that took."""
        began = self._clock()
        drafted = self._engine.propose(wanted)
        seconds, made = self._clock() - began, drafted.proposals
        steps = max((len(proposal.tokens) for proposal in made.values()), default=0)
        # Of a step in which samples caught up, the time is not that of drafting.
        usual = drafted.caught_up <= len(made) * (self._engine.most_tokens + 1)
        if steps and usual and self._drafter_time is not None:
            context = context_of([sample for sample in samples if sample.sample_id in made])
            self._drafter_time.observe(len(made), context, seconds / steps)
        if self._metrics is not None:
            tokens = sum(len(proposal.tokens) for proposal in made.values())
            self._metrics.drafted(tokens, steps, seconds, drafted.caught_up)
        return made

    def _offer(self, sample: SampleState, proposal: Proposal, window: int) -> Offer:
        buckets = [bisect_right(_EDGES, exp(logprob)) for logprob in proposal.logprobs]
        last = self._drafts.get(sample.sample_id)
        if last is not None:
            self._close(last)
        self._drafts[sample.sample_id] = draft = _Draft(len(sample.response), proposal.tokens, buckets)
        return self._rest(draft, window)

    def _left(self, sample: SampleState, window: int) -> Offer | None:
        """What an earlier draft says of the tokens to come, if it was right so far."""
        draft = self._drafts.get(sample.sample_id)
        if draft is None:
            return None
        self._compare(draft, sample.response)
        if draft.mismatched or draft.compared == len(draft.tokens):
            self._close(self._drafts.pop(sample.sample_id))
            return None
        return self._rest(draft, window)

    def _rest(self, draft: _Draft, window: int) -> Offer:
        part = slice(draft.compared, draft.compared + window)
        known = self._by_probability.probabilities
        return Offer(draft.tokens[part], [known[bucket] for bucket in draft.buckets[part]])

    def _compare(self, draft: _Draft, response: Sequence[int]) -> None:
        """Compare drafted tokens with the response, up to the first that is another."""
        while not draft.mismatched and draft.compared < len(draft.tokens):
            place = draft.begin + draft.compared
            if place >= len(response):
                return
            same = response[place] == draft.tokens[draft.compared]
            self._by_place.observe(draft.compared, 1, int(same))
            self._by_probability.observe(draft.buckets[draft.compared], 1, int(same))
            draft.compared += 1
            draft.mismatched = not same

    def _close(self, draft: _Draft) -> None:
        """No more of a draft will be compared. What is behind a token that differed was wrong with it."""
        if draft.compared:
            self.compared.drafts += 1
            self.compared.tokens += len(draft.tokens) if draft.mismatched else draft.compared
            self.compared.accepted += draft.compared - draft.mismatched


def _half_known(table: AcceptanceTable, priors: Sequence[float]) -> AcceptanceTable:
    """A new table that begins between what was learned and the priors."""
    return AcceptanceTable([(a + b) / 2 for a, b in zip(table.probabilities, priors, strict=True)])
