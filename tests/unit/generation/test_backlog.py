"""Rollouts that wait: none twice, none lost but the oldest, and tokens counted right."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.generation.drafters.suffix import Backlog
from tests.unit.generation.rollouts import rollout


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 5)) | st.just("pop") | st.sampled_from("abc"),
        max_size=40,
    ),
    st.integers(5, 30),
)
def test_what_goes_in_comes_out_once_by_prompt_and_in_order(operations: list[object], capacity: int) -> None:
    backlog = Backlog(capacity)
    held: dict[str, list[int]] = {}
    sizes: dict[int, int] = {}
    for serial, operation in enumerate(operations):
        if isinstance(operation, tuple):
            prompt, size = operation
            sizes[serial] = size
            backlog.push(rollout([1] * size, prompt_id=prompt, seed=serial))
            held.setdefault(prompt, []).append(serial)
            while sum(sizes[each] for seeds in held.values() for each in seeds) > capacity:
                held.pop(next(iter(held)))
        elif operation == "pop":
            if not backlog:
                assert not held
                continue
            prompt = next(iter(held))
            assert backlog.pop().seed == held[prompt].pop(0)
            if not held[prompt]:
                del held[prompt]
        else:
            taken = [each.seed for each in backlog.pop_prompt(("r", str(operation)))]
            assert taken == held.pop(str(operation), [])
        assert backlog.tokens == sum(sizes[each] for seeds in held.values() for each in seeds) <= capacity
        assert bool(backlog) == bool(held)
