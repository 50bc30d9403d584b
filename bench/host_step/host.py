"""Processor time of the engine loop outside of vLLM's core, step by step, and the functions that a step enters."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists

from services.contracts.knobs import Knobs
from services.contracts.sampling import ModelLimits, Sampling
from services.generation.draft_cache.cache import DraftCache
from services.generation.draft_cache.origin import Origin
from services.generation.drafters.reference.drafter import ReferenceDrafter
from services.generation.drafters.suffix import SuffixDrafter
from services.generation.engine.core import Engine
from services.generation.engine.core_steps import CoreSteps
from services.generation.engine.migration import EngineMigration
from services.generation.engine.model_support import ModelSupport
from services.generation.engine.sampling.outputs import pack
from services.generation.engine.text import StopStrings
from services.generation.engine.types import EngineRequest
from services.generation.engine.vllm_requests import PrefixHits, VllmRequests
from services.generation.loop.engine_loop import EngineLoop
from services.generation.loop.metrics import EngineMetrics
from services.generation.loop.sample_drafts import SampleDrafts
from services.generation.loop.samples import SampleTable
from services.generation.loop.work_stream import WorkStream
from services.generation.speculation import acceptance, selection
from services.generation.speculation.drafter import TokenDrafter
from services.generation.speculation.plan import FixedLengthPlanner
from services.generation.speculation.planner import KnobDrivenPlanner
from services.generation.speculation.speculation import Speculation
from services.simulator.device_tables import DeviceTable, swept
from services.step_time.estimator import StepTimeEstimator
from services.step_time.estimator import warm_up as warm_up_estimator

Tokens = NDArray[np.int32]
StepSeconds = Callable[[int, int, int], float]
"""Returns the seconds of a step by its samples, verified tokens, and context in tokens."""


class KnownTextCore:
    """Core that verifies drafts against the known text of each sample. `seconds` is its clock."""

    def __init__(self, texts: Mapping[str, Tokens], step_seconds: StepSeconds, most_rows: int) -> None:
        """Decode `texts`, by sample, in steps of at most `most_rows` verified tokens."""
        self._texts = texts
        self._step_seconds = step_seconds
        self.seconds = 0.0
        self.requests: dict[str, Any] = {}
        self.scheduler: Any = SimpleNamespace(
            requests=self.requests,
            running=[],
            waiting=[],
            max_num_running_reqs=len(texts),
            max_num_scheduled_tokens=most_rows,
            has_requests=lambda: bool(self.requests),
            kv_cache_config=SimpleNamespace(kv_cache_groups=[]),
            kv_cache_manager=SimpleNamespace(usage=0.5, get_computed_blocks=None, block_pool=None),
        )

    def add_request(self, request: Any) -> None:
        """Add a sample whose prompt is computed already."""
        request.num_computed_tokens = request.num_tokens - 1
        self.requests[request.request_id] = request
        self.scheduler.running.append(request)

    def step(self) -> tuple[dict[int, Any], bool]:
        """Decode every sample; the clock moves by the time of the step."""
        running = self.scheduler.running
        found = [self._decoded(request) for request in running]
        drafted = np.array([each for each, _ in found])
        accepted = np.array([len(tokens) - 1 for _, tokens in found])
        width = int(drafted.max()) + 1
        shape = (len(found) * width, 1)
        whole = LogprobsLists(
            np.zeros(shape, np.int32),
            np.full(shape, -0.5, np.float32),
            pack(drafted, accepted, np.zeros_like(drafted), width),
        )
        outputs = []
        for place, (request, (_, tokens)) in enumerate(zip(running, found, strict=True)):
            request.append_output_token_ids(tokens)
            request.num_computed_tokens += len(tokens)
            request.spec_token_ids = []
            logprobs = whole.slice_request(place * width, len(tokens))
            outputs.append(EngineCoreOutput(request.request_id, tokens, new_logprobs=logprobs))
        context = sum(request.num_tokens for request in running)
        self.seconds += self._step_seconds(len(found), len(found) + int(drafted.sum()), context)
        return {0: SimpleNamespace(outputs=outputs)}, True

    def _decoded(self, request: Any) -> tuple[int, list[int]]:
        """Return the number of draft tokens of a sample, and the tokens that it emits."""
        draft: Sequence[int] = request.spec_token_ids
        begin = request.num_output_tokens
        coming: list[int] = self._texts[request.request_id][begin : begin + len(draft) + 1].tolist()
        if len(coming) <= len(draft):
            raise ValueError(f"the text of {request.request_id} has ended")
        kept = next((i for i, token in enumerate(draft) if token != coming[i]), len(draft))
        return len(draft), coming[: kept + 1]


class KnownTextEngine(Engine):
    """Engine over a `KnownTextCore`; all that happens between two calls of the core is the real code."""

    def __init__(self, core: KnownTextCore, limits: ModelLimits) -> None:
        self._core = core
        self._scheduler = core.scheduler
        self.support = ModelSupport()
        self.form = None
        self.asleep = False
        self.limits = limits
        self.graph_sizes = ()
        self.model_drafts = {}
        self._steps = CoreSteps(core, coupled=True)
        self._stops = StopStrings(None)
        self._hits = PrefixHits(core.scheduler)
        self._requests = VllmRequests(limits, None, self._stops, self._hits, coupled=True)
        self.migration = EngineMigration(core, self._requests.request, self._stops, True)


WINDOW, PROMPT, LENGTH = 16, 512, 8192
_WRONG = 0.02
"""Share of the reference's tokens that are wrong; after each the text continues as before."""
_FLUSH_SECONDS = 0.05
_UNMEASURED = 40
"""First steps, in which caches fill and the planner explores."""
_RUN = "run"


