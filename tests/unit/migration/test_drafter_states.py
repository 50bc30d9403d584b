"""What drafters take along: a drafter that begins with it goes on as the one that it comes from would have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from services.generation.drafters.reference.drafter import ReferenceDrafter
from services.generation.engine.types import EngineSampleState
from services.generation.loop.metrics import EngineMetrics
from services.generation.speculation.drafter import DraftContext
from services.generation.speculation.plan import FixedLengthPlanner
from services.generation.speculation.speculation import Speculation
from tests.support.proposals import unbatched

TOKENS = st.lists(st.integers(0, 3), min_size=8, max_size=60)


def offered(drafter: ReferenceDrafter, response: list[int]) -> list[int]:
    proposals = drafter.propose([EngineSampleState("s", [9], response, 8, 1 + len(response))], 8, {})
    (first,) = unbatched(proposals, 1)
    return [] if first is None else list(first.tokens)


@given(TOKENS, TOKENS, st.data())
def test_an_alignment_goes_on(guess: list[int], response: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(response)))
    donor, receiver = ReferenceDrafter(), ReferenceDrafter()
    donor.begin(DraftContext("s", [9], guess))
    # Token by token, as it was decoded: all at once it could end up elsewhere.
    for end in range(1, cut + 1):
        offered(donor, response[:end])
    receiver.begin(DraftContext("s", [9], guess, carried={"reference": donor.carry("s")}))
    for end in range(cut, len(response) + 1):
        assert offered(receiver, response[:end]) == offered(donor, response[:end])


def test_nothing_is_known_of_a_sample_without_a_guess() -> None:
    drafter = ReferenceDrafter()
    drafter.begin(DraftContext("s", [9]))
    assert drafter.carry("s") == b""


def test_the_state_of_another_guess_is_left_out() -> None:
    donor, receiver = ReferenceDrafter(), ReferenceDrafter()
    donor.begin(DraftContext("s", [9], [1, 2, 3, 4]))
    receiver.begin(DraftContext("s", [9], [5, 6, 7, 8, 9], carried={"reference": donor.carry("s")}))
    assert offered(receiver, []) == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("state", [b"x", bytes(33)])
def test_noise_costs_a_fault_and_nothing_else(state: bytes) -> None:
    metrics = EngineMetrics(CollectorRegistry())
    speculation = Speculation([ReferenceDrafter()], FixedLengthPlanner(4), 512, metrics)
    speculation.begin(DraftContext("s", [9], [1, 2, 3], carried={"reference": state}))
    assert speculation.drafts([EngineSampleState("s", [9], [], 8, 1)]) == {"s": [1, 2, 3]}


class Unwanted(FixedLengthPlanner):
    """Planner that wants proposals for some samples only."""

    def wants(self, drafter: str, samples: Sequence[EngineSampleState]) -> Sequence[bool]:
        return np.ones(len(samples), bool).tolist()


def test_a_drafter_that_not_all_samples_want_takes_it_along() -> None:
    drafter = ReferenceDrafter()
    speculation = Speculation([drafter], Unwanted(4), 512, EngineMetrics(CollectorRegistry()))
    speculation.begin(DraftContext("s", [9], [1, 2, 3]))
    assert speculation.carry("s") == {"reference": drafter.carry("s")}
