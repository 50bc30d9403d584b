"""Reallocation in a simulated cluster: views of its instances for the reallocator's own plan. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

from services.reallocator.config import ReallocatorConfig
from services.reallocator.planning.decision_scope import DecisionScope, Name
from services.reallocator.planning.learned_costs import LearnedCosts
from services.reallocator.planning.plan import plan
from services.reallocator.planning.records import (
    Candidate,
    InstanceView,
    LoadView,
    Move,
    MovePrice,
    Transfer,
    price,
)
from services.reallocator.planning.throughput import Roofline, ThroughputCurve
from services.simulator.device_tables import DeviceTable
from services.simulator.modelled_instance import ModelledInstance, SimulatedSample

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