@dataclass(frozen=True, slots=True)
class HostCase:
    """A batch of samples of a model with this vocabulary; `drafters` are among reference and suffix."""

    samples: int
    vocabulary: int
    drafters: tuple[str, ...] = ("reference",)


@dataclass(slots=True)
class HostTimes:
    """Microseconds of processor time of each step by part, tokens of all steps, and functions of one step."""

    drafting: list[float] = field(default_factory=list)
    """Drafting and planning, until the engine's step begins."""
    engine: list[float] = field(default_factory=list)
    """Before and after vLLM's core within the engine's step."""
    rest: list[float] = field(default_factory=list)
    """Recording the outcome, and the loop itself."""
    tokens: int = 0
    functions: int = 0
    calls: int = 0

    @property
    def whole(self) -> list[float]:
        """Return the microseconds of each step."""
        return [sum(each) for each in zip(self.drafting, self.engine, self.rest, strict=True)]

    def figures(self) -> dict[str, float]:
        """Return the medians."""
        return {
            "host_us": median(self.whole),
            "drafting_us": median(self.drafting),
            "engine_us": median(self.engine),
            "loop_us": median(self.rest),
            "tokens_per_step": self.tokens / len(self.rest),
            "functions": self.functions,
            "calls": self.calls,
        }


def warm_up() -> None:
    """Compile or load what steps call."""
    acceptance.warm_up()
    selection.warm_up()
    warm_up_estimator()


def measure(case: HostCase, device: DeviceTable, steps: int) -> HostTimes:
    """Return the times of `steps` steps of a batch, after some that are not measured."""
    loop, core = running_loop(case, device)
    found = HostTimes()
    meter = StepMeter(found, core, loop)
    for _ in range(min(steps, _UNMEASURED)):
        loop._turn()
    # As an instance does before it serves.
    gc.collect()
    gc.freeze()
    before = sum(request.num_output_tokens for request in core.requests.values())
    with meter.on():
        for _ in range(steps):
            meter.turn()
    found.tokens = sum(request.num_output_tokens for request in core.requests.values()) - before
    entered = _entered(loop._turn, core)
    found.functions, found.calls = len(set(entered)), len(entered)
    return found


