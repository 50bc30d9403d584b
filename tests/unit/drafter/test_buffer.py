"""The replay buffer, the samples held out of it, and the schedule of updates."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from services.contracts.learner import FedBatchEnd, FedSample
from services.drafter.config import DrafterConfig
from services.drafter.feed.collector import ReplayBuffer, SampleCollector, prompt_hash
from services.drafter.learning.data import TrainingSample, Weighting
from services.drafter.metrics import DrafterMetrics

SHARE = 0.3
prompt_lists = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 20)), max_size=60)


def joined(number: int, prompt: int, length: int) -> TrainingSample:
    return TrainingSample(
        "r", "b", f"p{prompt}", number, 0, (prompt,), (1,) * length, None, entries=(str(number),)
    )


@given(prompt_lists, st.integers(1, 200), st.integers(1, 100), st.integers(1, 4), st.integers(1, 120))
def test_nothing_is_lost_or_doubled_and_no_prompt_is_on_both_sides(
    given_prompts: list[tuple[int, int]], most: int, most_held_out: int, interval: int, update: int
) -> None:
    buffer = ReplayBuffer(most, most_held_out, SHARE)
    everything = [joined(number, *each) for number, each in enumerate(given_prompts)]
    surplus: list[TrainingSample] = []
    retired: list[TrainingSample] = []
    for each in everything:
        gone, old = buffer.add(each)
        surplus, retired = surplus + gone, retired + old
        assert buffer.tokens <= most or len(buffer) == 1
    chosen, passed_over = buffer.draw(interval, update, seed=1)
    held_out = list(buffer.held_out)
    sides = (surplus, retired, chosen, passed_over, held_out)
    assert sorted(each.entries for side in sides for each in side) == sorted(e.entries for e in everything)
    assert len(buffer) == buffer.tokens == 0
    learned = {each.prompt for each in chosen}
    assert not learned & {each.prompt for each in (*held_out, *retired)}
    assert sum(each.length for each in chosen) <= max(
        update, max((each.length for each in chosen), default=0)
    )
    left = len(chosen) + len(passed_over)
    assert len(chosen) <= -(-left // interval)


@given(prompt_lists)
def test_the_split_does_not_depend_on_the_order_or_the_process(given_prompts: list[tuple[int, int]]) -> None:
    sides = []
    for order in (given_prompts, given_prompts[::-1]):
        buffer = ReplayBuffer(10**6, 10**6, SHARE)
        for number, each in enumerate(order):
            buffer.add(joined(number, *each))
        sides.append({each.prompt for each in buffer.held_out})
    assert sides[0] == sides[1]


def test_the_oldest_give_way_on_both_sides() -> None:
    learned = next(p for p in range(100) if prompt_hash((p,)) >= SHARE * 2**64)
    held_out = next(p for p in range(100) if prompt_hash((p,)) < SHARE * 2**64)
    buffer = ReplayBuffer(20, 20, SHARE)
    gone: list[str] = []
    for number in range(5):
        surplus, _ = buffer.add(joined(number, learned, 9))
        _, retired = buffer.add(joined(10 + number, held_out, 9))
        gone += [each.entries[0] for each in (*surplus, *retired)]
    assert gone == ["0", "10", "1", "11", "2", "12"]


def test_of_few_prompts_one_is_held_out_for_good() -> None:
    free = [p for p in range(200) if prompt_hash((p,)) >= SHARE * 2**64][:3]
    buffer = ReplayBuffer(10**6, 10**6, SHARE)
    for number, prompt in enumerate(free * 2):
        buffer.add(joined(number, prompt, 3))
    learned, _ = buffer.draw(1, 10**6, seed=0)
    (chosen,) = {each.prompt for each in buffer.held_out}
    assert len(buffer.held_out) == 2
    assert len(learned) == 4
    assert buffer.forced == {prompt_hash(chosen)}
    # The next process is told.
    later = ReplayBuffer(10**6, 10**6, SHARE, buffer.forced)
    later.add(joined(0, chosen[0], 3))
    assert len(later.held_out) == 1


def test_a_single_prompt_is_learned_from() -> None:
    free = next(p for p in range(100) if prompt_hash((p,)) >= SHARE * 2**64)
    buffer = ReplayBuffer(10**6, 10**6, SHARE)
    buffer.add(joined(0, free, 3))
    assert len(buffer.draw(1, 10**6, seed=0)[0]) == 1
    assert buffer.draw(1, 10**6, seed=0)[0] == []


def collector_of(interval: int) -> SampleCollector:
    config = DrafterConfig(
        model=Path("model"), folder=Path("folder"), interval=interval, weighting=Weighting.NONE
    )
    return SampleCollector(config, DrafterMetrics(CollectorRegistry()), lambda: 0.0)


def end_step(collector: SampleCollector) -> None:
    """Feed a step of two samples that are learned from, and its end."""
    free = next(p for p in range(1000) if prompt_hash((p,)) >= 2**63)
    batch = ("run", f"step-{collector.steps}")
    samples = [FedSample(batch, "p", slot, None, 1, (free,), (1, 2)) for slot in range(2)]
    entries = [(f"{batch[1]}-{number}", fed) for number, fed in enumerate([*samples, FedBatchEnd(batch)])]
    collector.take_in(entries)
    collector.tick()


def test_an_update_is_due_after_every_interval_of_steps() -> None:
    collector = collector_of(3)
    due = []
    for _ in range(7):
        end_step(collector)
        due.append(collector.is_due)
        if due[-1]:
            assert collector.draw(seed=0)
    assert due == [False, False, True, False, False, True, False]
    assert collector.steps == 7


def test_steps_during_an_update_make_one_more_due_at_once_if_there_is_something_to_learn() -> None:
    collector = collector_of(1)
    end_step(collector)
    assert collector.draw(seed=0)
    collector.tick()
    assert not collector.is_due
    for _ in range(4):
        end_step(collector)
    assert collector.is_due
    chosen = collector.draw(seed=1)
    assert len(chosen) == 8
    assert not collector.is_due
    collector.return_to_buffer(chosen)
    assert collector.is_due
