"""Speculation of an engine: queries the drafters, applies the plan, and reports the accepted tokens.

Drafters are not trusted. A drafter that raises, answers for the wrong number of samples, or proposes tokens outside
the vocabulary, more tokens than the window, or predictions that are no probabilities, is left out of that step; the
fault is counted and the first is logged, and after `MAX_FAULTS` the drafter is switched off. The planner is not
trusted either: if it raises, or plans drafts that the samples have no room for, the step decodes plainly, and the
fault is counted for the drafter `planner` and logged once. No fault can reach a request.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isnan
from typing import Any, ParamSpec, Protocol, TypeVar

import structlog

from services.generation.engine.types import SampleStep
from services.generation.speculation.drafter import (
    DraftContext,
    NewRollouts,
    Proposals,
    ProposalsByName,
    Samples,
    TokenDrafter,
)
from services.generation.speculation.plan import UNBOUNDED, DraftPlanner, Drafts, StepShape, context_of
from services.generation.speculation.selection import within

MAX_FAULTS = 3
"""Number of faults after which a drafter is switched off."""
PLANNER = "planner"
"""Name under which faults of the planner are counted."""
# Drafted steps without any savings before steps are skipped: a single sample often has a few between two good
# drafts.
_MAX_CREDIT = 8.0
_MIN_CREDIT = -6.0
# Skipped steps in a row, reached at _MIN_CREDIT.
_MAX_SKIPPED = 32
# A batch that shrank to this share is another batch, in which drafting may pay.
_SHRUNK = 0.5
P = ParamSpec("P")
T = TypeVar("T")
_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class DraftBackoff:
    """Adaptive backoff from drafting that does not pay for its own overhead.

    Querying drafters and planning run on the host while the engine waits; the step-time model does not include this
    cost. The backoff keeps a credit, in steps: each drafted step adds (predicted savings / overhead) - 1. While the
    credit is negative, drafting is skipped for exponentially more steps, up to 32, until the batch shrinks, new
    drafts arrive, or a drafted step pays again.
    """

    _credit: float = _MAX_CREDIT
    _to_skip: int = 0
    _num_samples: int = 0

    def should_draft(self, num_samples: int) -> bool:
        """Return True if drafters should be queried for the next step, else count it as skipped."""
        if self._to_skip and num_samples >= _SHRUNK * self._num_samples:
            self._to_skip -= 1
            return False
        return True

    def record_drafted_step(self, num_samples: int, saved: float, overhead: float = 0.0) -> None:
        """Account for a step for which drafters were queried.

        Args:
            num_samples: samples of the step.
            saved: predicted seconds that its drafts save over plain decoding; 0 without drafts, infinite if
                there is no prediction.
            overhead: seconds that querying and planning took.
        """
        worth = 0.0 if saved <= 0.0 else saved / overhead if overhead > 0.0 else inf
        # A profitable step clears accumulated debt.
        before = max(self._credit, 0.0) if worth >= 1.0 else self._credit
        self._credit = max(min(before - 1.0 + worth, _MAX_CREDIT), _MIN_CREDIT)
        self._to_skip = 0 if self._credit >= 0.0 else min(_MAX_SKIPPED, round(2 ** (-self._credit - 1.0)))
        self._num_samples = num_samples

    def reset(self) -> None:
        """Start over with full credit, because drafters have new rollouts."""
        self._credit, self._to_skip = _MAX_CREDIT, 0

    def draft_next(self) -> None:
        """Skip no further step, because a sample with a reference joined; the credit stays."""
        self._to_skip = 0


class VerificationMetrics(Protocol):
    """Counters of drafts and faults, by drafter or source."""

    def verified(self, drafter: str, drafted: int, accepted: int, count: int) -> None: ...
    def fault(self, drafter: str) -> None: ...


@dataclass(slots=True)
class _Guard:
    """Calls a drafter or the planner, counts its faults, and switches it off after `most` of them."""

    name: str
    metrics: VerificationMetrics
    kind: str = "drafter"
    most: float = MAX_FAULTS
    faults: int = 0
    on: bool = True

    def call(self, otherwise: T, function: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
        """Return the function's result, or `otherwise` if it fails or its owner is switched off."""
        if not self.on:
            return otherwise
        try:
            return function(*given, **named)
        except Exception as error:
            self.metrics.fault(self.name)
            self.faults += 1
            if self.faults == 1:
                _log.warning(f"{self.kind}_fault", drafter=self.name, fault=repr(error))
            if self.faults >= self.most:
                self.on = False
                _log.error("drafter_switched_off", drafter=self.name, faults=self.faults, last=repr(error))
            return otherwise


