"""What drafters take along: a drafter that begins with it goes on as the one that it comes from would have."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from services.generation.drafting.drafter import Carrying, DraftContext
from services.generation.drafting.given import GivenDrafter
from services.generation.drafting.plan import FixedPlan
from services.generation.drafting.speculation import Speculation
from services.generation.engine.types import SampleState
from services.generation.metrics import EngineMetrics
from services.generation.steering.gate import Gated

TOKENS = st.lists(st.integers(0, 3), min_size=8, max_size=60)


def offered(drafter: GivenDrafter, response: list[int]) -> list[int]:
    offers = drafter.offer([SampleState("s", [9], response, 8)], 8)
    first = None if offers is None else offers[0]
    return [] if first is None else list(first.tokens)


@given(TOKENS, TOKENS, st.data())
def test_an_alignment_goes_on(guess: list[int], response: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(response)))
    donor, receiver = GivenDrafter(), GivenDrafter()
    donor.begin(DraftContext("s", [9], guess))
    # Token by token, as it was decoded: all at once it could end up elsewhere.
    for end in range(1, cut + 1):
        offered(donor, response[:end])
    receiver.begin(DraftContext("s", [9], guess, carried={"given": donor.carry("s")}))
    for end in range(cut, len(response) + 1):
        assert offered(receiver, response[:end]) == offered(donor, response[:end])


def test_nothing_is_known_of_a_sample_without_a_guess() -> None:
    drafter = GivenDrafter()
    drafter.begin(DraftContext("s", [9]))
    assert drafter.carry("s") == b""


def test_the_state_of_another_guess_is_left_out() -> None:
    donor, receiver = GivenDrafter(), GivenDrafter()
    donor.begin(DraftContext("s", [9], [1, 2, 3, 4]))
    receiver.begin(DraftContext("s", [9], [5, 6, 7, 8, 9], carried={"given": donor.carry("s")}))
    assert offered(receiver, []) == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("state", [b"x", bytes(33)])
def test_noise_costs_a_fault_and_nothing_else(state: bytes) -> None:
    metrics = EngineMetrics(CollectorRegistry())
    speculation = Speculation([GivenDrafter()], FixedPlan(4), 512, metrics)
    speculation.begin(DraftContext("s", [9], [1, 2, 3], carried={"given": state}))
    assert speculation.drafts([SampleState("s", [9], [], 8)]) == {"s": [1, 2, 3]}


def test_a_gate_lets_it_through() -> None:
    drafter = GivenDrafter()
    gated = Gated(drafter, lambda name, samples: np.ones(len(samples), bool).tolist())
    assert isinstance(gated, Carrying)
    gated.begin(DraftContext("s", [9], [1, 2, 3]))
    speculation = Speculation([gated], FixedPlan(4), 512, EngineMetrics(CollectorRegistry()))
    assert speculation.carry("s") == {"given": drafter.carry("s")}
