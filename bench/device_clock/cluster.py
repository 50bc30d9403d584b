"""Decode a recorded run on simulated instances, by a device's step times and with the services' decision code.

The gateway's queue and pool place the samples. The coordinator's ledger and plan assign samples of the next step to
idle instances. Each instance drafts, plans and verifies every engine step on the recorded texts. Idle time, and
thus the amount generated ahead, is therefore that which the device would have. A step's instances also index what
was generated ahead for its prompts, as they fetch it from the store. Left out are the cost of decisions, moves, the
journal, and the time of a weight update.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from bench.axes.known_texts import RUN, KnownText, TextInstance, Tokens, stored
from bench.device_clock.recording import Cell, ClockedStep, ForkedText, RecordedTexts, TrainerClock
from services.bubbles.config import BubblesConfig
from services.gateway.config import GatewayConfig
from services.gateway.scheduler.estimator import DraftCoverage, LengthPredictor, remaining_work
from services.gateway.scheduler.placement import InstancePool, InstanceSlots, WaitingQueue, WaitingSample
from services.generation.config import GenerationConfig
from services.generation.pregeneration.leases import affordable
from services.simulator.device_tables import DeviceTable
from services.simulator.idle_work import IdleWork
from services.simulator.modelled_instance import SimulatedSample

_MAX_RUNNING = 256
_DRAFT_COST: float = GatewayConfig.model_fields["draft_cost"].default
_FORK_SLOWDOWN: float = GenerationConfig.model_fields["fork_slowdown"].default
_POLL_SECONDS = 0.005
"""Interval between two polls of an instance that has nothing to do."""


@dataclass(eq=False)
class ClockedInstance:
    """An instance with a clock, which shows the end of its last engine step."""

    name: str
    decoder: TextInstance
    slots: InstanceSlots
    max_running: int = _MAX_RUNNING
    clock: float = 0.0
    steps: int = 0
    waiting: deque[SimulatedSample] = field(default_factory=deque)
    """Samples to generate ahead that have not begun."""
    own: dict[str, WaitingSample[Cell]] = field(default_factory=dict)
    """Samples of the step by id."""
    ahead: dict[SimulatedSample, str] = field(default_factory=dict)
    """Running samples of the next step, with their ids."""
    forks: dict[str, tuple[Cell, ForkedText]] = field(default_factory=dict)
    """Running forks of samples of the next step."""
    open_ties: list[tuple[float, Cell, int]] = field(default_factory=list)
    """Margin, cell and position of ties that are not forked yet, ordered by ascending margin."""

    @property
    def samples(self) -> int:
        """Return the number of running and waiting samples."""
        return len(self.decoder) + len(self.waiting)

    @property
    def batch(self) -> ClockedInstance:
        """Return the samples that are generated ahead."""
        return self

    def __contains__(self, sample: SimulatedSample) -> bool:
        return sample in self.ahead

    def remove(self, sample: SimulatedSample) -> None:
        """Remove a sample that is generated ahead and keep its tokens."""
        sample.generated = float(self.decoder.leave(self.ahead.pop(sample)))

    def prefill(self, tokens: int) -> None:
        """Add `tokens` tokens of prefill to the next step."""
        self.decoder.prefill(tokens)

    def generated(self, sample: SimulatedSample, now: float) -> float:
        """Return the number of response tokens of a sample that is generated ahead."""
        return float(self.decoder.generated(self.ahead[sample])) if sample in self.ahead else sample.generated


@dataclass(slots=True)
class RecordedCluster:
    """Simulate a run once. With `bubbles` None nothing is generated ahead."""

    device: DeviceTable
    vocabulary: int
    instances: int
    texts: Sequence[RecordedTexts]
    trainer: TrainerClock
    bubbles: BubblesConfig | None = field(default_factory=BubblesConfig)
    most_forks: int = 0
    """Maximum number of forks of a sample that is generated ahead."""
    _fleet: list[ClockedInstance] = field(init=False)
    _lengths: LengthPredictor = field(init=False, default_factory=LengthPredictor)
    _now: float = field(init=False, default=0.0)
    _idle: IdleWork | None = field(init=False, default=None)
    _coming: RecordedTexts | None = field(init=False, default=None)
    _forked: dict[Cell, dict[int, Tokens]] = field(init=False, default_factory=dict)
    """Generated tokens of the forks of the next step, by cell and position."""

    def __post_init__(self) -> None:
        tokens = sum(
            len(text) for each in self.texts for text in (*each.responses.values(), *each.before.values())
        )
        names = [f"instance-{n}" for n in range(self.instances)]
        self._fleet = [
            ClockedInstance(
                name, TextInstance(self.device, self.vocabulary, 4 * tokens), InstanceSlots(name, 0, 0)
            )
            for name in names
        ]
        if self.bubbles is not None:
            prompts = [len(prompt) for each in self.texts for prompt in each.prompts]
            self._idle = IdleWork(self.bubbles, round(fmean(prompts)))

    def run(self) -> Iterator[ClockedStep]:
        """Run the steps, each followed by the trainer's update or by the next step."""
        for place, texts in enumerate(self.texts):
            self._coming = self.texts[place + 1] if place + 1 < len(self.texts) else None
            began = self._now
            step = self._rolled_out(texts)
            following = self.trainer.next_begin(self._now)
            if self._idle is not None:
                self._idle.learn(self._now)
                self._wait(self._idle, following)
            self._now = following
            yield replace(step, whole=following - began)

    def _wait(self, idle: IdleWork, until: float) -> None:
        """Let the instances use the time until the next step begins, unless the trainer has their devices."""
        assert self.bubbles is not None
        if self.bubbles.during_update != "pregenerate":
            self._stop(idle)
            return
        while (instance := self._next()).clock < until:
            worked = self._work_ahead(instance)
            if not worked and not any(len(each.decoder) for each in self._fleet):
                # An instance that finds no work while no other one has any finds none before the next step.
                break

    def _stop(self, idle: IdleWork) -> None:
        """Stop generating ahead."""
        for each in self._fleet:
            each.open_ties.clear()
            for name in list(each.forks):
                self._keep_fork(each, name, each.decoder.leave(name))
            idle.stop(each, self._now)

    def _next(self) -> ClockedInstance:
        return min(self._fleet, key=lambda each: each.clock)

    def _rolled_out(self, texts: RecordedTexts) -> ClockedStep:
        began, covered = self._now, self._begin(texts)
        steps, last = dict[str, int](), began
        drafted = accepted = 0
        while any(each.own for each in self._fleet):
            instance = self._next()
            if not instance.own:
                self._work_ahead(instance)
                continue
            for name in instance.own:
                steps[name] = steps.get(name, 0) + 1
            counts = instance.decoder.counts
            before = counts.drafted, counts.accepted
            for name in self._step(instance):
                last = max(last, instance.clock)
                self._end(instance, instance.own.pop(name), texts)
            drafted, accepted = drafted + counts.drafted - before[0], accepted + counts.accepted - before[1]
        self._now = last
        return ClockedStep(
            step=texts.step,
            seconds=last - began,
            tokens=sum(map(len, texts.responses.values())),
            decode_steps=sum(steps.values()),
            most_decode_steps=max(steps.values()),
            drafted=drafted,
            accepted=accepted,
            covered=sum(covered.values()),
        )

    def _begin(self, texts: RecordedTexts) -> Mapping[Cell, int]:
        """Begin a step: stop generating ahead, place the samples, and announce the next step."""
        covered: Mapping[Cell, int] = {}
        if self._idle is not None:
            self._stop(self._idle)
            covered = self._idle.coverage(texts.step)
            self._fetch(texts, covered)
        self._place(texts, covered)
        if self._idle is not None:
            self._idle.begin(texts.step, {each.name: len(each.own) for each in self._fleet}, self._now)
            if self._coming is not None:
                expected = [self._lengths.predict(RUN, prompt_id) for prompt_id in self._coming.prompt_ids]
                self._idle.hint(self._coming.step, self._coming.lengths, expected, self._now)
        return covered

    def _fetch(self, texts: RecordedTexts, covered: Mapping[Cell, int]) -> None:
        """Let every instance index what was generated ahead for its prompts."""
        rollouts = [
            stored(
                texts.prompt_ids[prompt],
                slot,
                texts.seeds[prompt, slot],
                texts.before[prompt, slot][:tokens],
                texts.step - 1,
            )
            for (prompt, slot), tokens in covered.items()
            if tokens
        ]
        for each in self._fleet:
            each.decoder.know(rollouts)

    def _place(self, texts: RecordedTexts, covered: Mapping[Cell, int]) -> None:
        pool, queue, by_name = InstancePool(), WaitingQueue[Cell](), {each.name: each for each in self._fleet}
        for each in self._fleet:
            each.clock = max(each.clock, self._now)
            each.slots = InstanceSlots(each.name, 0, _MAX_RUNNING)
            pool.add(each.slots)
        for number, (prompt, slot) in enumerate(texts.responses):
            tokens = covered.get((prompt, slot), 0)
            whole = bool(tokens) and tokens >= len(texts.before[prompt, slot])
            draft = DraftCoverage(tokens, whole) if tokens else None
            predicted = self._lengths.predict(RUN, texts.prompt_ids[prompt])
            work = remaining_work(predicted, 0, draft, _DRAFT_COST)
            queue.push(WaitingSample((prompt, slot), prompt, 0, work, number, RUN))
        while (placed := queue.place_next(pool)) is not None:
            instance, cell = by_name[placed.instance_id], placed.waiting.ref
            if instance.slots.prompts[cell[0]] == 1:
                # Samples of a prompt share its prefix.
                instance.prefill(len(texts.prompts[cell[0]]))
            name = f"{texts.step}/{cell[0]}/{cell[1]}"
            instance.own[name] = placed.waiting
            tokens = covered.get(cell, 0)
            reference = texts.before[cell][:tokens] if tokens else None
            text = known_text(texts, cell, texts.responses[cell], texts.step, reference)
            forks = tuple(self._forked.get(cell, {}).values())
            instance.decoder.begin(name, replace(text, forks=forks))
        self._forked = {}

    def _end(self, instance: ClockedInstance, ended: WaitingSample[Cell], texts: RecordedTexts) -> None:
        prompt, slot = ended.ref
        tokens = texts.responses[ended.ref]
        instance.slots.give_back(prompt, ended.predicted)
        self._lengths.observe(RUN, texts.prompt_ids[prompt], len(tokens))
        rollout = stored(texts.prompt_ids[prompt], slot, texts.seeds[ended.ref], tokens, texts.step)
        for each in self._fleet:
            if each is not instance:
                each.decoder.know([rollout])

    def _step(self, instance: ClockedInstance) -> Sequence[str]:
        found = instance.decoder.step()
        instance.clock += found.seconds
        instance.steps += 1
        return found.ended

    def _work_ahead(self, instance: ClockedInstance) -> bool:
        """Run a step of the next step's samples on an instance without current samples, or let it wait.

        Returns:
            False if it waits.
        """
        if self._idle is None or self._coming is None:
            instance.clock += _POLL_SECONDS
            return False
        self._idle.poll(instance, instance.clock)
        while instance.waiting:
            sample = instance.waiting.popleft()
            cell = sample.prompt, sample.slot
            name = f"ahead {self._coming.step}/{cell[0]}/{cell[1]}"
            text = known_text(self._coming, cell, self._coming.before[cell], self._coming.step - 1)
            instance.ahead[sample] = name
            instance.decoder.begin(name, replace(text, begun=int(sample.generated)))
        if not len(instance.decoder):
            instance.clock += _POLL_SECONDS
            return False
        by_name = {name: sample for sample, name in instance.ahead.items()}
        for name in self._step(instance):
            if name in instance.forks:
                self._keep_fork(instance, name, len(instance.forks[name][1].response))
                continue
            sample = by_name[name]
            del instance.ahead[sample]
            sample.generated, sample.ends = float(sample.length), 1
        self._fork(instance)
        return True

    def _fork(self, instance: ClockedInstance) -> None:
        """Begin forks at positions that are already generated, nearest ties first, up to an instance's limits."""
        assert self._coming is not None
        for sample in instance.ahead:
            cell, generated = (sample.prompt, sample.slot), instance.generated(sample, instance.clock)
            for fork in self._coming.forks.get(cell, ())[: self.most_forks]:
                if fork.at < generated and fork.at not in self._forked.setdefault(cell, {}):
                    self._forked[cell][fork.at] = fork.response[: fork.at + 1]
                    insort(instance.open_ties, (fork.margin, cell, fork.at))
        length = instance.decoder.context / max(1, len(instance.decoder))

        def seconds(samples: int) -> float:
            return self.device.seconds(samples, samples, samples * length)

        room = max(0, affordable(seconds, len(instance.ahead), len(instance.forks), _FORK_SLOWDOWN))
        for _, cell, at in instance.open_ties[:room]:
            fork = next(each for each in self._coming.forks[cell] if each.at == at)
            if len(fork.response) > at + 1:
                name = f"fork {self._coming.step}/{cell[0]}/{cell[1]}/{at}"
                instance.forks[name] = cell, fork
                text = known_text(self._coming, cell, fork.response, self._coming.step - 1)
                instance.decoder.begin(name, replace(text, begun=at + 1))
        del instance.open_ties[:room]

    def _keep_fork(self, instance: ClockedInstance, name: str, tokens: int) -> None:
        cell, fork = instance.forks.pop(name)
        self._forked[cell][fork.at] = fork.response[:tokens]


def known_text(
    texts: RecordedTexts, cell: Cell, response: Tokens, version: int, reference: Tokens | None = None
) -> KnownText:
    """Return a cell's sample, or a text that is generated ahead for it, as an instance decodes it."""
    prompt, _ = cell
    return KnownText(
        prompt_id=texts.prompt_ids[prompt],
        seed=texts.seeds[cell],
        response=response,
        reference=reference,
        prompt=texts.prompts[prompt],
        version=version,
    )
