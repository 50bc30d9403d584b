"""Pre-generation tasks as background samples of the engine loop.

`start_task` turns a lease into a work item and starts it. `BackgroundStream` is the stream of these samples: it
passes reports from the engine thread to the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import structlog

from paceline.internal.v1 import generation_pb2 as pb
from paceline.v1 import fleet_pb2, sample_pb2
from services.contracts.errors import ServiceError
from services.generation.draft_cache.fetcher import ShardFetcher
from services.generation.draft_cache.origin import Origin
from services.generation.engine.types import Verifier
from services.generation.loop.engine_loop import EngineLoop
from services.generation.loop.samples import RunningSample, SampleTable
from services.generation.loop.work_items import AdmissionTerms, check_item
from services.generation.pregeneration.leases import DraftLease

POLL_STEPS = 50
"""Engine steps between two reports, until the coordinator says otherwise."""

# Longest time that tasks wait for the rollouts that the draft store has of their prompts.
_FETCH_SECONDS = 0.5
_FINISHED = {sample_pb2.FINISH_REASON_STOP, sample_pb2.FINISH_REASON_LENGTH}
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class EngineAvailability:
    """State of the engine: free for background samples, serving real ones, and its policy version."""

    free: bool = False
    serving: bool = False
    version: int = 0


@dataclass(frozen=True, slots=True)
class PollSituation:
    """State of the instance that decides about polls.

    `running` tasks and `forks` are being generated. `news` is True if the coordinator does not know yet of a task
    that has ended, and `due` if it is time to report.
    """

    engine: EngineAvailability
    running: int
    news: bool
    due: bool
    forks: int = 0

    @property
    def calls_for_poll(self) -> bool:
        """True if there is something to report, or the instance could do more.

        While it has real work it requests no task, but it returns the interrupted ones so that others continue
        them.
        """
        return self.news or (self.engine.free and (self.due or not self.running))

    def room(self, seats: int, reserved: int) -> int:
        """Return how many tasks could start now, of `seats` samples at most, `reserved` of them for real ones."""
        return max(0, seats - reserved - self.running - self.forks) if self.engine.free else 0


@dataclass(frozen=True, slots=True)
class BackgroundReport:
    """Events since the last report.

    `due` is True if as many engine steps have passed as lie between two polls. `ended` holds (handle, finished) of
    samples that have ended; finished is False if a sample was ended from outside or could not continue.
    """

    engine: EngineAvailability
    due: bool
    deltas: list[pb.Delta] = field(default_factory=list)
    ended: list[tuple[int, bool]] = field(default_factory=list)


class BackgroundStream:
    """Stream that collects the tokens of background samples.

    It sends a report when `poll_steps` engine steps have passed, when a sample has ended, and when the engine
    becomes free, is needed or has other weights; None at the end. Filled by the engine thread, emptied by the event
    loop.
    """

    background = True

    def __init__(
        self, events: asyncio.AbstractEventLoop, table: SampleTable, is_open: Callable[[], bool]
    ) -> None:
        """`is_open` returns True if the instance takes work at all; called in the engine thread."""
        self.outbox: asyncio.Queue[BackgroundReport | None] = asyncio.Queue()
        self.samples: dict[int, RunningSample] = {}
        self.poll_steps = POLL_STEPS
        self._events = events
        self._table = table
        self._is_open = is_open
        self._engine = EngineAvailability()
        self._reported_at = 0
        self._deltas: list[pb.Delta] = []
        self._ended: list[tuple[int, bool]] = []

    def add(self, sample: RunningSample, now: float) -> None:
        """Add a sample that has entered the engine."""
        self.samples[sample.handle] = sample

    def reached(self, sample: RunningSample) -> None:
        """Do nothing: background samples report after a number of engine steps."""

    def finish(self, sample: RunningSample, event: pb.Finished) -> None:
        """Keep the last tokens of a sample that has ended."""
        self._collect(sample)
        self._ended.append((sample.handle, event.finish_reason in _FINISHED))
        self.samples.pop(sample.handle, None)

    def refuse(self, event: pb.Refused) -> None:
        """Record that a sample cannot continue."""
        self._ended.append((event.handle, False))

    def flush(
        self, load: fleet_pb2.InstanceLoad, policy_version: int, now: float, *, everything: bool = False
    ) -> None:
        """Send a report, if something has changed."""
        real = load.running + load.waiting
        free = self._is_open() and self._table.allows_background(real)
        engine = EngineAvailability(free, real > 0, policy_version)
        due = bool(self.samples) and self._table.background_steps - self._reported_at >= self.poll_steps
        if due or self._ended or engine != self._engine:
            self._report(engine, due)
            self._engine = engine
            self._reported_at = self._table.background_steps

    def put(self, event: Exception | None) -> None:
        """End the stream together with the engine; the samples keep the tokens that they have."""
        self._ended += [(handle, False) for handle in self.samples]
        self._report(EngineAvailability(), False)
        self.samples.clear()
        self._send(None)

    def _report(self, engine: EngineAvailability, due: bool) -> None:
        for sample in self.samples.values():
            self._collect(sample)
        self._send(BackgroundReport(engine, due, self._deltas, self._ended))
        self._deltas, self._ended = [], []

    def _collect(self, sample: RunningSample) -> None:
        if delta := sample.take_delta():
            self._deltas.append(delta)

    def _send(self, event: BackgroundReport | None) -> None:
        self._events.call_soon_threadsafe(self.outbox.put_nowait, event)


async def fetch_beginnings(fetcher: ShardFetcher, leases: Iterable[DraftLease], no_step: int) -> None:
    """Fetch what the draft store has of these tasks; return after half a second at the latest.

    Rollouts that were fetched for a step are not fetched for it again, but other instances meanwhile continue tasks
    of these prompts. So `no_step` is a number that no sample has as its step, and that is used once: the next tasks
    fetch again, and so do the samples of the real step.
    """
    origins = {Origin(each.task.run_id, each.task.prompt_id, step=no_step) for each in leases}
    wanted = [fetcher.want(origin) for origin in origins]
    if fetches := {each for each in wanted if each is not None}:
        await asyncio.wait(fetches, timeout=_FETCH_SECONDS)


def start_task(
    loop: EngineLoop, stream: BackgroundStream, terms: AdmissionTerms, lease: DraftLease, *, near_ties: bool
) -> bool:
    """Start a task, after the tokens that the same policy generated of it before; return False if it is refused.

    Called in the engine thread.

    Args:
        loop: of the engine.
        stream: of the tasks' samples.
        terms: on which samples are taken now.
        lease: of the task, or a fork.
        near_ties: request the runner-up of each token of a task.
    """
    item = work_item(lease)
    origin = replace(Origin.of(item), fork=lease.fork)
    if not lease.fork:
        known = loop.drafts.cache.same_seed(origin, item.seed, lease.version)
        if known is not None and len(known.logprobs):
            lease.resume(known)
    item.prefix_token_ids.extend(lease.tokens)
    try:
        request = check_item(item, terms, stream.samples, loop.next_sample_id)
        if near_ties and not lease.fork and request.verifier is Verifier.COUPLED:
            request = replace(request, near_ties=True)
        loop.start_sample(stream, lease.handle, request, origin)
    except ServiceError as error:
        _log.debug("task_refused", prompt=item.prompt_id, slot=item.slot, error=error.message)
        return False
    except Exception:
        _log.exception("task_failed", prompt=item.prompt_id, slot=item.slot)
        return False
    return True


def work_item(lease: DraftLease) -> pb.WorkItem:
    """Return the work item of a task.

    A LENIENT sample is pre-generated as a COUPLED one, because lenient tokens would be a worse draft.
    """
    task = lease.task
    exactness = sample_pb2.Exactness()
    if task.exactness.level == sample_pb2.EXACTNESS_LEVEL_REJECTION:
        exactness.level = sample_pb2.EXACTNESS_LEVEL_REJECTION
    sampling = sample_pb2.SamplingParams()
    sampling.CopyFrom(task.sampling)
    # Drafts have tokens only.
    sampling.ClearField("top_logprobs")
    sampling.ClearField("prompt_logprobs")
    return pb.WorkItem(
        handle=lease.handle,
        prompt_token_ids=task.prompt_token_ids,
        sampling=sampling,
        exactness=exactness,
        seed=task.seed,
        policy_version=lease.version,
        prompt_id=task.prompt_id,
        run_id=task.run_id,
        slot=task.slot,
        step=task.step,
    )
