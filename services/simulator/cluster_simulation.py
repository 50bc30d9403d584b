"""A rollout cluster simulated by events, with the decision code of the services. Deterministic by its seed.

The gateway's queue and pool place the samples, the planner of an instance decides on its drafts, the bubble
coordinator's plan gives work to idle instances, and the reallocator's plan moves samples. Devices are tables of
step times. An event is the end of a span of equal steps, so a step of 100,000 samples has a few hundred thousand
events.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from itertools import count

import numpy as np
from numpy.typing import ArrayLike, NDArray

from services.gateway.scheduler.estimator import DraftCoverage, LengthPredictor, remaining_work
from services.gateway.scheduler.placement import InstancePool, InstanceSlots, WaitingQueue, WaitingSample
from services.reallocator.config import ReallocatorConfig
from services.reallocator.planning.decision_scope import DecisionScope, Name
from services.reallocator.planning.learned_costs import LearnedCosts
from services.reallocator.planning.plan import plan
from services.reallocator.planning.records import (
    Candidate,
    InstanceView,
    LoadView,
    Move,
    MoveBy,
    MovePrice,
    Transfer,
    price,
)
from services.reallocator.planning.throughput import Roofline, ThroughputCurve
from services.simulator.device_tables import DeviceTable
from services.simulator.idle_work import IdleWork
from services.simulator.modelled_instance import (
    DecodingTotals,
    ModelledInstance,
    SimulatedSample,
    SimulatedStep,
    summary,
)
from services.simulator.simulation_setup import Ints, SimulationSetup
from services.simulator.step_decider import StepDecider

_MODEL, _BLOCK = "model", 16
# Longest interval between polls, in multiples of the configured one, as in the service.
_MOST_INTERVALS = 2.0


def table_seconds(
    device: DeviceTable, requests: ArrayLike, rows: ArrayLike, context: ArrayLike
) -> NDArray[np.float64]:
    """Return the times of steps by a device's table, as the reallocator's curve takes them."""
    shapes = np.broadcast(np.asarray(requests), np.asarray(rows), np.asarray(context))
    found = np.array([device.seconds(int(n), int(r), float(c)) for n, r, c in shapes])
    return found.reshape(shapes.shape)


class SampleMoves:
    """Decisions of the reallocator."""

    def __init__(
        self, config: ReallocatorConfig, device: DeviceTable, max_running: int, limit: int, kv_seconds: float
    ) -> None:
        """Begin with nothing learned.

        Args:
            config: settings of the reallocator.
            device: step times of every instance.
            max_running: most samples of an instance.
            limit: longest response, in tokens.
            kv_seconds: time to send the KV of a token, while the sample decodes.
        """
        self._config = config
        self._limit = limit
        self.kv_seconds = kv_seconds
        self._learned = LearnedCosts()
        self._lengths = self._learned.lengths_of(_MODEL)
        self._roofline = Roofline(partial(table_seconds, device), max_running, config.flatness)
        self._curve: ThroughputCurve | None = None
        self._scope = DecisionScope(config.decision_steps, config.cooldown_decisions)
        self._left: dict[str, set[Hashable]] = {}
        self._remaining: dict[int, float] = {}

    def next_poll(self, instances: Sequence[ModelledInstance], now: float) -> float:
        """Return the time of the next poll: about when a decision is due."""
        steps, poll = _steps(instances, now), self._config.poll_seconds
        seconds = [each.span.seconds for each in instances if each.span is not None]
        left = self._scope.steps_left(steps) * min(seconds, default=0.0)
        return now + min(max(left, poll), _MOST_INTERVALS * poll)

    def decide(self, instances: Sequence[ModelledInstance], now: float) -> list[Transfer]:
        """Return the transfers of a decision, none if it is not due."""
        steps = _steps(instances, now)
        if not self._scope.is_due(steps, [each.samples for each in instances]):
            return []
        self._learn(instances, now)
        self._curve, self._remaining = self._roofline.curve(), {}
        threshold = self._roofline.threshold(self._curve)
        rules = self._config.rules(self._learned)
        loads = [LoadView(each.name, _of_step(each), self._curve, threshold) for each in instances]
        listed = self._scope.choose(loads, rules)
        views = [self._view(each, self._curve, threshold, now) for each in instances if each.name in listed]
        transfers = plan(views, rules)
        self._scope.decided(steps, transfers)
        self._learned.fade()
        return transfers

    def paid(self, move: Move, tokens: int, receiver: ModelledInstance) -> MovePrice:
        """Return the price of a move made now, as the reallocator estimates it."""
        assert self._curve is not None, "a move follows a decision"
        cost = self._learned.costs.ways[move.by]
        return price(move.by, cost, tokens, self._curve, receiver.samples + 1)

    def moved(self, donor: ModelledInstance, number: Hashable) -> None:
        """Record that a sample left an instance before its end."""
        self._left.setdefault(donor.name, set()).add(number)

    def _learn(self, instances: Sequence[ModelledInstance], now: float) -> None:
        for each in instances:
            span, n = each.span, len(each.batch)
            if span is None or each.background:
                continue
            counts = each.batch.counts()
            tokens = sum(count * span.decision.tokens[kind] for kind, count in counts.items()) / n
            self._roofline.observe(n, span.seconds, tokens, each.batch.context / n)

    def _view(
        self, each: ModelledInstance, curve: ThroughputCurve, threshold: int, now: float
    ) -> InstanceView:
        samples = [] if each.background else each.batch.samples
        lengths: dict[Hashable, int] = {one.number: int(each.generated(one, now)) for one in samples}
        self._lengths.learn(each.name, lengths, self._left.pop(each.name, ()))
        free = each.device.kv_tokens - (0 if each.background else each.batch.context)
        count = _of_step(each)
        return InstanceView(
            each.name,
            count,
            max(0, each.max_running - count),
            max(0, int(free // _BLOCK)),
            curve,
            threshold,
            tuple(self._candidate(each, sample, lengths[sample.number]) for sample in samples),
            gives=self._scope.gives(each.name),
            receives=self._scope.receives(each.name),
        )

    def _candidate(self, each: ModelledInstance, sample: SimulatedSample, response: int) -> Candidate:
        remaining = self._remaining.get(response)
        if remaining is None:
            remaining = self._remaining[response] = self._lengths.remaining(response, self._limit)
        tokens = sample.prompt_tokens + response
        accepted = each.span.decision.tokens[each.batch.kind(sample)] - 1 if each.span is not None else 0.0
        return Candidate(str(sample.number), tokens, accepted, remaining, tokens // _BLOCK + 1)


def _of_step(instance: ModelledInstance) -> int:
    """Return the number of an instance's samples of the step."""
    return 0 if instance.background else instance.samples


