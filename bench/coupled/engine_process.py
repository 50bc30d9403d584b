"""Run measured rounds on request, in a separate process with an engine.

All engines of a benchmark stay up and share a core. Only one works at a time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple

from bench.report import cores
from bench.worker import PipedWorker, UncountedDrafts
from services.generation.engine.types import EngineOptions, EngineRequest, EngineSampleState, SampleStep


@dataclass(frozen=True, slots=True)
class EngineRound:
    """Requests, at most `in_flight` at once. `drafter` is "", given or suffix, with at most `window` tokens."""

    requests: Sequence[EngineRequest]
    in_flight: int
    drafter: str = ""
    window: int = 8
    time_noise: bool = False


class RunnerUp(NamedTuple):
    """The token that lost to the drawn one, and the nats by which it lost, noise included."""

    token: int
    margin: float


@dataclass(slots=True)
class EngineMeasurement:
    """Figures of a round.

    `step_seconds` has only the steps in which all samples in flight decoded. `step_rows` has the rows of each of
    these: its samples and their draft tokens.
    """

    responses: dict[str, list[int]] = field(default_factory=dict)
    runners_up: dict[str, list[RunnerUp]] = field(default_factory=dict)
    """Runner-up of each token, for requests with `near_ties`."""
    steps: int = 0
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    step_seconds: list[float] = field(default_factory=list)
    step_rows: list[int] = field(default_factory=list)
    noise_seconds: float = 0.0
    all_steps_seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """Return the number of response tokens."""
        return sum(map(len, self.responses.values()))


class EngineProcess(PipedWorker):
    """A process with an engine. WorkerFailed if the engine cannot be built, or a round fails."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(_build, options)

    def run(self, order: EngineRound) -> EngineMeasurement:
        """Run a round and return its figures."""
        measured: EngineMeasurement = self.ask(order)
        return measured


def _build(options: EngineOptions) -> Callable[[EngineRound], EngineMeasurement]:
    core = str(cores()[-1])
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": core, "HF_HUB_OFFLINE": "1"}
    # vLLM's n-gram drafter is compiled for several threads. On a single core they would only wait for each other.
    os.environ["NUMBA_NUM_THREADS"] = "1"
    from services.generation.engine.core import Engine
    from services.generation.engine.startup import warm_up

    if options.vllm_speculation is not None:
        from vllm.v1.sample import rejection_sampler

        from bench.rollout.told_tokens import expand_batch_to_tokens

        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    engine = Engine(options)
    if options.coupled:
        warm_up(engine)
    clock, serials = _NoiseClock(options.coupled), count(1)
    return lambda order: _run(engine, order, next(serials), clock)


class _NoiseClock:
    """Measure the time of the arg-max with its noise while it is switched on."""

    def __init__(self, coupled: bool) -> None:
        self.seconds = 0.0
        self._plain: Any = None
        self._module: Any = None
        if coupled:
            from kernels.coupled_sampler import sample

            self._module, self._plain = sample, sample.draw_tokens

    def switch(self, on: bool) -> None:
        """Start or stop timing."""
        self.seconds = 0.0
        if self._plain is not None:
            self._module.draw_tokens = self._timed if on else self._plain

    def _timed(self, *arguments: Any) -> Any:
        began = time.perf_counter()
        result = self._plain(*arguments)
        self.seconds += time.perf_counter() - began
        return result


def _speculation(order: EngineRound, vocab_size: int) -> Any:
    if not order.drafter:
        return None
    from kernels.suffix_index import warm_up
    from services.generation.drafters.reference.drafter import ReferenceDrafter
    from services.generation.drafters.suffix import SuffixDrafter
    from services.generation.speculation.plan import FixedLengthPlanner
    from services.generation.speculation.speculation import Speculation

    warm_up()
    drafter = ReferenceDrafter() if order.drafter == "reference" else SuffixDrafter()
    # The floor is the default of an instance.
    return Speculation([drafter], FixedLengthPlanner(order.window, 0.3), vocab_size, UncountedDrafts())


def _run(engine: Any, order: EngineRound, serial: int, clock: _NoiseClock) -> EngineMeasurement:
    """Run the loop of an instance without its streams, and return the figures."""
    from services.generation.speculation.drafter import DraftContext

    speculation = _speculation(order, engine.limits.vocab_size)
    waiting = [replace(request, sample_id=f"{serial}/{request.sample_id}") for request in order.requests]
    waiting.reverse()
    measured = EngineMeasurement()
    running: set[str] = set()
    clock.switch(order.time_noise)
    began = time.perf_counter()
    while waiting or running:
        arrived = bool(waiting) and len(running) < order.in_flight
        while waiting and len(running) < order.in_flight:
            request = waiting.pop()
            running.add(request.sample_id)
            measured.responses[request.sample_id.partition("/")[2]] = []
            engine.add(request)
            if speculation is not None:
                speculation.begin(DraftContext(request.sample_id, request.prompt, request.given))
        step_began = time.perf_counter()
        drafts: Mapping[str, Sequence[int]] = {}
        if speculation is not None:
            states: list[EngineSampleState] = engine.decoding()
            drafts = speculation.drafts(states, engine.row_capacity)
            engine.put_drafts(drafts)
        steps: list[SampleStep] = engine.step()
        took = time.perf_counter() - step_began
        measured.all_steps_seconds += took
        if not arrived and len(running) == order.in_flight:
            measured.step_seconds.append(took)
            measured.step_rows.append(len(running) + sum(map(len, drafts.values())))
        for step in steps:
            _record(measured, step, running, speculation)
        measured.steps += 1
    measured.seconds = time.perf_counter() - began
    measured.noise_seconds = clock.seconds
    clock.switch(False)
    return measured


def _record(measured: EngineMeasurement, step: SampleStep, running: set[str], speculation: Any) -> None:
    name = step.sample_id.partition("/")[2]
    measured.responses[name] += step.token_ids
    measured.runners_up.setdefault(name, []).extend(map(RunnerUp, step.top_token_ids, step.top_logprobs))
    measured.drafted += step.drafted
    measured.accepted += step.accepted
    if speculation is not None:
        speculation.learn([step])
    if step.finish is not None:
        running.discard(step.sample_id)
        if speculation is not None:
            speculation.end(step.sample_id, measured.responses[name])
