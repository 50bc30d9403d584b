"""Speculation of an instance: asks the drafters, applies the plan, reports back what was accepted.

A drafter is never trusted. One that raises, answers for the wrong number of samples, or offers tokens outside
the vocabulary, more than asked for, or predictions that are no probabilities, loses its say for that step (or
that sample); the fault is counted and logged once, and after `MAX_FAULTS` faulty steps it is switched off.
Nothing it does can reach a request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isnan
from typing import Protocol, TypeVar

import structlog

from services.generation.drafting.drafter import Arrival, DraftContext, Drafter, Offer
from services.generation.drafting.plan import Draft, StepShape, context_of
from services.generation.engine.types import SampleState, SampleStep

MAX_FAULTS = 3
T = TypeVar("T")
_log = structlog.get_logger(__name__)


class Plan(Protocol):
    """Chooses what is verified (see `plan.FixedPlan` and `planner.PlannedDrafts`)."""

    @property
    def window(self) -> int: ...
    @property
    def measures(self) -> bool: ...

    def stepped(self, shape: StepShape, seconds: float) -> None: ...

    def choose(
        self, samples: Sequence[SampleState], offers: Mapping[str, Sequence[Offer | None]]
    ) -> dict[str, Draft]: ...


class DraftMetrics(Protocol):
    """Where outcomes are counted."""

    def verified(self, drafter: str, drafted: int, accepted: int) -> None: ...
    def fault(self, drafter: str) -> None: ...


@dataclass(slots=True)
class _Seat:
    """A drafter and its standing."""

    drafter: Drafter
    faults: int = 0
    on: bool = True
    # Faulted in the step being planned; a step counts once however many samples it spoilt.
    faulted: bool = False


@dataclass(slots=True)
class Speculation:
    """The drafters of one engine and the plan they work under. Used by the engine thread only."""

    drafters: Sequence[Drafter]
    plan: Plan
    vocab_size: int
    metrics: DraftMetrics
    _seats: list[_Seat] = field(init=False)
    _drafts: dict[str, Draft] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._seats = [_Seat(drafter) for drafter in self.drafters]

    def begin(self, context: DraftContext) -> None:
        """A sample enters the engine."""
        for seat in self._active():
            self._guard(seat, partial(seat.drafter.begin, context))

    def adopt(self, arrival: Arrival) -> None:
        """Rollouts have become known."""
        for seat in self._active():
            self._guard(seat, partial(seat.drafter.adopt, arrival))

    def tend(self) -> bool:
        """Work that the drafters put off, a slice of it, while the engine idles; whether there is more."""
        return any([self._guard(seat, seat.drafter.tend) for seat in self._active()])

    def end(self, sample_id: str, response: Sequence[int] = ()) -> None:
        """A sample left the engine, with this response where it is known."""
        self._drafts.pop(sample_id, None)
        for seat in self._active():
            self._guard(seat, partial(seat.drafter.end, sample_id, response))

    def drafts(self, samples: Sequence[SampleState]) -> dict[str, list[int]]:
        """The tokens to verify in the coming step, by sample id."""
        if not samples:
            self._drafts = {}
            return {}
        offers = {seat.drafter.name: self._offers(seat, samples) for seat in self._active()}
        self._drafts = self.plan.choose(samples, offers)
        return {sample_id: draft.tokens for sample_id, draft in self._drafts.items()}

    def shape(self, samples: Sequence[SampleState], drafts: Mapping[str, Sequence[int]]) -> StepShape | None:
        """What the coming step's time depends on; None when the plan does not ask for step times."""
        if not (samples and self.plan.measures):
            return None
        rows = len(samples) + sum(map(len, drafts.values()))
        return StepShape(len(samples), rows, context_of(samples))

    def drafter_of(self, sample_id: str) -> str:
        """What results call the origin of the tokens that the last step verified for a sample; "" for none."""
        draft = self._drafts.get(sample_id)
        return "" if draft is None else draft.source

    def learn(self, step: SampleStep) -> None:
        """Report a sample's outcome to the drafter that made its draft."""
        draft = self._drafts.get(step.sample_id)
        if draft is None or not step.drafted:
            return
        self.metrics.verified(draft.source, step.drafted, step.accepted)
        for seat in self._active():
            if seat.drafter.name == draft.drafter:
                learn = partial(seat.drafter.learn, step.sample_id, step.drafted, step.accepted)
                self._guard(seat, learn)

    def _active(self) -> list[_Seat]:
        return [seat for seat in self._seats if seat.on]

    def _offers(self, seat: _Seat, samples: Sequence[SampleState]) -> Sequence[Offer | None]:
        seat.faulted = False
        window = self.plan.window
        made = self._guard(seat, lambda: list(seat.drafter.offer(samples, window)))
        nothing: list[Offer | None] = [None] * len(samples)
        if made is None:
            return nothing
        if len(made) != len(samples):
            self._fault(seat, f"{len(made)} offers for {len(samples)} samples")
            return nothing
        return [self._checked(seat, offer) for offer in made]

    def _checked(self, seat: _Seat, offer: Offer | None) -> Offer | None:
        if offer is None:
            return None
        complaint = self._guard(seat, lambda: _complaint(offer, self.plan.window, self.vocab_size))
        if complaint == "":
            return offer
        if complaint is not None:
            self._fault(seat, complaint)
        return None

    def _guard(self, seat: _Seat, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except Exception as error:
            self._fault(seat, repr(error))
            return None

    def _fault(self, seat: _Seat, what: str) -> None:
        self.metrics.fault(seat.drafter.name)
        if seat.faulted:
            return
        seat.faulted = True
        seat.faults += 1
        if seat.faults == 1:
            _log.warning("drafter_fault", drafter=seat.drafter.name, fault=what)
        if seat.faults >= MAX_FAULTS and seat.on:
            seat.on = False
            _log.error("drafter_switched_off", drafter=seat.drafter.name, faults=seat.faults, last=what)


def _complaint(offer: Offer, window: int, vocab_size: int) -> str:
    """What is wrong with an offer, or ""."""
    tokens, acceptance = offer.tokens, offer.acceptance
    if not 0 < len(tokens) <= window:
        return f"{len(tokens)} tokens offered, allowed are 1 to {window}"
    if len(acceptance) != len(tokens):
        return f"{len(acceptance)} predictions for {len(tokens)} tokens"
    if set(map(type, tokens)) != {int} or min(tokens) < 0 or max(tokens) >= vocab_size:
        return f"a token outside the vocabulary of {vocab_size}"
    # A NaN makes the sum one, and hides from the other two.
    if isnan(sum(acceptance)) or min(acceptance) < 0.0 or max(acceptance) > 1.0:
        return "a prediction that is no probability"
    if type(offer.source) is not str:
        return "a source that is no name"
    return ""