@dataclass(slots=True)
class Speculation:
    """Drafters of one engine and their planner. Used by the engine thread only."""

    drafters: Sequence[TokenDrafter]
    plan: DraftPlanner
    vocab_size: int
    metrics: VerificationMetrics
    clock: Callable[[], float] = time.perf_counter
    """Seconds."""
    late: int = 0
    """Number of further decisions before the outcomes of one are known, on an engine that schedules ahead."""
    # Drafters that are queried after the others come last.
    _guarded: dict[str, tuple[TokenDrafter, _Guard]] = field(init=False)
    # Names of the drafters that learn from each draft.
    _learning: frozenset[str] = field(init=False)
    _planner: _Guard = field(init=False)
    # Decisions without an outcome yet, newest last.
    _decisions: deque[Drafts] = field(init=False)
    _backoff: DraftBackoff = field(init=False, default_factory=DraftBackoff)
    # True if drafting is skipped in the step being planned.
    _skipped: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._decisions = deque(maxlen=1 + self.late)
        self._planner = _Guard(PLANNER, self.metrics, PLANNER, inf)
        ordered = sorted(self.drafters, key=lambda each: each.sequential)
        self._guarded = {each.name: (each, _Guard(each.name, self.metrics)) for each in ordered}
        self._learning = frozenset(
            each.name for each in ordered if type(each).learn is not TokenDrafter.learn
        )

    def begin(self, context: DraftContext) -> None:
        """Register a sample that enters the engine."""
        if len(context.reference):
            self._backoff.draft_next()
        for drafter, guard in self._guarded.values():
            guard.call(None, drafter.begin, context)

    def carry(self, sample_id: str) -> dict[str, bytes]:
        """Return the drafters' state of a sample beyond its tokens, by drafter, for another engine."""
        return {
            name: state
            for name, (drafter, guard) in self._guarded.items()
            if (state := guard.call(b"", drafter.carry, sample_id))
        }

    def add_rollouts(self, arrival: NewRollouts) -> None:
        """Pass new rollouts to the drafters."""
        self._backoff.reset()
        for drafter, guard in self._guarded.values():
            guard.call(None, drafter.add_rollouts, arrival)

    def idle_work(self) -> bool:
        """Do a slice of the drafters' deferred work while the engine idles; return True if there is more."""
        return any([guard.call(False, drafter.idle_work) for drafter, guard in self._guarded.values()])

    def end(self, sample_id: str, response: Sequence[int] = ()) -> None:
        """Release a sample that left the engine, with its response if known."""
        for decision in self._decisions:
            decision.origins.pop(sample_id, None)
        for drafter, guard in self._guarded.values():
            guard.call(None, drafter.end, sample_id, response)

    def drafts(self, samples: Samples, rows: int = UNBOUNDED) -> dict[str, Sequence[int]]:
        """Return the tokens to verify in the next step, by sample id; see `DraftPlanner.choose`."""
        self._decisions.append(Drafts())
        if not samples:
            return {}
        self._skipped = not self._backoff.should_draft(len(samples))
        if self._skipped:
            self._planner.call(None, self.plan.back_off, samples)
            return {}
        began = self.clock()
        made = self._proposals(samples)
        drafts = self._planner.call(self._decisions[-1], self._choose, samples, made, rows)
        self._decisions[-1] = drafts
        saved = drafts.saved if drafts.tokens else 0.0
        self._backoff.record_drafted_step(len(samples), saved, self.clock() - began)
        return drafts.tokens

    def shape(self, samples: Samples, drafts: Mapping[str, Sequence[int]]) -> StepShape | None:
        """Return the shape of the next step if its time should be measured, else None.

        Steps that skip drafting are not measured: the others teach the step-time model enough.
        """
        if self._skipped or not samples:
            return None
        n = len(samples)
        # A token that is computed again takes as long as one that is verified.
        again = sum([sample.replayed for sample in samples])
        return StepShape(n, n + again + sum(map(len, drafts.values())), context_of(samples))

    def stepped(self, shape: StepShape, seconds: float) -> None:
        """Report the measured time of a step of this shape; it may come some steps late."""
        self._planner.call(None, self.plan.stepped, shape, seconds)

    def learn(self, steps: Iterable[SampleStep], later: int = 0) -> list[str]:
        """Report the verifications of a step to the drafters that made the drafts, to the planner and to metrics.

        Drafts of one origin and outcome are reported together, because a report costs as much as all else here.

        Args:
            steps: outcomes of one engine step, or some of them.
            later: number of decisions that were made after the one on this step.

        Returns:
            The origin in results of each draft; "" without one.
        """
        decision = self._decisions[-1 - later] if later < len(self._decisions) else Drafts()
        sources, outcomes = list[str](), dict[tuple[str, int, int, int], int]()
        origins, longest = decision.origins, decision.longest
        for step in steps:
            drafted = step.drafted
            origin = origins.pop(step.sample_id, None) if drafted else None
            if origin is None:
                sources.append("")
                continue
            name, source = origin
            sources.append(source)
            outcome = (source, drafted, longest(step.sample_id, drafted), step.accepted)
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
            if name in self._learning:
                drafter, guard = self._guarded[name]
                guard.call(None, drafter.learn, step.sample_id, drafted, step.accepted)
        for (source, drafted, most, accepted), count in outcomes.items():
            self.metrics.verified(source, drafted, accepted, count)
            self._planner.call(None, self.plan.verified, source, most, accepted, count)
        return sources

    def _choose(self, samples: Samples, proposals: ProposalsByName, rows: int) -> Drafts:
        """Return the planner's drafts of the next step; ValueError if the samples have no room for them."""
        made = self.plan.choose(samples, proposals, rows)
        if made.tokens:
            rooms = {sample.sample_id: sample.room for sample in samples}
            for sample_id, tokens in made.tokens.items():
                if not 0 < len(tokens) <= rooms.get(sample_id, 0):
                    raise ValueError(f"{len(tokens)} draft tokens, room for {rooms.get(sample_id, 0)}")
            if made.tokens.keys() != made.origins.keys() or (
                {name for name, _ in made.origins.values()} - proposals.keys()
            ):
                raise ValueError(f"{len(made.tokens)} drafts, and some without an origin")
        if isnan(made.saved) or (made.tokens and len(samples) + made.count > rows):
            raise ValueError(f"{made.count} draft tokens in {rows} rows, which save {made.saved} s")
        return made

    def _proposals(self, samples: Samples) -> dict[str, Proposals]:
        """Return the proposals of the drafters that are wanted and have any, by name."""
        found: dict[str, Proposals] = {}
        for name, (drafter, guard) in self._guarded.items():
            wanted = self._planner.call(False, self.plan.wants, name, samples)
            if wanted is True or (wanted and any(wanted)):
                made = guard.call(None, self._propose, drafter, samples, found)
                if made is not None:
                    found[name] = made if wanted is True else made.only(wanted)
        return found

    def _propose(self, drafter: TokenDrafter, samples: Samples, others: ProposalsByName) -> Proposals | None:
        """Return a drafter's proposals for all samples; ValueError if they break the rules."""
        # For all samples, because a drafter must learn the same whichever samples share a step.
        window = self.plan.window
        made: Any = drafter.propose(samples, window, others)
        if made is None:
            return None
        if not isinstance(made, Proposals):
            raise ValueError(f"{type(made).__name__} instead of proposals")
        tokens, acceptance, n = made.tokens, made.acceptance, len(samples)
        if tokens.ndim != 2 or len(tokens) != n or not 0 < tokens.shape[1] <= window:
            raise ValueError(f"proposals of shape {tokens.shape} for {n} samples of 1 to {window} tokens")
        if acceptance.shape != tokens.shape:
            raise ValueError(f"predictions of shape {acceptance.shape} for tokens of shape {tokens.shape}")
        if tokens.dtype.kind not in "iu" or not within(tokens, self.vocab_size - 1):
            raise ValueError(f"a token outside the vocabulary of {self.vocab_size}")
        if acceptance.dtype.kind != "f" or not within(acceptance, 1):
            raise ValueError("a prediction that is no probability")
        if len(made.sources) not in (0, n) or set(map(type, made.sources)) - {str}:
            raise ValueError("sources that are no names")
        made.check(n, self.vocab_size)
        return made
