"""A real engine in a process of its own, run through scenarios from a test.

    with EngineHost(EngineOptions(model=str(folder), dtype="float32")) as host:
        plain = host.run(Scenario(requests))
        again = host.run(Scenario(requests, Drafts("true", truth=plain.tokens)))

Starting one takes seconds, so many scenarios share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry

from services.contracts.knobs import Knobs
from services.contracts.modes import MODES
from services.contracts.rollout import RolloutKind, StoredRollout
from services.generation.draft_cache.lenient_reuse import Reuse
from services.generation.draft_cache.origin import NOWHERE
from services.generation.engine.draft_forms import FORMS
from services.generation.engine.environment import V2
from services.generation.engine.experiments.trees.tree import forked
from services.generation.engine.sampling.outputs import PromptScores
from services.generation.engine.types import EngineOptions, EngineRequest, Finish
from services.generation.loop.metrics import EngineMetrics
from services.generation.loop.sample_drafts import SampleDrafts
from services.generation.speculation.drafter import DraftContext, NewRollouts
from services.generation.speculation.plan import FixedLengthPlanner
from services.generation.speculation.planner import KnobDrivenPlanner
from services.generation.speculation.speculation import Speculation
from tests.support.census import Census, Sequences, take_census
from tests.support.draft_policies import Drafting, Drafts
from tests.support.engine_process import EngineProcess
from tests.support.step_times import KnownStepTime, settled

# Generous: machines that run tests are shared.
_START_SECONDS = 300
_RUN_SECONDS = 300
_serials = count(1)
_NO_LOGPROBS = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Samples and how they are run. Request i arrives before step `arrivals[i]`, by default all before the first.

    `cold` drops all KV beforehand, so that nothing is found in the prefix cache. Samples that follow a cached
    rollout verify `chunk` tokens of it a step, if `budget` rows a step allow that; 0: one token a step, undrafted.
    `served`: drafts as in an instance's loop, whose drafter is given the truth, under a plan of fixed length. With
    `branches` it is the suffix drafter, with so many of them, in mode planner: it knows pieces of each response, of
    which most are wrong in every tenth token.
    """

    requests: tuple[EngineRequest, ...]
    drafts: Drafts = field(default_factory=Drafts)
    arrivals: tuple[int, ...] = ()
    cold: bool = True
    chunk: int = 0
    budget: int = 1 << 20
    served: bool = False
    branches: int | None = None


@dataclass(slots=True)
class Outcome:
    """What came out, by sample id; a prefix is not repeated in the tokens. `scheduled` counts rows of the model.

    `outputs` counts pairs of a step and a sample that it gave tokens to; `began` is the step of its first ones, and
    `cached` counts the tokens of its context whose KV was there.
    """

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[float]] = field(default_factory=dict)
    finishes: dict[str, Finish] = field(default_factory=dict)
    stop_strings: dict[str, str] = field(default_factory=dict)
    top_token_ids: dict[str, list[int]] = field(default_factory=dict)
    top_logprobs: dict[str, list[float]] = field(default_factory=dict)
    prompts: dict[str, PromptScores] = field(default_factory=dict)
    reused: dict[str, int] = field(default_factory=dict)
    verified: dict[str, list[float]] = field(default_factory=dict)
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    most_running: int = 0
    scheduled: int = 0
    outputs: int = 0
    began: dict[str, int] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)


class EngineHost(EngineProcess):
    """The parent's side. A context manager: the process ends with it."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(_serve, options, v2=options.engine == V2)
        try:
            self.vocab_size: int
            self.row_capacity: int
            self.vocab_size, self.row_capacity = self.answer(_START_SECONDS)
        except BaseException:
            self.kill()
            raise

    def run(self, scenario: Scenario) -> Outcome:
        """Run a scenario to its end."""
        self.pipe.send(scenario)
        outcome: Outcome = self.answer(_RUN_SECONDS)
        return outcome

    def count(self, census: Census) -> Sequences:
        """Take very many short samples."""
        self.pipe.send(census)
        sequences: Sequences = self.answer(_RUN_SECONDS)
        return sequences


def _serve(pipe: Connection[Any, Any], options: EngineOptions) -> None:
    """The child: build the engine, answer scenarios until the pipe closes."""
    from services.generation.engine.core import Engine

    engine = Engine(options)
    pipe.send((engine.limits.vocab_size, engine.row_capacity))
    while True:
        order = pipe.recv()
        if isinstance(order, Census):
            pipe.send(take_census(engine, order, next(_serials), engine.max_running))
        else:
            pipe.send(run_scenario(engine, order))


def _served(engine: Any, scenario: Scenario) -> SampleDrafts:
    """Return the drafts of an instance's loop."""
    # Imports numba, which vLLM must come before.
    from services.generation.drafters.reference.drafter import ReferenceDrafter

    metrics = EngineMetrics(CollectorRegistry())
    if scenario.branches is not None:
        return SampleDrafts(metrics, speculation=_branching(scenario, engine.limits.vocab_size, metrics))
    plan = FixedLengthPlanner(scenario.drafts.window)
    speculation = Speculation([ReferenceDrafter()], plan, engine.limits.vocab_size, metrics)
    return SampleDrafts(metrics, speculation=speculation)


