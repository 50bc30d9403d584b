"""A rollout cluster simulated by events, with the decision code of the services. Deterministic by its seed.

The gateway's queue and pool place the samples, the planner of an instance decides on its drafts, the bubble
coordinator's plan gives work to idle instances, and the reallocator's plan moves samples. Devices are tables of
step times. An event is the end of a span of equal steps, so a step of 100,000 samples has a few hundred thousand
events.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

from services.gateway.scheduler.estimator import DraftCoverage, LengthPredictor, remaining_work
from services.gateway.scheduler.placement import InstancePool, InstanceSlots, WaitingQueue, WaitingSample
from services.reallocator.planning.records import Move, MoveBy
from services.simulator.idle_work import IdleWork
from services.simulator.modelled_instance import (
    DecodingTotals,
    ModelledInstance,
    SimulatedSample,
    SimulatedStep,
    summary,
)
from services.simulator.sample_moves import SampleMoves
from services.simulator.simulation_setup import Ints, SimulationSetup
from services.simulator.step_decider import StepDecider

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
