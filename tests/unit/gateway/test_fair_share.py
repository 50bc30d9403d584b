"""Priority and fair share: higher priorities first, runs of one priority by weight in predicted tokens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import hypothesis.strategies as st
from hypothesis import given

from services.gateway.scheduler.placement import InstancePool, InstanceSlots, WaitingQueue, WaitingSample

runs = st.lists(
    st.tuples(st.integers(1, 8), st.lists(st.floats(1, 1e4), min_size=1, max_size=30)), min_size=2, max_size=4
)


class Line:
    """Queue of numbered samples in front of one instance with room for all."""

    def __init__(self) -> None:
        self.queue: WaitingQueue[int] = WaitingQueue()
        self.pool = InstancePool()
        self.pool.add(InstanceSlots("i", 1, 1 << 30))
        self._numbers = 0

    def push(self, run: str, predicted: float, priority: int = 0, weight: int = 1) -> None:
        self._numbers += 1
        self.queue.push(WaitingSample(self._numbers, "p", 1, predicted, self._numbers, run, priority, weight))

    def served(self) -> Iterator[WaitingSample[int]]:
        while (placed := self.queue.place_next(self.pool)) is not None:
            yield placed.waiting


@given(runs, st.integers(0, 20))
def test_runs_that_wait_get_tokens_by_weight_within_one_sample_of_each(
    given_runs: list[tuple[int, list[float]]], head_start: int
) -> None:
    line = Line()
    left = {f"r{number}": len(tokens) for number, (_, tokens) in enumerate(given_runs)}
    weights = {f"r{number}": weight for number, (weight, _) in enumerate(given_runs)}
    most = {f"r{number}": max(tokens) for number, (_, tokens) in enumerate(given_runs)}
    first, *others = left
    # The first run has been served for a while when the others come: they get no more for that.
    for _ in range(head_start):
        line.push(first, most[first], weight=weights[first])
    for tokens in given_runs[0][1]:
        line.push(first, tokens, weight=weights[first])
    serving = line.served()
    for _ in range(head_start):
        assert next(serving).run == first
    for number, run in enumerate(others, 1):
        for tokens in given_runs[number][1]:
            line.push(run, tokens, weight=weights[run])
    had = dict.fromkeys(left, 0.0)
    for sample in serving:
        had[sample.run] += sample.predicted
        left[sample.run] -= 1
        for one, two in combinations([run for run, waiting in left.items() if waiting], 2):
            apart = abs(had[one] / weights[one] - had[two] / weights[two])
            assert apart <= (most[one] / weights[one] + most[two] / weights[two]) * (1 + 1e-9)
    assert not any(left.values())


def test_two_runs_of_weights_two_and_one_get_two_samples_to_one() -> None:
    line = Line()
    for _ in range(60):
        line.push("big", 100.0, weight=2)
        line.push("small", 100.0, weight=1)
    served = [sample.run for sample, _ in zip(line.served(), range(60), strict=False)]
    for end in range(1, 61):
        assert abs(served[:end].count("big") - 2 * served[:end].count("small")) <= 2


def test_a_run_alone_gets_everything() -> None:
    line = Line()
    for tokens in (5.0, 50.0, 20.0):
        line.push("only", tokens, weight=1)
    assert [sample.predicted for sample in line.served()] == [50.0, 20.0, 5.0]


def test_short_samples_are_not_starved_by_a_run_of_long_ones() -> None:
    line = Line()
    for _ in range(10):
        line.push("long", 10_000.0)
    for _ in range(10):
        line.push("short", 10.0)
    served = [sample.run for sample in line.served()]
    assert "short" not in served[12:]


@given(st.lists(st.tuples(st.integers(-2, 2), st.sampled_from("abc"), st.integers(1, 4)), max_size=40))
def test_higher_priorities_are_placed_first(given_samples: list[tuple[int, str, int]]) -> None:
    line = Line()
    for priority, run, weight in given_samples:
        line.push(run, 10.0, priority, weight)
    priorities = [sample.priority for sample in line.served()]
    assert priorities == sorted(priorities, reverse=True)
    assert len(priorities) == len(given_samples)


def test_a_sample_of_higher_priority_that_comes_later_overtakes() -> None:
    line = Line()
    line.push("a", 10.0)
    line.push("a", 10.0)
    serving = line.served()
    assert next(serving).priority == 0
    line.push("b", 1.0, priority=5)
    assert [sample.priority for sample in serving] == [5, 0]


def test_the_queue_does_not_grow_with_new_predictions() -> None:
    line = Line()
    for predicted in range(1, 1000):
        line.queue.push(WaitingSample(0, "p", 1, float(predicted), 0, "a"))
    level = line.queue._levels[1][0]
    assert len(level.shares["a"].heap) <= 4 + 64 + 1
    assert [sample.predicted for sample in line.served()] == [999.0]