def _branching(scenario: Scenario, vocab_size: int, metrics: EngineMetrics) -> Speculation:
    """Return the suffix drafter with branches, in mode planner."""
    # Import numba, which vLLM must come before.
    from kernels.suffix_index import SuffixIndex
    from services.generation.experiments.trees.planning import ForkingSuffixDrafter

    drafter = ForkingSuffixDrafter(SuffixIndex(max_tokens=1_000_000, floor=0.02))
    drafter.alternatives = scenario.branches or 0
    planner = KnobDrivenPlanner(
        Knobs(mode="planner", draft_cap=scenario.drafts.window, margin=0.0),
        KnownStepTime(),  # type: ignore[arg-type]
        lambda _: NOWHERE,
        exploration=settled(),
        modes={
            **MODES,
            **{name: replace(MODES[name], place=place) for name, place in FORMS[0].modes.items()},
        },
    )
    # What drafting takes, compiling included, is not to keep it from drafting.
    return Speculation([drafter], planner, vocab_size, metrics, clock=lambda: 0.0)


def _pieces(prompt_id: str, truth: Sequence[int], vocab_size: int) -> list[StoredRollout]:
    """Return pieces of a response around every tenth token: two that are right there, and three that are not."""
    texts = list[Sequence[int]]()
    for place in range(10, len(truth), 10):
        before, wrong = truth[max(place - 12, 0) : place], (truth[place] + 1) % vocab_size
        texts += [[*before, *truth[place : place + 8]]] * 2 + [[*before, wrong]] * 3
    return [
        StoredRollout(
            "r", prompt_id, n, 0, RolloutKind.HISTORY, 0, n, np.array(text, np.uint32), _NO_LOGPROBS, True
        )
        for n, text in enumerate(texts)
    ]


def _followed_samples(worker: Any) -> int:
    return len(getattr(worker.model_runner, "_followed", ()))


def _prompts_in_reading(worker: Any) -> int:
    return sum(not each.told for each in getattr(worker.model_runner, "_prompts", {}).values())


def _count_scheduled(scheduler: Any, found: Outcome) -> None:
    """Let vLLM's scheduler add what it schedules to an outcome."""
    schedule = type(scheduler).schedule

    def counted(*args: Any, **kwargs: Any) -> Any:
        output = schedule(scheduler, *args, **kwargs)
        found.scheduled += output.total_num_scheduled_tokens
        return output

    scheduler.schedule = counted


def run_scenario(engine: Any, scenario: Scenario) -> Outcome:
    """Run a scenario in an engine of this process."""
    return _Run(engine, scenario, next(_serials)).outcome()


