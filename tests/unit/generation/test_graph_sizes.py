"""Numbers of tokens of a step for which CUDA graphs are captured."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from services.generation.engine.step_sizes import graph_sizes
from services.generation.speculation.selection import draft_token_counts


def vllms(max_samples: int, ceiling: int = 512) -> list[int]:
    """vLLM's own list for so many samples, on a device with this ceiling."""
    most = min(2 * max_samples, ceiling)
    sizes = {1, 2, 4, *range(8, min(most + 1, 256), 8), *range(256, most + 1, 16)}
    return sorted({each for each in sizes if each <= most} | {min(max_samples, most)})


SAMPLES, WINDOWS, CAPACITIES = st.integers(1, 1024), st.integers(1, 128), st.integers(1, 16384)


@given(SAMPLES, WINDOWS, CAPACITIES, st.sampled_from([512, 1024]))
def test_every_step_has_a_graph_that_is_hardly_larger(
    samples: int, window: int, capacity: int, ceiling: int
) -> None:
    own = vllms(samples, ceiling)
    sizes = graph_sizes(own, samples, window, capacity)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[: len(own)] == tuple(own)
    # Each sample has its drafts, as far as there is memory for their logits; or none has any.
    most = max(samples, min(samples * (1 + window), capacity))
    assert sizes[-1] == max(most, own[-1])
    for smaller, larger in zip(sizes[len(own) - 1 :], sizes[len(own) :], strict=False):
        assert larger - smaller <= max(8, smaller // 16)


def test_there_are_not_many_more_than_vllms() -> None:
    # 70B with a vocabulary of 150,000: a gigabyte of float32 logits is 1,789 rows.
    assert (len(vllms(256)), len(graph_sizes(vllms(256), 256, 16, 1789))) == (51, 79)
    assert len(graph_sizes(vllms(1024), 1024, 16, 16384)) == 131


@given(st.lists(st.integers(1, 512), max_size=5), SAMPLES, CAPACITIES)
def test_without_drafts_or_without_graphs_the_list_is_vllms(
    own: list[int], samples: int, capacity: int
) -> None:
    assert graph_sizes(own, samples, 0, capacity) == tuple(own)
    assert graph_sizes([], samples, 16, capacity) == ()


@given(SAMPLES, WINDOWS, CAPACITIES, st.data())
def test_the_planner_fills_graphs(samples: int, window: int, capacity: int, data: st.DataObject) -> None:
    """All of its steps have the size of a graph, but for one that has every draft there is."""
    sizes = graph_sizes(vllms(samples), samples, window, capacity)
    running = data.draw(st.integers(1, samples))
    room = min(running * window, max(0, capacity - running))
    assume(room > 0)
    counts = draft_token_counts(running, room, sizes)
    assert {running + count for count in counts[1:].tolist()} <= {*sizes, running + room}
    assert running + counts[-1] <= sizes[-1]