def _steps(instances: Sequence[ModelledInstance], now: float) -> dict[Name, int]:
    return {(each.name, 1): each.steps_by(now) for each in instances}


_RUN = "run"


class ClusterSimulation:
    """Usage: `for step in ClusterSimulation(setup).run(): ...`, once.

    `on_end(ended, left)` is called when samples of a step have ended, with their number and the number left.
    """

    def __init__(
        self, setup: SimulationSetup, on_end: Callable[[int, int], None] = lambda ended, samples: None
    ) -> None:
        self._setup = setup
        self._on_end = on_end
        decider = StepDecider(setup.device, setup.knobs, setup.sources, setup.pregenerated, setup.seed)
        self._totals = DecodingTotals()
        self.instances = [
            ModelledInstance(name, decider, InstanceSlots(name, 0, 0), setup.max_running, self._totals)
            for name in (f"instance-{n:05d}" for n in range(setup.instances))
        ]
        self._by_name = {each.name: each for each in self.instances}
        self._drawn = setup.workload.drawn(setup.steps + 1, setup.seed)
        self._predictor = LengthPredictor()
        self._step = 0
        self._queue: WaitingQueue[SimulatedSample] = WaitingQueue()
        self._pool = InstancePool()
        self._idle: IdleWork | None = None
        if setup.bubbles is not None:
            self._idle = IdleWork(setup.bubbles, setup.workload.prompt_tokens)
        self._moves = self._reallocator()
        self.now = 0.0
        self.covered: dict[tuple[int, int], int] = {}
        """Pre-generated tokens of the current step, by prompt and slot."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._unfinished = self._moved = 0

    def run(self) -> Iterator[SimulatedStep]:
        """Yield the figures of each step."""
        for step in range(self._setup.steps):
            began = self.now
            samples = self._begin(step)
            while self._unfinished:
                self._next_event()
            ended = max(each.ended_at for each in samples)
            yield summary(self.instances, samples, self._totals, began, ended, self._moved)
            self._learn(max(ended, self.now))

    def _reallocator(self) -> SampleMoves | None:
        setup = self._setup
        if setup.reallocation is None:
            return None
        limit = max(int(each.max()) for each, _ in self._drawn)
        return SampleMoves(setup.reallocation, setup.device, setup.max_running, limit, setup.kv_seconds)

    # A step ----------------------------------------------------------------------------------------------

    def _begin(self, step: int) -> list[SimulatedSample]:
        """Begin a step: place its samples, and announce the next one."""
        if self._idle is not None:
            for each in self.instances:
                self._return_tasks(each)
            self.covered = self._idle.coverage(step)
        self._step, lengths = step, self._drawn[step][0]
        if not step:
            self._foresee(0)
        self._new_pool()
        samples = [
            SimulatedSample(prompt, slot, self._setup.workload.prompt_tokens, int(length), number=number)
            for number, (prompt, slot, length) in enumerate(_cells(lengths))
        ]
        self._unfinished, self._moved = len(samples), 0
        for sample in samples:
            sample.covered = self.covered.get((sample.prompt, sample.slot), 0)
            self._enqueue(sample)
        self._pump()
        self._foresee(step + 1)
        if self._idle is not None:
            self._idle.begin(step, {each.name: each.samples for each in self.instances}, self.now)
            expected = [self._predicted(step + 1, prompt) for prompt in range(self._setup.workload.prompts)]
            self._idle.hint(step + 1, self._drawn[step + 1][0], expected, self.now)
            for each in self.instances:
                self._rest(each)
        if self._moves is not None:
            self._at(self._moves.next_poll(self.instances, self.now), self._decide_moves)
        return samples

    def _new_pool(self) -> None:
        self._pool, room = InstancePool(), int(self._setup.room_factor * self._setup.max_running)
        self._totals.clear()
        for each in self.instances:
            each.slots = InstanceSlots(each.name, 0, room)
            each.busy_until = self.now
            self._pool.add(each.slots)

    def _learn(self, now: float) -> None:
        """Let the trainer update the policy."""
        self.now = now
        if self._idle is not None:
            self._idle.learn(now)
            if self._setup.bubbles is not None and self._setup.bubbles.during_update != "pregenerate":
                for each in self.instances:
                    self._return_tasks(each)
        until = now + self._setup.update_seconds
        while self._events and self._events[0][0] <= until:
            self._next_event()
        self.now = until

    # The gateway -----------------------------------------------------------------------------------------

    def _foresee(self, step: int) -> None:
        """Let the gateway learn the lengths of a step's prompts from an earlier epoch."""
        if self._setup.foreseen:
            for prompt, lengths in enumerate(self._drawn[step][1].tolist()):
                for length in lengths:
                    self._predictor.observe(_RUN, f"{step}/{prompt}", length)

    def _predicted(self, step: int, prompt: int) -> float:
        return self._predictor.predict(_RUN, f"{step}/{prompt}")

    def _enqueue(self, sample: SimulatedSample) -> None:
        draft = DraftCoverage(sample.covered, sample.covered >= sample.length) if sample.covered else None
        predicted = self._predicted(self._step, sample.prompt)
        sample.predicted = remaining_work(predicted, 0, draft, self._setup.draft_cost)
        self._queue.push(WaitingSample(sample, sample.prompt, 0, sample.predicted, sample.number, _RUN))

    def _pump(self) -> None:
        """Place the waiting samples that fit."""
        while (placed := self._queue.place_next(self._pool, self._setup.affinity_slack)) is not None:
            instance, sample = self._by_name[placed.instance_id], placed.waiting.ref
            if instance.slots.prompts[sample.prompt] == 1:
                # Samples of a prompt share its prefix.
                instance.prefill(sample.prompt_tokens)
            self._join(instance, sample)

    def _join(self, instance: ModelledInstance, sample: SimulatedSample) -> None:
        self._return_tasks(instance)
        instance.waiting.append(sample)
        self._cut(instance)

    # Events ----------------------------------------------------------------------------------------------

    def _at(self, time: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), what))

    def _next_event(self) -> None:
        time, _, what = heapq.heappop(self._events)
        assert time >= self.now - 1e-9, f"event at {time} is before the current time {self.now}"
        self.now = max(self.now, time)
        what()

    def _cut(self, instance: ModelledInstance) -> None:
        """End the span of an instance with the step under way, or begin one."""
        before = instance.span
        instance.cut(self.now)
        if before is None:
            self._begin_span(instance)
        elif instance.span is not before and instance.span is not None:
            self._at(instance.span.ends, partial(self._end_span, instance, instance.span))

    def _begin_span(self, instance: ModelledInstance) -> None:
        instance.clock = max(instance.clock, self.now)
        instance.begin_span()
        if instance.span is not None:
            self._at(instance.span.ends, partial(self._end_span, instance, instance.span))

    def _end_span(self, instance: ModelledInstance, span: object) -> None:
        if instance.span is not span:
            return
        ended = instance.finish_span()
        if instance.background:
            self._rest(instance)
            return
        for sample in ended:
            self._unfinished -= 1
            instance.slots.give_back(sample.prompt, sample.predicted)
            instance.busy_until = instance.clock
            self._predictor.observe(_RUN, f"{self._step}/{sample.prompt}", sample.length)
        if ended:
            self._on_end(len(ended), self._unfinished)
        for leave in instance.leaving:
            leave()
        instance.leaving.clear()
        if ended and len(self._queue):
            self._pump()
        if instance.span is None:
            self._begin_span(instance)
        if instance.span is None:
            self._rest(instance)

    # Bubbles ---------------------------------------------------------------------------------------------

    def _rest(self, instance: ModelledInstance) -> None:
        """Let an instance without samples of the step start or continue to pre-generate."""
        if (
            self._idle is None
            or (instance.span is not None)
            or (instance.samples and not instance.background)
        ):
            return
        instance.background = True
        self._idle.poll(instance, self.now)
        self._begin_span(instance)
        instance.background = instance.span is not None

    def _return_tasks(self, instance: ModelledInstance) -> None:
        """Stop pre-generating with the step under way."""
        if self._idle is None or not instance.background:
            return
        instance.cut(self.now)
        if instance.span is not None:
            instance.finish_span()
        self._idle.stop(instance, self.now)
        instance.background = False

    # Reallocation ----------------------------------------------------------------------------------------

    def _decide_moves(self) -> None:
        if self._moves is None or not self._unfinished:
            return
        for transfer in self._moves.decide(self.instances, self.now):
            donor, receiver = self._by_name[transfer.donor], self._by_name[transfer.receiver]
            running = {str(each.number): each for each in donor.batch.samples}
            for move in transfer.moves:
                sending = self._moves.kv_seconds * move.tokens if move.by is MoveBy.KV else 0.0
                self._at(self.now + sending, partial(self._depart, donor, receiver, running[move.key], move))
        self._at(self._moves.next_poll(self.instances, self.now), self._decide_moves)

    def _depart(
        self, donor: ModelledInstance, receiver: ModelledInstance, sample: SimulatedSample, move: Move
    ) -> None:
        if sample in donor.batch:
            donor.leaving.append(partial(self._leave, donor, receiver, sample, move))
            self._cut(donor)

    def _leave(
        self, donor: ModelledInstance, receiver: ModelledInstance, sample: SimulatedSample, move: Move
    ) -> None:
        if self._moves is None or sample not in donor.batch:
            return
        donor.batch.remove(sample)
        donor.busy_until = donor.clock
        self._moves.moved(donor, sample.number)
        donor.slots.give_back(sample.prompt, sample.predicted)
        receiver.slots.take(sample.prompt, sample.predicted)
        paid = self._moves.paid(move, round(sample.context), receiver)
        self._moved += 1
        donor.clock += paid.donor
        self._at(donor.clock + paid.stall - paid.prefill, partial(self._arrive, receiver, sample, move))

    def _arrive(self, receiver: ModelledInstance, sample: SimulatedSample, move: Move) -> None:
        if move.by is MoveBy.PREFIX:
            receiver.prefill(round(sample.context))
        self._join(receiver, sample)


def _cells(lengths: Ints) -> Iterator[tuple[int, int, int]]:
    for prompt, row in enumerate(lengths.tolist()):
        for slot, length in enumerate(row):
            yield prompt, slot, length
