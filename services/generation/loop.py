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
from typing import Any, Protocol, TypeVar

import grpc
import structlog

from paceline.internal.v1 import generation_pb2 as pb
from paceline.v1 import fleet_pb2
from services.generation.drafting.drafter import DraftContext
from services.generation.drafting.speculation import Speculation
from services.generation.engine.types import (
    EngineLoad,
    Finish,
    SampleRequest,
    SampleState,
    SampleStep,
)
from services.generation.metrics import EngineMetrics
from services.generation.samples import RunningSample, WorkStream
from services.platform.errors import ResourceExhausted, Unavailable

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
        self.policy_version = 0
        self.last_progress = clock()
        self._factory = factory
        self._metrics = metrics
        self._flush_interval = flush_interval
        self._max_waiting = max_waiting
        self._clock = clock
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._samples: dict[str, RunningSample] = {}
        self._streams: set[WorkStream] = set()
        self._failure: BaseException | None = None
        self._stopping = False
        # The thread has ended or is about to: commands are answered with an error.
        self._over = False
        self._step_seconds = 0.0
        self._generated = self._steps = self._serial = 0
        self._flushed_at = clock()

    # -- from any thread ----------------------------------------------------------------------------------

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function in the engine thread, between two steps. Unavailable when the thread has ended."""
        future: Future[T] = Future()

        def command() -> None:
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
        """The latest load; exact between steps, a snapshot otherwise."""
        load = self._engine.load if self.ready.done() and not self.ready.exception() else EngineLoad(0, 0, 0)
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
        """Samples in the engine, running or waiting."""
        return len(self._samples)

    # -- in the engine thread, through `call` -------------------------------------------------------------

    def open(self, stream: WorkStream) -> None:
        """Serve a stream from now on."""
        self._streams.add(stream)

    def start_sample(self, stream: WorkStream, handle: int, request: SampleRequest) -> None:
        """Queue a sample for a stream.

        Raises:
            ResourceExhausted: too many samples are waiting.
        """
        if self._engine.load.waiting >= self._max_waiting:
            raise ResourceExhausted("engine queue", f"{self._max_waiting} samples are waiting already")
        sample = RunningSample(handle, request, stream, self._clock())
        finish = self._engine.finished_by_prefix(request)
        if finish is not None:
            stream.finish(sample, sample.finished(finish, self._clock()))
            return
        self._engine.add(request)
        stream.samples[handle] = sample
        self._samples[request.sample_id] = sample
        if self.speculation is not None:
            self.speculation.begin(
                DraftContext(request.sample_id, request.prompt, request.given, request.prompt_id)
            )

    def next_sample_id(self) -> str:
        """An id that this engine has never seen: vLLM must not meet the same one twice."""
        self._serial += 1
        return f"s{self._serial}"

    def abort_samples(self, samples: Iterable[RunningSample]) -> int:
        """End samples as they are; each stream gets their tokens and a Finished. The number that was ended."""
        chosen = [sample for sample in samples if sample.request.sample_id in self._samples]
        self._engine.abort(sample.request.sample_id for sample in chosen)
        for sample in chosen:
            self._forget(sample)
            sample.stream.finish(sample, sample.finished(None, self._clock()))
        self._flush()
        return len(chosen)

    def abort_all(self) -> int:
        """End every sample as it is."""
        return self.abort_samples(list(self._samples.values()))

    def close(self, stream: WorkStream) -> None:
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
        self._run_commands(wait=idle)
        self.last_progress = self._clock()
        if self.paused or not self._engine.has_work:
            self._flush()
            return
        began = self._clock()
        if self.speculation is not None:
            self._engine.put_drafts(self.speculation.drafts(self._engine.decoding()))
        steps = self._engine.step()
        self._record(steps, began)
        now = self._clock()
        if not self._samples or now - self._flushed_at >= self._flush_interval:
            self._flush()

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
        self._steps += 1
        took = now - began
        self._step_seconds += (took - self._step_seconds) * (_STEP_TIME_SMOOTHING if self._steps > 1 else 1)
        tokens = 0
        for step in steps:
            tokens += len(step.token_ids)
            self._record_sample(step, began, now)
        self._generated += tokens
        self._metrics.step(took, tokens)

    def _record_sample(self, step: SampleStep, began: float, now: float) -> None:
        sample = self._samples.get(step.sample_id)
        if sample is None:
            return
        speculation = self.speculation
        sample.record(step, began, "" if speculation is None else speculation.drafter_of(step.sample_id))
        if speculation is not None:
            speculation.learn(step)
        if step.finish is None:
            return
        self._forget(sample)
        if step.finish is Finish.ERROR:
            sample.stream.samples.pop(sample.handle, None)
            sample.stream.refuse(_unsampleable(sample))
            return
        sample.stream.finish(sample, sample.finished(step.finish, now))

    def _forget(self, sample: RunningSample) -> None:
        del self._samples[sample.request.sample_id]
        if self.speculation is not None:
            self.speculation.end(sample.request.sample_id)

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


def _unsampleable(sample: RunningSample) -> pb.Refused:
    """The refusal of a sample whose logits were NaN: no other sample is touched by it."""
    position = len(sample.request.prefix) + sample.generated
    return pb.Refused(
        handle=sample.handle,
        code=grpc.StatusCode.INVALID_ARGUMENT.value[0],
        message=f"the model gives no finite logits at response position {position}",
        field="prompt_token_ids",
    )