class _Run:
    """One scenario in the engine. Ids get a serial in front: vLLM must never meet the same one twice."""

    def __init__(self, engine: Any, scenario: Scenario, serial: int) -> None:
        self._engine = engine
        self._scenario = scenario
        self._prefix = f"{serial}/"
        self._drafting = Drafting(scenario.drafts, engine.limits.vocab_size)
        self._reuse = Reuse(scenario.chunk)
        self._preempted: dict[str, int] = {}
        self._found = Outcome()
        self._served = _served(engine, scenario) if scenario.served else None

    def outcome(self) -> Outcome:
        """Run it."""
        engine, scenario = self._engine, self._scenario
        if scenario.cold:
            engine.forget_kv()
        waiting = sorted(
            zip(scenario.arrivals or [0] * len(scenario.requests), range(len(scenario.requests)), strict=True)
        )
        found = self._found
        _count_scheduled(engine._scheduler, found)
        while waiting or engine.has_work:
            while waiting and (waiting[0][0] <= found.steps or not engine.has_work):
                self._add(scenario.requests[waiting.pop(0)[1]])
            if self._served is not None:
                self._served.put(engine)
            elif scenario.drafts.policy != "none" or self._reuse:
                engine.put_drafts(forked(self._drafts(), self._parents()))
            self._step()
        found.preemptions = sum(self._preempted.values())
        assert not self._reuse, "a sample is followed after its end"
        assert not engine._requests.cached_logprobs
        assert not engine._stops
        assert not any(engine._core.collective_rpc(_followed_samples))
        assert not any(engine._core.collective_rpc(_prompts_in_reading))
        return found

    def _add(self, request: EngineRequest) -> None:
        self._found.tokens[request.sample_id] = []
        self._found.logprobs[request.sample_id] = []
        self._found.verified[request.sample_id] = []
        self._found.reused[request.sample_id] = 0
        own = {name: getattr(request, name) for name in EngineRequest.__slots__}
        known = EngineRequest(**own | {"sample_id": self._prefix + request.sample_id})
        self._engine.add(known)
        if self._served is not None and self._served.speculation is not None:
            truth, name = self._scenario.drafts.truth[request.sample_id], request.sample_id
            speculation = self._served.speculation
            if self._scenario.branches is None:
                speculation.begin(DraftContext(known.sample_id, known.prompt, truth))
            else:
                speculation.begin(
                    DraftContext(known.sample_id, known.prompt, prompt_id=name, run_id="r", seed=9999)
                )
                speculation.add_rollouts(NewRollouts(_pieces(name, truth, self._engine.limits.vocab_size)))
        if self._scenario.chunk:
            self._reuse.begin(known)

    def _drafts(self) -> dict[str, Sequence[int]]:
        decoding = self._engine.decoding()
        states = [
            msgspec.structs.replace(state, sample_id=state.sample_id.removeprefix(self._prefix))
            for state in decoding
            if state.sample_id not in self._reuse
        ]
        drafts = {self._prefix + sample_id: tokens for sample_id, tokens in self._drafting(states).items()}
        room = self._scenario.budget - len(decoding) - sum(map(len, drafts.values()))
        return drafts | self._reuse.drafts(decoding, room)

    def _parents(self) -> dict[str, list[int]]:
        return {self._prefix + sample_id: own for sample_id, own in self._drafting.parents.items()}

    def _step(self) -> None:
        found, requests = self._found, self._engine._scheduler.requests
        found.most_running = max(found.most_running, self._engine.load.running)
        for step in self._engine.step():
            sample_id = step.sample_id.removeprefix(self._prefix)
            assert sample_id not in found.finishes, f"{sample_id} goes on after its end"
            assert len(step.token_ids) == len(step.logprobs)
            assert len(step.verified_logprobs) == step.reused
            # A prefix of the response is taken over, and nothing behind it.
            assert not step.reused or found.reused[sample_id] == len(found.tokens[sample_id])
            found.reused[sample_id] += step.reused
            found.verified[sample_id] += step.verified_logprobs
            found.outputs += 1
            self._reuse.learn(step)
            if self._served is not None and self._scenario.branches is not None:
                self._served.learn([step])
            found.began.setdefault(sample_id, found.steps)
            if step.cached_context is not None:
                found.cached.setdefault(sample_id, step.cached_context)
            found.tokens[sample_id] += step.token_ids
            found.logprobs[sample_id] += step.logprobs
            found.top_token_ids.setdefault(sample_id, []).extend(step.top_token_ids)
            found.top_logprobs.setdefault(sample_id, []).extend(step.top_logprobs)
            if step.prompt_scores is not None:
                assert sample_id not in found.prompts, "a prompt is told once"
                found.prompts[sample_id] = step.prompt_scores
            found.drafted += step.drafted
            found.accepted += step.accepted
            if step.finish is not None:
                found.finishes[sample_id] = step.finish
                found.stop_strings[sample_id] = step.stop_string
                self._reuse.end(step.sample_id)
        found.steps += 1
        self._preempted |= {key: request.num_preemptions for key, request in requests.items()}
