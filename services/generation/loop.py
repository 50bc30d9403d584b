"""The thread that owns the engine and steps it.

Everything that touches the engine runs here, between two steps: new samples, aborts, pause, weights. Others
hand in a function (`call`) and get its result as a future.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import structlog

from paceline.v1 import fleet_pb2
from services.drafts.rollout import Rollout
from services.generation.background import Background
from services.generation.commands import Commands
from services.generation.drafts import SampleDrafts
from services.generation.engine.types import EngineLoad, Finish, SampleRequest, SampleStep
from services.generation.metrics import EngineMetrics
from services.generation.pace import Pace
from services.generation.rollouts.cache import Shards
from services.generation.rollouts.origin import NOWHERE, Origin
from services.generation.samples import RunningSample, SampleStream
from services.generation.step_engine import StepEngine
from services.platform.errors import FailedPrecondition, ResourceExhausted, Unavailable

T = TypeVar("T")
_log = structlog.get_logger(__name__)


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
        self.drafts = SampleDrafts(metrics)
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
        self._commands = Commands(clock)
        self._pace = Pace()
        self._samples: dict[str, RunningSample] = {}
        self._streams: set[SampleStream] = set()
        self._failure: BaseException | None = None
        self._stopping = False
        self._serial = 0
        self._flushed_at = clock()

    # -- from any thread ----------------------------------------------------------------------------------

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function in the engine thread, between two steps. Unavailable when the thread has ended."""
        return self._commands.call(function)

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
            step_seconds=self._pace.step_seconds,
            generated_tokens=self._pace.tokens,
            steps=self._pace.steps,
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
        self.drafts.follow(sample)
        finish = self._engine.finished_by_prefix(request)
        if finish is not None:
            stream.finish(sample, sample.finished(finish, self._clock()))
            return
        self.wake()
        self._engine.add(request)
        sample.entered(trace_parent)
        stream.samples[handle] = sample
        self._samples[request.sample_id] = sample
        if stream.background:
            self.background.add(sample)
        self.drafts.begin(sample, self.policy_version)
        if yielded:
            # Not before the sample is in: what is reported must not look as if the engine were free.
            self.flush()

    def keep(self, rollouts: Iterable[Rollout]) -> None:
        """Cache rollouts that were made here, and draft from what is new in them."""
        self.drafts.keep(rollouts, self._samples)

    def adopt(self, shards: Shards) -> None:
        """Cache what the store has of some prompts, and draft from what is new in it."""
        self.drafts.adopt(shards, self._samples)

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
        self.flush()
        return ended

    @property
    def samples(self) -> Mapping[str, RunningSample]:
        """The samples in the engine by id, in the background or real. In the engine thread only."""
        return self._samples

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
        load = self.load
        for stream in self._streams:
            stream.flush(load, self.policy_version)
        self._flushed_at = self._clock()
        self._metrics.load(load)

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
            self._commands.close()

    def _serve(self) -> None:
        try:
            self._engine: StepEngine = self._factory()
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
        unsettled = idle and self.drafts.tend()
        self._run_commands(wait=idle and not unsettled)
        self.last_progress = self._clock()
        if self.paused or not self._engine.has_work:
            self.flush()
            return
        began = self._clock()
        shape = self.drafts.put(self._engine)
        stepping = self._clock()
        steps = self._engine.step()
        if shape is not None:
            self.drafts.stepped(shape, self._clock() - stepping)
        self._record(steps, began)
        if self.background.hinders(self.sample_count, self._engine.load):
            self.end_background()
        now = self._clock()
        if not self._samples or now - self._flushed_at >= self._flush_interval:
            self.flush()

    def _run_commands(self, *, wait: bool) -> None:
        while not self._stopping and (command := self._commands.take(wait=wait)) is not None:
            wait = False
            # Before the command: what it starts is not late because nothing was asked for so long.
            self.last_progress = self._clock()
            command()
            if self._failure is not None:
                raise self._failure

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
            self._pace.stepped(took, tokens)
            self._metrics.step(took, tokens)

    def _record_sample(self, step: SampleStep, began: float, now: float) -> None:
        sample = self._samples.get(step.sample_id)
        if sample is None:
            return
        sample.record(step, began, self.drafts.learn(step))
        if step.finish is None:
            return
        self._forget(sample, finished=True)
        if step.finish is Finish.ERROR:
            sample.stream.samples.pop(sample.handle, None)
            sample.stream.refuse(sample.unsampleable())
            return
        sample.stream.finish(sample, sample.finished(step.finish, now))

    def _make_way(self, stream: SampleStream) -> bool:
        """Let a background sample in only where there is place for it, and a real one always.

        Returns whether background samples were ended for it.
        """
        if stream.background:
            if not self.background.allowed(self.sample_count):
                raise FailedPrecondition("REAL_WORK", "real samples have the engine")
        elif self.background and not self.background.allowed(self.sample_count + 1):
            ended = self._end_samples(list(self.background))
            self.background.yielded(ended, self._clock() - self._commands.asked_at)
            return True
        return False

    def _forget(self, sample: RunningSample, *, finished: bool = False) -> None:
        sample.left()
        watcher = self.watchers.pop(sample.request.sample_id, None)
        if watcher is not None:
            watcher(finished)
        del self._samples[sample.request.sample_id]
        self.background.discard(sample.request.sample_id)
        self.drafts.end(sample.request.sample_id, sample.response)

    def _end(self) -> None:
        self._stopping = True
        self.flush()
        for stream in self._streams:
            stream.put(None)

    def _break(self, error: BaseException) -> None:
        try:
            self.flush()
        finally:
            for stream in self._streams:
                stream.put(Unavailable("the engine of this instance failed; resume elsewhere"))
            self._stopping = True
            # Before the process ends, and after all who wait: a traceback can take a second.
            _log.error("engine_broken", error=repr(error), samples=len(self._samples), exc_info=error)
            self.broken.set_result(error)
