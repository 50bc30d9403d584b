"""An automaton never writes an edge beyond the rows that it has asked for."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from kernels.suffix_index.arena import Arena

MOST_EDGES = 4_096
# Mostly one token, because runs of a token divide the states that they pass.
TOKENS = st.sampled_from([0, 0, 0, 1, 2])
TEXTS = st.lists(st.tuples(st.integers(0, 1_000), st.lists(TOKENS, min_size=1, max_size=8)), max_size=40)


@given(TEXTS)
@example([(0, [1, 0]), (2, [1]), (2, [2]), (2, [0])])
def test_a_token_takes_no_more_rows_than_it_has_asked_for(texts):
    from kernels.suffix_index.compiled import entry_points
    from kernels.suffix_index.compiled.layout import EDGES_END, LACKING, STATES

    arena = Arena(1_000)
    ends = [arena.new_root()]
    scalars = arena.arrays.scalars
    # Has rows behind the ones that the automaton knows of, so that a write there is seen and harms nothing.
    edges = np.zeros(MOST_EDGES, arena.arrays.edges.dtype)
    for place, text in texts:
        end = ends[place % len(ends)]
        for token in text:
            if scalars[STATES] + 2 > len(arena.arrays.states):
                arena.grow()
            room = int(scalars[EDGES_END])
            for _ in range(2):
                arrays = arena.arrays._replace(edges=edges[:room])
                done, state = entry_points.extend_text(
                    arrays, np.array([token], np.int32), 0, end, np.float32(1), 8
                )
                if done:
                    break
                room += int(scalars[LACKING])
            assert done
            assert scalars[EDGES_END] <= room
            end = int(state)
            ends.append(end)
