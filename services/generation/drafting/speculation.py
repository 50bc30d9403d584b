"""Speculation of an instance: asks the drafters, applies the plan, reports back what was accepted.

A drafter is never trusted. One that raises, answers for the wrong number of samples, or offers tokens outside
the vocabulary, more than asked for, or predictions that are no probabilities, loses its say for that step; the
fault is counted and logged once, and after `MAX_FAULTS` faulty steps it is switched off. Nothing it does can reach
a request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import structlog

from services.generation.drafting.drafter import (
    Arrival,
    Carrying,
    DraftContext,
    Drafter,
    Offers,
    SequentialDrafter,
)
from services.generation.drafting.pause import Pause
from services.generation.drafting.plan import UNBOUNDED, Drafts, StepShape, context_of
from services.generation.drafting.selection import flaw
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

    def rest(self, samples: Sequence[SampleState]) -> None: ...
    def rest_on(self) -> None: ...
    def choose(self, samples: Sequence[SampleState], offers: Mapping[str, Offers], rows: int) -> Drafts: ...


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
    # The drafter, if it asks what the others offer.
    sequential: SequentialDrafter | None = field(init=False)

    def __post_init__(self) -> None:
        self.sequential = self.drafter if isinstance(self.drafter, SequentialDrafter) else None


@dataclass(slots=True)
class Speculation:
    """The drafters of one engine and the plan they work under. Used by the engine thread only."""

    drafters: Sequence[Drafter]
    plan: Plan
    vocab_size: int
    metrics: DraftMetrics
    clock: Callable[[], float] = time.perf_counter
    """Seconds."""
    _seats: list[_Seat] = field(init=False)
    _by_name: dict[str, _Seat] = field(init=False)
    _drafts: Drafts = field(init=False, default_factory=Drafts)
    _pause: Pause = field(init=False, default_factory=Pause)
    # Whether drafters rest in the coming step.
    _resting: bool = field(init=False, default=False)
    # Whether samples have come or gone since they were looked at.
    _news: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        # Those that ask for the others' offers come last.
        seats = [_Seat(drafter) for drafter in self.drafters]
        self._seats = sorted(seats, key=lambda seat: seat.sequential is not None)
        self._by_name = {seat.drafter.name: seat for seat in self._seats}

    def begin(self, context: DraftContext) -> None:
        """A sample enters the engine."""
        self._news = True
        if len(context.given):
            self._pause.interrupt()
        for seat in self._active():
            self._guard(seat, partial(seat.drafter.begin, context))

    def carry(self, sample_id: str) -> dict[str, bytes]:
        """What the drafters know of a sample beyond its tokens, by their names, for another engine."""
        found: dict[str, bytes] = {}
        for seat in self._active():
            drafter = seat.drafter
            if isinstance(drafter, Carrying):
                state = self._guard(seat, partial(drafter.carry, sample_id))
                if state:
                    found[drafter.name] = state
        return found

    def adopt(self, arrival: Arrival) -> None:
        """Rollouts have become known."""
        self._pause.end()
        for seat in self._active():
            self._guard(seat, partial(seat.drafter.adopt, arrival))

    def tend(self) -> bool:
        """Work that the drafters put off, a slice of it, while the engine idles; whether there is more."""
        return any([self._guard(seat, seat.drafter.tend) for seat in self._active()])

    def end(self, sample_id: str, response: Sequence[int] = ()) -> None:
        """A sample left the engine, with this response where it is known."""
        self._news = True
        self._drafts.origins.pop(sample_id, None)
        for seat in self._active():
            self._guard(seat, partial(seat.drafter.end, sample_id, response))

    def rests_on(self, samples: int) -> bool:
        """Whether the coming step is as plain as the last one, of the same so many samples: drafters rest.

        If not, `drafts` is to be asked. An engine waits for either, and to look at its samples is most of that.
        """
        if self._news or not self._resting or self._pause.over(samples):
            return False
        self.plan.rest_on()
        return True

    def drafts(self, samples: Sequence[SampleState], rows: int = UNBOUNDED) -> dict[str, list[int]]:
        """The tokens to verify in the coming step, by sample id.

        `rows`: that these samples and their draft tokens may have together, at most.
        """
        self._news = False
        if not samples:
            self._drafts = Drafts()
            return {}
        self._resting = not self._pause.over(len(samples))
        if self._resting:
            self.plan.rest(samples)
            self._drafts = Drafts()
            return {}
        began = self.clock()
        offers: dict[str, Offers] = {}
        for seat in self._active():
            made = self._offers(seat, samples, offers)
            if made is not None:
                offers[seat.drafter.name] = made
        self._drafts = self.plan.choose(samples, offers, rows)
        saved = self._drafts.saved if self._drafts.tokens else 0.0
        self._pause.asked(len(samples), saved, self.clock() - began)
        return dict(self._drafts.tokens)

    def shape(self, samples: Sequence[SampleState], drafts: Mapping[str, Sequence[int]]) -> StepShape | None:
        """What the coming step's time depends on; None when the plan does not ask for step times.

        It is not asked for while drafters rest: what is learned in the others does for deciding.
        """
        if self._resting or not (samples and self.plan.measures):
            return None
        rows = len(samples) + sum(map(len, drafts.values()))
        return StepShape(len(samples), rows, context_of(samples))

    def drafter_of(self, sample_id: str) -> str:
        """What results call the origin of the tokens that the last step verified for a sample; "" for none."""
        origin = self._drafts.origins.get(sample_id)
        return "" if origin is None else origin[1]

    def learn(self, step: SampleStep) -> None:
        """Report a sample's outcome to the drafter that made its draft."""
        origin = self._drafts.origins.get(step.sample_id)
        if origin is None or not step.drafted:
            return
        drafter, source = origin
        self.metrics.verified(source, step.drafted, step.accepted)
        seat = self._by_name[drafter]
        if not seat.on:
            return
        # Not by `_guard`: this is for every sample of every step.
        try:
            seat.drafter.learn(step.sample_id, step.drafted, step.accepted)
        except Exception as error:
            self._fault(seat, repr(error))

    def _active(self) -> list[_Seat]:
        return [seat for seat in self._seats if seat.on]

    def _offers(
        self, seat: _Seat, samples: Sequence[SampleState], others: Mapping[str, Offers]
    ) -> Offers | None:
        seat.faulted = False
        window = self.plan.window
        try:
            if seat.sequential is None:
                made = seat.drafter.offer(samples, window)
            else:
                made = seat.sequential.offer_beside(samples, window, others)
            complaint = "" if made is None else _complaint(made, len(samples), window, self.vocab_size)
        except Exception as error:
            complaint = repr(error)
        if complaint:
            self._fault(seat, complaint)
            return None
        return made

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


def _complaint(made: Offers, samples: int, window: int, vocab_size: int) -> str:
    """What is wrong with offers, or ""."""
    if type(made) is not Offers:
        return f"{type(made).__name__} instead of offers"
    tokens, acceptance = made.tokens, made.acceptance
    if tokens.ndim != 2 or len(tokens) != samples or not 0 < tokens.shape[1] <= window:
        return f"offers of shape {tokens.shape} for {samples} samples of 1 to {window} tokens"
    if acceptance.shape != tokens.shape:
        return f"predictions of shape {acceptance.shape} for tokens of shape {tokens.shape}"
    if wrong := flaw(made, vocab_size):
        return wrong
    if len(made.sources) not in (0, samples) or set(map(type, made.sources)) - {str}:
        return "sources that are no names"
    return ""