class StepMeter:
    """Reads the thread's processor time where a step passes from one part to the next."""

    def __init__(self, times: HostTimes, core: KnownTextCore, loop: EngineLoop) -> None:
        self._times, self._core, self._loop = times, core, loop
        self._marks: list[int] = []

    @contextmanager
    def on(self) -> Iterator[None]:
        """Watch the calls of the core and of the engine."""
        core, engine = self._core, self._loop._engine
        core.step = self._marked(core.step)  # type: ignore[method-assign]
        engine.step = self._marked(engine.step)  # type: ignore[method-assign]
        try:
            yield
        finally:
            del core.step, engine.step  # type: ignore[misc]

    def turn(self) -> None:
        """Run and measure a turn of the loop."""
        marks = self._marks
        marks.clear()
        marks.append(time.thread_time_ns())
        self._loop._turn()
        marks.append(time.thread_time_ns())
        begun, engine, core, left, ended, last = marks
        self._times.drafting.append((engine - begun) / 1e3)
        self._times.engine.append((core - engine + ended - left) / 1e3)
        self._times.rest.append((last - ended) / 1e3)

    def _marked(self, function: Callable[[], Any]) -> Callable[[], Any]:
        marks, now = self._marks, time.thread_time_ns

        def called() -> Any:
            marks.append(now())
            found = function()
            marks.append(now())
            return found

        return called


def _entered(turn: Callable[[], None], core: KnownTextCore) -> list[str]:
    """Return the Python functions that a turn calls outside of the core, in order."""
    names, inside = list[str](), False

    def watch(frame: FrameType, event: str, _: Any) -> None:
        nonlocal inside
        if frame.f_code is KnownTextCore.step.__code__:
            inside = event == "call"
        elif event == "call" and not inside:
            names.append(f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}")

    sys.setprofile(watch)
    try:
        turn()
    finally:
        sys.setprofile(None)
    return names


def running_loop(case: HostCase, device: DeviceTable) -> tuple[EngineLoop, KnownTextCore]:
    """Return the loop of an instance in which the samples run, and its core. Its thread is the caller's."""
    random = np.random.default_rng(case.samples)
    texts = random.integers(0, case.vocabulary, (case.samples, LENGTH), np.int32)
    wrong = random.random(texts.shape) < _WRONG
    references = np.where(wrong, (texts + 1) % case.vocabulary, texts)
    metrics = EngineMetrics(CollectorRegistry())
    names = [f"s{place}" for place in range(case.samples)]
    core = KnownTextCore(dict(zip(names, texts, strict=True)), device.seconds, device.most_rows)
    limits = ModelLimits(case.vocabulary, PROMPT + LENGTH, False, (0,))
    samples = SampleTable(metrics.background)
    engine = KnownTextEngine(core, limits)
    drafts = SampleDrafts(
        metrics, DraftCache(case.vocabulary, 0), _speculation(case, device, metrics, samples)
    )
    loop = EngineLoop(
        lambda: (engine, drafts),
        metrics,
        samples,
        flush_interval=_FLUSH_SECONDS,
        max_waiting=1,
        clock=lambda: core.seconds,
    )
    # The loop's own thread would set these when it begins.
    loop._engine, loop.drafts = engine, drafts
    loop.ready.set_result(engine)
    stream = WorkStream(asyncio.new_event_loop())
    loop.open(stream)
    sampling, prompts = Sampling(ignore_eos=True), random.integers(0, case.vocabulary, (case.samples, PROMPT))
    for place, name in enumerate(names):
        request = EngineRequest(
            name,
            tuple(prompts[place].tolist()),
            (),
            sampling,
            place,
            given=tuple(references[place].tolist()) if case.drafters else (),
            prompt_id=f"p{place // 8}",
        )
        loop.start_sample(stream, place, request, Origin(_RUN, f"p{place // 8}", place % 8, 1))
    return loop, core


def _speculation(
    case: HostCase, device: DeviceTable, metrics: EngineMetrics, samples: SampleTable
) -> Speculation | None:
    if not case.drafters:
        return None
    made: dict[str, Callable[[], TokenDrafter]] = {"reference": ReferenceDrafter, "suffix": SuffixDrafter}
    planner = KnobDrivenPlanner(
        Knobs(draft_cap=WINDOW),
        StepTimeEstimator(swept(device, max(case.samples, 2), noise=0.0)),
        samples.origin_of,
        fixed=FixedLengthPlanner(WINDOW),
        metrics=metrics.planner,
        graphs=device.graphs,
    )
    return Speculation([made[name]() for name in case.drafters], planner, case.vocabulary, metrics)
