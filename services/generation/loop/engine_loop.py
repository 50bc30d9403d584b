"""Engine loop of an instance: steps the engine, adds and ends its samples, and sends what streams report.

Everything that touches the engine runs in the loop's thread, between two steps: new samples, aborts, pause,
weights. Other threads pass a function (`call`, `execute`) and get its result as a future.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from paceline.times import duration
from paceline.v1 import fleet_pb2
from services.contracts.errors import FailedPrecondition, ResourceExhausted, Unavailable
from services.generation.draft_cache.origin import NOWHERE, Origin
from services.generation.engine.types import EngineLoad, EngineRequest, Finish, SampleStep
from services.generation.loop.engine_thread import EngineThread, WorkKind
from services.generation.loop.metrics import EngineMetrics, EngineThroughput
from services.generation.loop.sample_drafts import SampleDrafts
from services.generation.loop.samples import RunningSample, SampleStream, SampleTable
from services.generation.loop.work_items import refusal
from services.generation.speculation.plan import context_of


class EngineLoop(EngineThread):
    """Steps the engine while there is work and the loop is not paused.

    If a step raises, streams get the pending events and end with UNAVAILABLE. Methods are called in the engine
    thread, except in the first section.
    """

    def __init__(
        self,
        factory: Callable[[], tuple[Any, SampleDrafts]],
        metrics: EngineMetrics,
        samples: SampleTable,
        *,
        flush_interval: float,
        max_waiting: int,
        policy_version: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Flush the streams every `flush_interval` seconds; refuse samples while `max_waiting` of them wait."""
        super().__init__(factory, clock)
        self.paused = False
        self.samples = samples
        # Exit callbacks by sample id, called in the engine thread; the argument is True for a finished sample.
        self.watchers: dict[str, Callable[[bool], None]] = {}
        self.policy_version = policy_version
        self._metrics = metrics
        self._flush_interval = flush_interval
        self._max_waiting = max_waiting
        self._throughput = EngineThroughput()
        self._streams: set[SampleStream] = set()
        self._serial = 0
        self._flushed_at = clock()
        # Time at which the only step in flight began, until another turn waits for its outcome.
        self._launched: float | None = None
        # Time at which the engine's latest step returned.
        self._stepped_at = 0.0

    # -- from any thread ----------------------------------------------------------------------------------

    @property
    def load(self) -> fleet_pb2.InstanceLoad:
        """Latest load by real samples; exact between steps, a snapshot otherwise."""
        load = self.samples.real_load(self._engine.load if self._has_engine else EngineLoad(0, 0, 0))
        return fleet_pb2.InstanceLoad(
            running=load.running,
            waiting=load.waiting,
            kv_usage=load.kv_usage,
            step_time=duration(self._throughput.step_seconds),
            generated_tokens=self._throughput.tokens,
            steps=self._throughput.steps,
        )

    @property
    def now(self) -> float:
        """Time of the loop's clock, in seconds."""
        return self._clock()

    # -- in the engine thread: samples --------------------------------------------------------------------

    def open(self, stream: SampleStream) -> None:
        """Serve a stream from now on."""
        self._streams.add(stream)

    def close(self, stream: SampleStream) -> None:
        """Forget a stream whose caller is gone, and abort its samples."""
        self._streams.discard(stream)
        orphans = [sample for sample in stream.samples.values() if sample.request.sample_id in self.samples]
        self._engine.abort(sample.request.sample_id for sample in orphans)
        for sample in orphans:
            self._forget(sample)

    def next_sample_id(self) -> str:
        """Return a new id: an engine must not see the same id twice, because vLLM does not allow it."""
        self._serial += 1
        return f"s{self._serial}"

    def start_sample(
        self,
        stream: SampleStream,
        handle: int,
        request: EngineRequest,
        origin: Origin = NOWHERE,
        trace_parent: str = "",
        *,
        streamed: bool = False,
    ) -> None:
        """Queue a sample for a stream. A real one ends the background samples that have no room with it.

        It drafts from the cached rollout of its seed, unless the request has a reference already. The tokens of a
        `streamed` sample are reported as they are generated.

        Raises:
            FailedPrecondition: it is a background sample, and the engine serves real ones.
            InvalidArgument: the engine does not accept it.
            ResourceExhausted: too many samples are waiting.
            Unavailable: the engine slept and could not be woken.
        """
        yielded = self._yield_to(stream)
        if self.load.waiting >= self._max_waiting:
            raise ResourceExhausted("engine queue", f"{self._max_waiting} samples are waiting already")
        sample = RunningSample(
            handle, request, stream, self._clock(), streamed, cached_tokens=len(request.cached), origin=origin
        )
        self.drafts.follow(sample)
        ending = self._engine.finished_by_prefix(request)
        if ending is not None:
            sample.stop_string = ending.stop_string
            stream.finish(sample, sample.finished(ending.finish, self._clock()))
            return
        self.wake()
        self._engine.add(request)
        sample.entered(trace_parent)
        self._add(sample)
        self.drafts.begin(sample, self.policy_version)
        if yielded:
            # Only now that the sample is in, because the report must not show a free engine.
            self.flush()

    def enter(self, sample: RunningSample) -> None:
        """Add a sample that arrived with its KV and whose drafters have begun."""
        self._yield_to(sample.stream)
        self._add(sample)

    def release(self, sample_id: str) -> None:
        """End a sample that runs in another engine, or could not enter this one, without an event to its stream."""
        self._engine.abort([sample_id])
        if sample_id in self.samples:
            self._forget(self.samples[sample_id])

    def abort_samples(self, samples: Iterable[RunningSample]) -> int:
        """End samples as they are, each with its tokens and a Finished; return how many were ended."""
        ended = self._end_samples(samples)
        self.flush()
        return ended

    def abort_all(self) -> int:
        """End every sample as it is; return how many real ones were ended."""
        self.end_background()
        return self.abort_samples(list(self.samples.values()))

    def end_background(self) -> int:
        """End the background samples as they are; return how many were ended."""
        return self.abort_samples(self.samples.background_samples()) if self.samples.background else 0

    def flush(self, *, everything: bool = False) -> None:
        """Send events and the tokens that are due to the streams now; with `everything` all tokens."""
        load, now = self.load, self._clock()
        # Before the events, so that a caller who has seen a sample finish reads metrics that count its drafts.
        self._metrics.load(load)
        for stream in self._streams:
            stream.flush(load, self.policy_version, now, everything=everything)
        self._flushed_at = now

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache that all samples use."""
        return float(self._engine.load.kv_usage)

    def plain_seconds(self, samples: int) -> float:
        """Return the predicted time of a step of samples as long as the running ones; 0 without a prediction."""
        states = self._engine.decoding()
        if self.drafts.speculation is None or not states:
            return 0.0
        context = samples * context_of(states) // len(states)
        return self.drafts.speculation.plan.plain_seconds(samples, context)

    # -- in the engine thread: the device -----------------------------------------------------------------

    def sleep(self) -> bool:
        """End the background samples and leave the device to others; return False if real samples are running.

        The next sample or new weights wake the engine. Unavailable if the engine failed and is given up.
        """
        if self.samples.real_count:
            return False
        self.end_background()
        self._or_fail(self._engine.sleep)
        return True

    def wake(self) -> None:
        """Take the device back, if the engine sleeps. Unavailable if the engine failed and is given up."""
        if self._engine.asleep:
            self._or_fail(self._engine.wake)

    def _or_fail(self, change: Callable[[], None]) -> None:
        """Change the device, or give the engine up.

        With a device that is half changed it would refuse every sample, and a new process would not.
        """
        try:
            change()
        except Exception as error:
            self.fail(error)
            raise Unavailable("the engine of this instance lost its device") from error

    # -- each turn ----------------------------------------------------------------------------------------

    def _turn(self) -> None:
        self._begin(WorkKind.STEP)
        idle = self.paused or not self._engine.has_work
        if self._engine.in_flight and (idle or not self._commands.empty()):
            # Commands between two steps need the engine as the last step left it.
            began = self._clock()
            self._record(self._engine.settle(), began)
            self.drafts.settled()
        unsettled = idle and self.drafts.idle_work()
        if not self._engine.in_flight:
            # A command that has come since waits for the next turn.
            self._run_commands(wait=idle and not unsettled)
        self._begin(WorkKind.STEP)
        if self.paused or not self._engine.has_work:
            # Idle for an unknown time: flush everything now.
            self.flush(everything=True)
            return
        began = self._clock()
        self.drafts.put(self._engine)
        stepping, in_flight = self._clock(), self._engine.in_flight
        steps = self._engine.step()
        ended = self._clock()
        # The device computes a step in flight from the end of the previous one on, while drafts are put.
        self.drafts.stepped(ended - (self._stepped_at if in_flight else stepping), self._engine.in_flight)
        self._stepped_at = ended
        if self._engine.in_flight > in_flight:
            # It was only launched; its outcome comes with a later step.
            self._launched = began
        else:
            self._record(steps, began, in_flight)
        if self.samples.background and self.samples.real_count and self._engine.load.waiting:
            # A real sample may be waiting because of them.
            self.end_background()
        if not self.samples or self._clock() - self._flushed_at >= self._flush_interval:
            self.flush()

    def _record(self, steps: list[SampleStep], began: float, later: int = 0) -> None:
        """Record the outcome of a step that began at `began`, or was launched before.

        Drafts were put `later` times after its own.
        """
        began = began if self._launched is None else self._launched
        self._launched = None
        now, background = self._clock(), self.samples.background
        seconds, real, had_background = now - began, self.samples.real_count, bool(background)
        tokens = pregenerated = forked = 0
        for step, source in zip(steps, self.drafts.learn(steps, later), strict=True):
            if had_background and step.sample_id in background:
                if self.samples[step.sample_id].origin.fork:
                    forked += len(step.token_ids)
                else:
                    pregenerated += len(step.token_ids)
            else:
                tokens += len(step.token_ids)
            self._record_sample(step, began, now, source)
        if had_background:
            self.samples.record_background_step(seconds, pregenerated, forked, real)
        if real:
            self._throughput.record(seconds, tokens)
            self._metrics.step(seconds, tokens)

    def _record_sample(self, step: SampleStep, began: float, now: float, source: str) -> None:
        sample = self.samples.get(step.sample_id)
        if sample is None:
            return
        if step.cached_context is not None:
            tokens = len(sample.request.prompt) + len(sample.response)
            self._metrics.entered(tokens, step.cached_context, again=sample.started is not None)
        sample.record(step, began, now, source)
        if step.finish is None:
            if len(sample.tokens) >= sample.quota:
                sample.stream.reached(sample)
            return
        self._forget(sample, finished=True)
        if step.finish is Finish.ERROR:
            sample.stream.samples.pop(sample.handle, None)
            why = self._engine.why_unsampled(sample.request, sample.response)
            sample.stream.refuse(refusal(sample.handle, why))
            return
        sample.stream.finish(sample, sample.finished(step.finish, now))

    def _yield_to(self, stream: SampleStream) -> bool:
        """Refuse a background sample that has no room; end background samples for a real one.

        Return True if some were ended.
        """
        samples = self.samples
        if stream.background:
            if not samples.allows_background(samples.real_count):
                raise FailedPrecondition("REAL_WORK", "real samples have the engine")
        elif samples.background and not samples.allows_background(samples.real_count + 1):
            ended = self._end_samples(samples.background_samples())
            samples.record_yield(ended, self._clock() - self._called_at)
            return True
        return False

    def _add(self, sample: RunningSample) -> None:
        sample.policy_version = self.policy_version
        sample.stream.add(sample, self._clock())
        self.samples.add(sample)

    def _end_samples(self, samples: Iterable[RunningSample]) -> int:
        chosen = [sample for sample in samples if sample.request.sample_id in self.samples]
        self._engine.abort(sample.request.sample_id for sample in chosen)
        for sample in chosen:
            self._forget(sample)
            sample.stream.finish(sample, sample.finished(None, self._clock()))
        return len(chosen)

    def _forget(self, sample: RunningSample, *, finished: bool = False) -> None:
        sample.left()
        watcher = self.watchers.pop(sample.request.sample_id, None)
        if watcher is not None:
            watcher(finished)
        self.samples.remove(sample.request.sample_id)
        self.drafts.end(sample.request.sample_id, sample.response)

    def _end_streams(self, error: BaseException | None) -> None:
        try:
            self.flush(everything=True)
        finally:
            lost = Unavailable("the engine of this instance failed; resume elsewhere")
            for stream in self._streams:
                stream.put(None if error is None else lost)
