"""The thread that owns the engine and steps it.

Everything that touches the engine runs here, between two steps: new samples, aborts, pause, weights. Others
hand in a function (`call`) and get its result as a future.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import grpc
import structlog

from paceline.internal.v1 import generation_pb2 as pb
from paceline.v1 import fleet_pb2
from services.drafts.rollout import Rollout
from services.generation.background import Background
from services.generation.drafting import reuse
from services.generation.drafting.drafter import Arrival, DraftContext
from services.generation.drafting.plan import StepShape
from services.generation.drafting.reuse import Reuse
from services.generation.drafting.speculation import Speculation
from services.generation.engine.types import (
    EngineLoad,
    Finish,
    SampleRequest,
    SampleState,
    SampleStep,
)
from services.generation.metrics import EngineMetrics
from services.generation.rollouts.cache import DraftCache, Shards
from services.generation.rollouts.origin import NOWHERE, Origin
from services.generation.samples import RunningSample, SampleStream
from services.platform.errors import FailedPrecondition, ResourceExhausted, Unavailable

T = TypeVar("T")
_log = structlog.get_logger(__name__)
# Weight of the newest step in the mean step time.
_STEP_TIME_SMOOTHING = 0.05


class StepEngine(Protocol):
    """What the loop uses of `services.generation.engine.core.Engine`."""

    def add(self, request: SampleRequest) -> None: ...
    def finished_by_prefix(self, request: SampleRequest) -> Finish | None: ...
    def abort(self, sample_ids: Iterable[str]) -> None: ...
    def step(self) -> list[SampleStep]: ...
    def decoding(self) -> list[SampleState]: ...
    def put_drafts(self, drafts: Mapping[str, Sequence[int]]) -> None: ...
    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    @property
    def asleep(self) -> bool: ...
    @property
    def has_work(self) -> bool: ...
    @property
    def load(self) -> EngineLoad: ...


class EngineLoop(threading.Thread):
    """Steps the engine while there is work and nobody paused it.

    `factory` builds the engine in this thread; `ready` resolves with it, or with the exception that building
    raised. `broken` resolves when a step raised: streams then have got what there was and ended with
    UNAVAILABLE, and the process should exit.
    """

    def __init__(
        self,
        factory: Callable[[], Any],
        metrics: EngineMetrics,
        *,
        flush_interval: float,
        max_waiting: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name="engine", daemon=True)
        self.ready: Future[Any] = Future()
        self.broken: Future[BaseException] = Future()
        self.paused = False
        # None: nothing is drafted, and the engine runs plain.
        self.speculation: Speculation | None = None
        # Rollouts that samples may follow; None: there are none to be had.
        self.cache: DraftCache | None = None
        self.reuse = Reuse()
        self.background = Background()
        # By sample id, who is told that it leaves the engine, and whether it had finished; for the engine thread.
        self.watchers: dict[str, Callable[[bool], None]] = {}
        self.policy_version = 0
        self.last_progress = clock()
        self._factory = factory
        self._metrics = metrics
        self._flush_interval = flush_interval
        self._max_waiting = max_waiting
        self._clock = clock
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._samples: dict[str, RunningSample] = {}
        self._streams: set[SampleStream] = set()
        self._failure: BaseException | None = None
        self._stopping = False
        # The thread has ended or is about to: commands are answered with an error.
        self._over = False
        self._step_seconds = 0.0
        self._generated = self._steps = self._serial = 0
        self._flushed_at = clock()
        # When the command that is running was asked for.
        self._asked_at = clock()

    # -- from any thread ----------------------------------------------------------------------------------

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function in the engine thread, between two steps. Unavailable when the thread has ended."""
        future: Future[T] = Future()
        asked_at = self._clock()

        def command() -> None:
            self._asked_at = asked_at
            # Whoever asked may have gone away meanwhile, and the future with it.
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._over:
                    raise Unavailable("the engine of this instance has stopped")
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._commands.put(command)
        if self._over:
            self._answer_commands()
        return future

    def fail(self, error: BaseException) -> None:
        """Give the engine up: as if a step had raised, after the command that calls this."""
        self._failure = error

    def stop(self) -> Future[None]:
        """End the thread after what is queued."""
        return self.call(self._end)

    @property
    def load(self) -> fleet_pb2.InstanceLoad:
        """The latest load by real samples; exact between steps, a snapshot otherwise."""
        load = self._engine.load if self.ready.done() and not self.ready.exception() else EngineLoad(0, 0, 0)
        load = self.background.apart(load, self.sample_count)
        return fleet_pb2.InstanceLoad(
            running=load.running,
            waiting=load.waiting,
            kv_usage=load.kv_usage,
            step_seconds=self._step_seconds,
            generated_tokens=self._generated,
            steps=self._steps,
        )

    @property
    def sample_count(self) -> int:
        """Real samples in the engine, running or waiting."""
        return len(self._samples) - len(self.background)

    @property
    def asleep(self) -> bool:
        """Whether the engine sleeps."""
        return self.ready.done() and not self.ready.exception() and self._engine.asleep

    @property
    def busy(self) -> bool:
        """Whether any sample is in the engine."""
        return bool(self._samples)

    # -- in the engine thread, through `call` -------------------------------------------------------------

    def open(self, stream: SampleStream) -> None:
        """Serve a stream from now on."""
        self._streams.add(stream)

    def start_sample(
        self,
        stream: SampleStream,
        handle: int,
        request: SampleRequest,
        origin: Origin = NOWHERE,
        trace_parent: str = "",
    ) -> None:
        """Queue a sample for a stream. A real one ends the background samples that it leaves no place for.

        It drafts from the cached rollout of its own seed, unless the request has a guess already.

        Raises:
            FailedPrecondition: a background sample, and real ones have the engine.
            ResourceExhausted: too many samples are waiting.
            Unavailable: the engine slept and could not be woken.
        """
        yielded = self._make_way(stream)
        if self.load.waiting >= self._max_waiting:
            raise ResourceExhausted("engine queue", f"{self._max_waiting} samples are waiting already")
        sample = RunningSample(
            handle, request, stream, self._clock(), cached_tokens=len(request.cached), origin=origin
        )
        rollout = None if self.cache is None else self.cache.same_seed(origin, request.seed)
        if rollout is not None:
            sample.follow(rollout)
        finish = self._engine.finished_by_prefix(request)
        if finish is not None:
            stream.finish(sample, sample.finished(finish, self._clock()))
            return
        self.wake()
        self._engine.add(request)
        self.reuse.begin(request)
        sample.entered(trace_parent)
        stream.samples[handle] = sample
        self._samples[request.sample_id] = sample
        if stream.background:
            self.background.add(sample)
        if self.speculation is not None:
            self.speculation.begin(_context(sample, self.policy_version))
        if yielded:
            # Not before the sample is in: what is reported must not look as if the engine were free.
            self._flush()

    def keep(self, rollouts: Iterable[Rollout]) -> None:
        """Cache rollouts that were made here, and draft from what is new in them."""
        if self.cache is not None:
            self._adopt(self.cache, self.cache.add(rollouts))

    def adopt(self, shards: Shards) -> None:
        """Cache what the store has of some prompts, and draft from what is new in it."""
        if self.cache is not None:
            self._adopt(self.cache, self.cache.add_shards(shards))

    def _adopt(self, cache: DraftCache, rollouts: Sequence[Rollout]) -> None:
        """Draft from rollouts that have come into the cache, in the running samples of their prompts too."""
        self._metrics.rollouts.cache_bytes.set(cache.nbytes)
        given: dict[str, Rollout] = {}
        prompts = {(rollout.run_id, rollout.prompt_id) for rollout in rollouts}
        for sample_id, sample in self._samples.items():
            if sample.origin.prompt not in prompts:
                continue
            rollout = cache.same_seed(sample.origin, sample.request.seed)
            if rollout is not None and sample.follow(rollout) and not sample.request.given:
                given[sample_id] = rollout
        if self.speculation is not None:
            self.speculation.adopt(Arrival(rollouts, given))

    def origin_of(self, sample_id: str) -> Origin | None:
        """The run and step that a real sample is of; None of any other."""
        sample = self._samples.get(sample_id)
        if sample is None or not sample.origin.run_id or sample_id in self.background:
            return None
        return sample.origin

    def next_sample_id(self) -> str:
        """An id that this engine has never seen: vLLM must not meet the same one twice."""
        self._serial += 1
        return f"s{self._serial}"

    def abort_samples(self, samples: Iterable[RunningSample]) -> int:
        """End samples as they are; each stream gets their tokens and a Finished. The number that was ended."""
        ended = self._end_samples(samples)
        self._flush()
        return ended

    @property
    def samples(self) -> Mapping[str, RunningSample]:
        """The samples in the engine by id, in the background or real. In the engine thread only."""
        return self._samples

    def begin_drafts(self, sample: RunningSample, carried: Mapping[str, bytes]) -> None:
        """Have the drafters begin a sample that comes from another engine, with what they knew of it there."""
        if self.speculation is not None:
            self.speculation.begin(replace(_context(sample, self.policy_version), carried=carried))

    def enter(self, sample: RunningSample) -> None:
        """A sample that came with its KV is in the engine, and its drafters have begun."""
        self._make_way(sample.stream)
        sample.stream.samples[sample.handle] = sample
        self._samples[sample.request.sample_id] = sample

    def release(self, sample_id: str) -> None:
        """End a sample that runs in another engine, or could not enter this one, without an event to its stream."""
        self._engine.abort([sample_id])
        if sample_id in self._samples:
            self._forget(self._samples[sample_id])

    @property
    def now(self) -> float:
        """The loop's clock, in seconds."""
        return self._clock()

    def flush(self) -> None:
        """Send what has come together to the streams now."""
        self._flush()

    def _end_samples(self, samples: Iterable[RunningSample]) -> int:
        chosen = [sample for sample in samples if sample.request.sample_id in self._samples]
        self._engine.abort(sample.request.sample_id for sample in chosen)
        for sample in chosen:
            self._forget(sample)
            sample.stream.finish(sample, sample.finished(None, self._clock()))
        return len(chosen)

    def abort_all(self) -> int:
        """End every sample as it is; the number of real ones that were ended."""
        self.end_background()
        return self.abort_samples(list(self._samples.values()))

    def end_background(self) -> int:
        """End the background samples as they are. The number that was ended."""
        return self.abort_samples(list(self.background)) if self.background else 0

    def sleep(self) -> bool:
        """End the background samples and leave the device to others; False when real samples are running.

        The next sample wakes the engine, and so do new weights. An engine that fails at it is given up.

        Raises:
            Unavailable: it did.
        """
        if self.sample_count:
            return False
        self.end_background()
        self._or_fail(self._engine.sleep)
        return True

    def wake(self) -> None:
        """Take the device back, if the engine sleeps. An engine that fails at it is given up.

        Raises:
            Unavailable: it did.
        """
        if self._engine.asleep:
            self._or_fail(self._engine.wake)

    def _or_fail(self, change: Callable[[], None]) -> None:
        """A device that is half there would refuse whatever comes; another process can begin anew."""
        try:
            change()
        except Exception as error:
            self.fail(error)
            raise Unavailable("the engine of this instance lost its device") from error

    def close(self, stream: SampleStream) -> None:
        """Forget a stream whose caller is gone, and abort its samples."""
        self._streams.discard(stream)
        orphans = [s for s in stream.samples.values() if s.request.sample_id in self._samples]
        self._engine.abort(sample.request.sample_id for sample in orphans)
        for sample in orphans:
            self._forget(sample)

    # -- the thread ---------------------------------------------------------------------------------------

    def run(self) -> None:
        """Build the engine, then step it until stopped or broken."""
        try:
            self._serve()
        finally:
            self._over = True
            self._answer_commands()

    def _serve(self) -> None:
        try:
            self._engine = self._factory()
        except BaseException as error:
            self.ready.set_exception(error)
            return
        self.ready.set_result(self._engine)
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:
            self._break(error)

    def _turn(self) -> None:
        idle = self.paused or not self._engine.has_work
        unsettled = idle and self.speculation is not None and self.speculation.tend()
        self._run_commands(wait=idle and not unsettled)
        self.last_progress = self._clock()
        if self.paused or not self._engine.has_work:
            self._flush()
            return
        began = self._clock()
        shape = self._put_drafts() if self.speculation is not None or self.reuse else None
        stepping = self._clock()
        steps = self._engine.step()
        if shape is not None and self.speculation is not None:
            self.speculation.plan.stepped(shape, self._clock() - stepping)
        self._record(steps, began)
        if self.background.hinders(self.sample_count, self._engine.load):
            self.end_background()
        now = self._clock()
        if not self._samples or now - self._flushed_at >= self._flush_interval:
            self._flush()

    def _put_drafts(self) -> StepShape | None:
        """Set the coming step's drafts. Its shape, where the plan asks for step times and the step just decodes.

        A step that also reads prompts takes longer than its decoding samples explain.
        """
        states = self._engine.decoding()
        drafts = self._drafts(states)
        self._engine.put_drafts(drafts)
        shape = None if self.speculation is None else self.speculation.shape(states, drafts)
        if shape is None:
            return None
        load = self._engine.load
        return shape if load.running == shape.requests and not load.waiting else None

    def _drafts(self, samples: Sequence[SampleState]) -> dict[str, list[int]]:
        """The drafts of the coming step: of cached rollouts for the samples that follow one, else as speculated."""
        made: dict[str, list[int]] = {}
        if self.speculation is not None:
            free = [s for s in samples if s.sample_id not in self.reuse] if self.reuse else samples
            made = self.speculation.drafts(free)
        if self.reuse:
            made |= self.reuse.drafts(samples, len(samples) + sum(map(len, made.values())))
        return made

    def _run_commands(self, *, wait: bool) -> None:
        while not self._stopping:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return
            wait = False
            # Before the command: what it starts is not late because nothing was asked for so long.
            self.last_progress = self._clock()
            command()
            if self._failure is not None:
                raise self._failure

    def _answer_commands(self) -> None:
        """Answer what the thread will not run any more. Called by any thread, once `_over` is set."""
        with suppress(queue.Empty):
            while True:
                self._commands.get_nowait()()

    def _record(self, steps: list[SampleStep], began: float) -> None:
        now = self._clock()
        took, real, ahead = now - began, self.sample_count, len(self.background)
        tokens = pregenerated = 0
        for step in steps:
            if ahead and step.sample_id in self.background:
                pregenerated += len(step.token_ids)
            else:
                tokens += len(step.token_ids)
            self._record_sample(step, began, now)
        if ahead:
            self.background.stepped(took, pregenerated, real)
        if real:
            self._record_real(took, tokens)

    def _record_real(self, took: float, tokens: int) -> None:
        self._steps += 1
        self._step_seconds += (took - self._step_seconds) * (_STEP_TIME_SMOOTHING if self._steps > 1 else 1)
        self._generated += tokens
        self._metrics.step(took, tokens)

    def _record_sample(self, step: SampleStep, began: float, now: float) -> None:
        sample = self._samples.get(step.sample_id)
        if sample is None:
            return
        sample.record(step, began, self._learn(step))
        if step.finish is None:
            return
        self._forget(sample, finished=True)
        if step.finish is Finish.ERROR:
            sample.stream.samples.pop(sample.handle, None)
            sample.stream.refuse(_unsampleable(sample))
            return
        sample.stream.finish(sample, sample.finished(step.finish, now))

    def _learn(self, step: SampleStep) -> str:
        """Tell the source of a sample's drafts what became of them; its name, "" when there were none."""
        reused = self.reuse.learn(step)
        if reused is not None:
            self._metrics.reused(reused.tokens, reused.rows)
            return reuse.SOURCE
        if self.speculation is None:
            return ""
        self.speculation.learn(step)
        return self.speculation.drafter_of(step.sample_id)

    def _make_way(self, stream: SampleStream) -> bool:
        """Let a background sample in only where there is place for it, and a real one always.

        Returns whether background samples were ended for it.
        """
        if stream.background:
            if not self.background.allowed(self.sample_count):
                raise FailedPrecondition("REAL_WORK", "real samples have the engine")
        elif self.background and not self.background.allowed(self.sample_count + 1):
            ended = self._end_samples(list(self.background))
            self.background.yielded(ended, self._clock() - self._asked_at)
            return True
        return False

    def _forget(self, sample: RunningSample, *, finished: bool = False) -> None:
        sample.left()
        watcher = self.watchers.pop(sample.request.sample_id, None)
        if watcher is not None:
            watcher(finished)
        del self._samples[sample.request.sample_id]
        self.background.discard(sample.request.sample_id)
        self.reuse.end(sample.request.sample_id)
        if self.speculation is not None:
            self.speculation.end(sample.request.sample_id, sample.response)

    def _flush(self) -> None:
        load = self.load
        for stream in self._streams:
            stream.flush(load, self.policy_version)
        self._flushed_at = self._clock()
        self._metrics.load(load)

    def _end(self) -> None:
        self._stopping = True
        self._flush()
        for stream in self._streams:
            stream.put(None)

    def _break(self, error: BaseException) -> None:
        _log.error("engine_broken", error=repr(error), samples=len(self._samples), exc_info=error)
        try:
            self._flush()
        finally:
            for stream in self._streams:
                stream.put(Unavailable("the engine of this instance failed; resume elsewhere"))
            self._stopping = True
            self.broken.set_result(error)


def _context(sample: RunningSample, version: int) -> DraftContext:
    """What drafters are told of a sample. A guess of the caller's goes before the rollout of the same seed."""
    request, origin, rollout = sample.request, sample.origin, sample.rollout
    given: Sequence[int]
    given, source = reuse.guess_of(request)
    if rollout is not None and not request.given:
        given, source = rollout.tokens.tolist(), rollout.kind.value
    return DraftContext(
        request.sample_id,
        request.prompt,
        given,
        request.prompt_id,
        origin.run_id,
        request.seed,
        version,
        source,
    )


def _unsampleable(sample: RunningSample) -> pb.Refused:
    """The refusal of a sample whose logits were NaN: no other sample is touched by it."""
    position = len(sample.request.prefix) + sample.generated
    return pb.Refused(
        handle=sample.handle,
        code=grpc.StatusCode.INVALID_ARGUMENT.value[0],
        message=f"the model gives no finite logits at response position {position}",
        field="prompt_token_ids",
    )
