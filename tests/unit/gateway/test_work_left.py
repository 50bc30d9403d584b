"""Predicted work that is left of a batch, by which instances are scaled."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from services.gateway.scheduler.active_batches import WorkLeft
from tests.unit.gateway.scheduler_parts import SchedulerParts, a_batch, finished, tokens, turn


async def test_the_work_left_of_a_batch_follows_its_samples() -> None:
    parts = SchedulerParts()
    link = parts.link("a", room=1)
    left = parts.scheduler.add(a_batch(2)).left
    assert (left.waiting_samples, left.waiting_tokens) == (2, 100.0)
    await turn()
    assert (left.waiting_samples, left.waiting_tokens) == (1, 50.0)
    assert (left.running_samples, left.running_tokens) == (1, 50.0)
    parts.events.responded(link, tokens(link.items[0].handle, *range(20)))
    assert left.running_tokens == 30.0
    parts.events.responded(link, tokens(link.items[0].handle, *range(40)))
    assert left.running_tokens == 1.0
    parts.events.responded(link, finished(link.items[0].handle))
    assert (left.running_samples, left.running_tokens) == (0, 0.0)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from(("wait", "run", "gain", "end")), st.floats(1, 1e6)))
)
def test_the_work_left_is_the_sum_over_the_samples(events: list[tuple[int, str, float]]) -> None:
    left, samples = WorkLeft(), dict[int, tuple[float, bool]]()
    for index, event, amount in events:
        if event == "wait":
            left.set(index, amount, waiting=True)
            samples[index] = (amount, True)
        elif event == "run" and index in samples:
            left.run(index)
            samples[index] = (samples[index][0], False)
        elif event == "gain" and index in samples:
            left.run(index, int(amount))
            samples[index] = (max(1.0, samples[index][0] - int(amount)), False)
        elif event == "end":
            left.end(index)
            samples.pop(index, None)
    for waiting, count, total in (
        (True, left.waiting_samples, left.waiting_tokens),
        (False, left.running_samples, left.running_tokens),
    ):
        of_kind = [tokens for tokens, waits in samples.values() if waits is waiting]
        assert count == len(of_kind)
        assert total == pytest.approx(sum(of_kind))
