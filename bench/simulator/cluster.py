"""Instances that decode samples of known lengths by a curve of step times, and the plan that moves them. Pure.

What decides is services.reallocator's plan, trigger and rest, as in the service; like there it knows how long a
sample is by now, and of how long it will be what samples before it tell. A move costs what the plan thinks it does.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from services.reallocator.planning.cooldown import Cooldown
from services.reallocator.planning.plan import plan
from services.reallocator.planning.price import MoveBy, price
from services.reallocator.planning.records import Candidate, InstanceView, Move, ReallocationRules, Transfer
from services.reallocator.planning.remaining_length import RemainingLengthEstimator
from services.reallocator.planning.throughput import ThroughputCurve
from services.reallocator.planning.trigger import Trigger

_BLOCK = 16


@dataclass(slots=True)
class SimulatedSample:
    """Lengths in tokens. It is paused until `waits_until` (seconds)."""

    key: str
    length: int
    generated: float = 0.0
    waits_until: float = 0.0


@dataclass(slots=True)
class SimulatedInstance:
    """`clock` is the time, in seconds, at which its next step begins."""

    name: str
    samples: dict[str, SimulatedSample]
    clock: float = 0.0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class ReallocationSetup:
    """Rules of reallocation in a simulated cluster; `threshold` None means the curve's own saturation point."""

    rules: ReallocationRules = field(default_factory=ReallocationRules)
    decision_steps: int = 64
    threshold: int | None = None
    flatness: float = 0.25
    limit: int = 2048


@dataclass(slots=True)
class StageResult:
    """Result of a simulated stage: seconds, tokens, moves (in all and by prefix) and decisions."""

    seconds: float = 0.0
    tokens: float = 0.0
    moved: int = 0
    by_prefix: int = 0
    decisions: int = 0
    transfers: list[tuple[float, Transfer]] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of the whole cluster."""
        return self.tokens / self.seconds if self.seconds else 0.0


class SimulatedCluster:
    """Usage: `run` once."""

    def __init__(
        self,
        loads: Mapping[str, Sequence[int]],
        curve: ThroughputCurve,
        manner: ReallocationSetup | None = None,
        generated: int = 0,
    ) -> None:
        """Build the instances with their samples.

        Args:
            loads: lengths of the samples of each instance.
            curve: of every instance.
            manner: None: nothing is moved.
            generated: tokens that every sample has at the beginning.
        """
        self.instances = [
            SimulatedInstance(
                name,
                {
                    f"{name}/{n}": SimulatedSample(f"{name}/{n}", length, generated)
                    for n, length in enumerate(lengths)
                },
            )
            for name, lengths in sorted(loads.items())
        ]
        self.outcome = StageResult()
        self._curve = curve
        self._manner = manner
        self._cooldown = Cooldown(manner.rules.cooldown_decisions if manner else 0)
        self._lifetimes = RemainingLengthEstimator()
        self._left: dict[str, set[str]] = {}
        self._trigger = Trigger(manner.decision_steps if manner else 1)

    def run(self) -> StageResult:
        """Until every sample is done."""
        while busy := [each for each in self.instances if each.samples]:
            instance = min(busy, key=lambda each: (each.clock, each.name))
            self._step(instance)
            if self._manner is not None:
                self._decide(self._manner, instance.clock)
        return self.outcome

    def _step(self, instance: SimulatedInstance) -> None:
        running = [each for each in instance.samples.values() if each.waits_until <= instance.clock]
        if not running:
            instance.clock = min(each.waits_until for each in instance.samples.values())
            return
        instance.clock += self._curve.step_seconds(len(running))
        instance.steps += 1
        for sample in running:
            gained = min(self._curve.tokens, sample.length - sample.generated)
            sample.generated += gained
            self.outcome.tokens += gained
            if sample.generated >= sample.length:
                del instance.samples[sample.key]
        self.outcome.seconds = max(self.outcome.seconds, instance.clock)

    def _decide(self, manner: ReallocationSetup, now: float) -> None:
        steps = {(each.name, 1): each.steps for each in self.instances}
        if not self._trigger.is_due(steps, [len(each.samples) for each in self.instances]):
            return
        for each in self.instances:
            lengths: dict[Hashable, int] = {key: int(s.generated) for key, s in each.samples.items()}
            self._lifetimes.saw(each.name, lengths, self._left.pop(each.name, ()))
        transfers = plan([self._standing(each, manner) for each in self.instances], manner.rules)
        self._trigger.decided(steps)
        self._cooldown.decided(transfers)
        self.outcome.decisions += 1
        by_name = {each.name: each for each in self.instances}
        for transfer in transfers:
            for move in transfer.moves:
                self._move(by_name[transfer.donor], by_name[transfer.receiver], move, manner, now)
            self.outcome.moved += len(transfer.moves)
            self.outcome.by_prefix += transfer.count(MoveBy.PREFIX)
            self.outcome.transfers.append((now, transfer))

    def _move(
        self,
        donor: SimulatedInstance,
        receiver: SimulatedInstance,
        move: Move,
        manner: ReallocationSetup,
        now: float,
    ) -> None:
        if not receiver.samples:
            receiver.clock = max(receiver.clock, now)
        cost = manner.rules.ways[move.by]
        paid = price(move.by, cost, move.tokens, self._curve, len(receiver.samples) + 1)
        sample = donor.samples.pop(move.key)
        sample.waits_until = max(now, receiver.clock) + paid.stall
        donor.clock += paid.donor
        # What runs there waits for the prefill; the sample that is prefilled has it in its stall.
        receiver.clock += paid.receiver if receiver.samples else 0.0
        receiver.samples[move.key] = sample
        self._left.setdefault(donor.name, set()).add(move.key)

    def _standing(self, instance: SimulatedInstance, manner: ReallocationSetup) -> InstanceView:
        threshold = (
            manner.threshold or self._curve.saturation_point(manner.flatness) or len(self._curve.seconds)
        )
        return InstanceView(
            instance.name,
            len(instance.samples),
            max(0, len(self._curve.seconds) - len(instance.samples)),
            1_000_000,
            self._curve,
            threshold,
            tuple(self._candidate(each, manner.limit) for each in instance.samples.values()),
            gives=self._cooldown.gives(instance.name),
            receives=self._cooldown.receives(instance.name),
        )

    def _candidate(self, sample: SimulatedSample, limit: int) -> Candidate:
        tokens = int(sample.generated)
        remaining = self._lifetimes.remaining(tokens, limit)
        return Candidate(sample.key, tokens, self._curve.tokens - 1, remaining, tokens // _BLOCK + 1)
