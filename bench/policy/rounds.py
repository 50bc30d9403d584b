"""Run timed rounds on a live engine: the loop of an instance without its streams."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING, Any

from bench.worker import UncountedDrafts
from services.contracts.knobs import Knobs
from services.contracts.sampling import Sampling
from services.generation.draft_cache.origin import Origin
from services.generation.drafters.reference.drafter import ReferenceDrafter
from services.generation.engine.types import EngineRequest
from services.generation.speculation.decision import PlanDecision
from services.generation.speculation.drafter import DraftContext
from services.generation.speculation.plan import FixedLengthPlanner
from services.generation.speculation.planner import KnobDrivenPlanner, OriginOf
from services.generation.speculation.selection import draft_token_counts
from services.generation.speculation.speculation import DraftPlanner, Speculation
from services.step_time.estimator import StepTimeEstimator
from services.step_time.sweep import MeasuredStep

if TYPE_CHECKING:
    from services.generation.engine.core import Engine

WINDOW, _MARGIN = 16, 0.02
_PROMPT = 8
# Number of samples that together verify as many rows as a large batch.
_SHARED = 4


@dataclass(slots=True)
class MeasuredRound:
    """Responses of a batch and the processor time of decoding it, drafters and planning included."""

    responses: dict[str, list[int]]
    seconds: float = 0.0
    steps: int = 0


@dataclass(slots=True)
class RoundOrigin:
    """Origin of the samples of a round, which modes see as a step of a run."""

    step: int = 0

    def __call__(self, sample_id: str) -> Origin:
        """Return the origin of a sample."""
        return Origin("bench", step=self.step)


@dataclass(slots=True)
class StepErrors:
    """Relative errors of predicted step times. Replaces a planner's metrics, which would take time as well."""

    errors: list[float] = field(default_factory=list)

    def planned(self, decision: PlanDecision) -> None:
        """Do nothing."""

    def predicted(self, predicted: float, measured: float) -> None:
        """Record the error of a step."""
        self.errors.append(abs(predicted / measured - 1))


def requests_of(samples: int, tokens: int, vocab: int) -> list[EngineRequest]:
    """Return a batch of random prompts whose responses end one after the other, as in a real step.

    The longest have `tokens` tokens, the shortest half as many.
    """
    random = Random(samples)
    return [
        EngineRequest(
            f"{i}",
            tuple(random.randrange(3, vocab) for _ in range(_PROMPT)),
            (),
            Sampling(max_tokens=random.randint(tokens // 2, tokens), ignore_eos=True),
            random.getrandbits(60),
        )
        for i in range(samples)
    ]


def with_drafts(
    requests: Sequence[EngineRequest],
    truth: Mapping[str, Sequence[int]],
    wrong: float,
    vocab: int,
    turn: int = 0,
) -> list[EngineRequest]:
    """Return the requests with their true responses as references, of which a share of the tokens is wrong.

    Each turn has other wrong tokens, because it is chance which draft length needs the fewest steps for the same
    few.
    """
    random = Random(f"{len(requests)} {turn}")
    return [
        replace(request, given=spoilt(truth[request.sample_id], wrong, vocab, random)) for request in requests
    ]


def spoilt(tokens: Sequence[int], wrong: float, vocab: int, random: Random) -> tuple[int, ...]:
    """Return a response in which a share of the tokens is replaced."""
    return tuple(
        (token + random.randrange(1, vocab)) % vocab if random.random() < wrong else token for token in tokens
    )


def fixed(length: int, vocab: int) -> Speculation:
    """Return speculation that always drafts `length` tokens."""
    return _speculation(FixedLengthPlanner(length), vocab)


def steered(
    sweep: Sequence[MeasuredStep], mode: Any, cap: int, vocab: int, origin_of: OriginOf, metrics: Any = None
) -> Speculation:
    """Return the speculation of an instance with these knobs."""
    return _speculation(planner_of(sweep, mode, cap, origin_of, metrics), vocab)


def planner_of(
    sweep: Sequence[MeasuredStep], mode: Any, cap: int, origin_of: OriginOf, metrics: Any = None
) -> KnobDrivenPlanner:
    """Return the planner of an instance that knows only its sweep."""
    knobs = Knobs(mode=mode, draft_cap=cap, margin=_MARGIN)
    return KnobDrivenPlanner(knobs, StepTimeEstimator(sweep), origin_of, metrics=metrics)


def _speculation(plan: DraftPlanner, vocab: int) -> Speculation:
    return Speculation([ReferenceDrafter()], plan, vocab, UncountedDrafts(), time.process_time)


def make_kernels(engine: Engine, samples: int) -> None:
    """Run one step for each number of verified tokens that plans of `samples` samples use.

    A CPU's kernels are built when a number of rows first occurs, which takes as long as several steps. This happens
    once in a process and must not count for a plan.
    """
    sampling = Sampling(max_tokens=engine.limits.max_model_len - 1, ignore_eos=True)
    names = [f"rows-{i}" for i in range(_SHARED)]
    for i, name in enumerate(names):
        engine.add(EngineRequest(name, (i,), (), sampling, i))
    while len(engine.decoding()) < len(names):
        engine.step()
    for rows in draft_token_counts(0, min(engine.row_capacity, samples * (1 + WINDOW)))[1:].tolist():
        each, more = divmod(max(0, rows - len(names)), len(names))
        engine.put_drafts(
            {name: [0] * (each + (i < more)) for i, name in enumerate(names) if each or i < more}
        )
        engine.step()
    engine.abort(names)
    while engine.has_work:
        engine.step()


def run_round(
    engine: Engine, requests: Sequence[EngineRequest], speculation: Speculation | None
) -> MeasuredRound:
    """Decode a batch, timed from the first step in which all of its samples decode."""
    measured = MeasuredRound({request.sample_id: [] for request in requests})
    for request in requests:
        engine.add(request)
        if speculation is not None:
            speculation.begin(DraftContext(request.sample_id, request.prompt, request.given))
    while len(engine.decoding()) < len(requests):
        _record(measured, engine.step(), speculation)
    began = time.process_time()
    while engine.has_work:
        _step(engine, measured, speculation)
    measured.seconds = time.process_time() - began
    return measured


def _step(engine: Engine, measured: MeasuredRound, speculation: Speculation | None) -> None:
    shape = None
    measured.steps += 1
    if speculation is not None:
        states = engine.decoding()
        drafts = speculation.drafts(states, engine.row_capacity)
        engine.put_drafts(drafts)
        shape = speculation.shape(states, drafts)
    began = time.process_time()
    steps = engine.step()
    seconds = time.process_time() - began
    if speculation is not None and shape is not None:
        speculation.stepped(shape, seconds)
    _record(measured, steps, speculation)


def _record(measured: MeasuredRound, steps: Sequence[Any], speculation: Speculation | None) -> None:
    if speculation is not None:
        speculation.learn(steps)
    for step in steps:
        measured.responses[step.sample_id] += step.token_ids
        if speculation is not None and step.finish is not None:
            speculation.end(step.sample_id, measured.responses[step.sample_id])
