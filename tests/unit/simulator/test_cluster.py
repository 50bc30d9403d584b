"""The simulated cluster: every sample ends once, time goes on, and the same seed gives the same answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.bubbles.config import BubblesConfig
from services.reallocator.config import ReallocatorConfig
from services.simulator.cluster_simulation import ClusterSimulation
from services.simulator.device_tables import H100, QWEN3_8B, DeviceTable, decoding_table
from services.simulator.simulation_setup import (
    PREGENERATED,
    Ints,
    LogNormalLengths,
    SimulatedSource,
    SimulatedWorkload,
    SimulationSetup,
)

DEVICE = decoding_table("8B H100", QWEN3_8B, H100)
WORK = SimulatedWorkload(LogNormalLengths(300, 0.9, 4000), 12, 8)


class Given:
    """Lengths of a test: the same in every step."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.rows = np.array(rows, np.int64)

    def draw(self, prompts: int, samples: int, random: np.random.Generator) -> Ints:
        return np.tile(self.rows, (1, 2))[:prompts, :samples]


def small(kv_tokens: int) -> DeviceTable:
    return replace(DEVICE, kv_tokens=kv_tokens)


def setups() -> st.SearchStrategy[SimulationSetup]:
    """Clusters with any of the services on or off, some short of seats and KV."""
    rows = st.integers(1, 4).flatmap(
        lambda samples: st.lists(
            st.lists(st.integers(1, 900), min_size=samples, max_size=samples), min_size=1, max_size=12
        )
    )
    return st.builds(
        lambda rows, kv, instances, seats, suffix, bubbles, moves, update, seed: SimulationSetup(
            small(kv),
            instances,
            SimulatedWorkload(Given(rows), len(rows), len(rows[0]), 20),
            steps=3,
            sources=(SimulatedSource("suffix", 0.6),) if suffix else (),
            pregenerated=SimulatedSource(PREGENERATED, 0.9) if bubbles else None,
            bubbles=BubblesConfig.model_construct(during_update=bubbles) if bubbles else None,
            reallocation=ReallocatorConfig.model_construct(
                decision_steps=8, poll_seconds=0.05, least_balance_gain=0.0, payback=0.0
            )
            if moves
            else None,
            update_seconds=update,
            max_running=seats,
            seed=seed,
        ),
        rows,
        st.sampled_from([1000, 3000, 400_000]),
        st.integers(1, 6),
        st.integers(1, 64),
        st.booleans(),
        st.sampled_from(["", "pregenerate", "halt"]),
        st.booleans(),
        st.sampled_from([0.0, 0.5]),
        st.integers(0, 3),
    )


@settings(deadline=None, max_examples=40)
@given(setups())
def test_every_sample_ends_once_and_time_never_goes_back(setup: SimulationSetup) -> None:
    simulation = ClusterSimulation(setup)
    clocks = [each.clock for each in simulation.instances]
    ended, now, rows = (
        0,
        0.0,
        setup.workload.lengths.draw(setup.workload.prompts, setup.workload.samples, None),
    )

    def on_end(count: int, left: int) -> None:
        nonlocal ended, now, clocks
        ended += count
        assert simulation.now >= now
        later = [each.clock for each in simulation.instances]
        assert all(b >= a for a, b in zip(clocks, later, strict=True))
        now, clocks = simulation.now, later

    simulation._on_end = on_end
    for n, step in enumerate(simulation.run(), 1):
        # That each ended once is asserted where the figures are made, of the counts that instances keep.
        assert ended == n * rows.size == n * step.samples
        assert step.tokens == rows.sum()
        assert step.seconds > 0
        # A sample takes part in one step for each token, or in fewer where drafts are accepted.
        assert step.decode_steps <= rows.mean() + 1e-9
        assert step.most_decode_steps <= rows.max()
        if not setup.sources and setup.pregenerated is None:
            assert step.decode_steps == pytest.approx(rows.mean())


@settings(deadline=None, max_examples=10)
@given(setups())
def test_the_same_seed_gives_the_same_answer(setup: SimulationSetup) -> None:
    assert list(ClusterSimulation(setup).run()) == list(ClusterSimulation(setup).run())


def test_another_seed_gives_another_answer() -> None:
    one, two = (next(ClusterSimulation(SimulationSetup(DEVICE, 2, WORK, seed=seed)).run()) for seed in (0, 1))
    assert one.tokens != two.tokens


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.lists(st.integers(1, 3000), min_size=2, max_size=2), min_size=1, max_size=24),
    st.integers(1, 8),
)
def test_one_more_instance_makes_no_plain_step_slower_beyond_how_samples_are_placed(
    rows: list[list[int]], instances: int
) -> None:
    """A sample is placed whole: the last one on an instance may come late by no more than it takes alone."""
    setup = SimulationSetup(
        DEVICE, instances, SimulatedWorkload(Given(rows), len(rows), 2, 20), affinity_slack=0.0
    )
    few, more = (
        next(ClusterSimulation(replace(setup, instances=each)).run()) for each in (instances, instances + 1)
    )
    # What a step takes longer with one sample more, over the longest response.
    one_sample = max(map(max, rows)) * (DEVICE.seconds(2, 2, 8000) - DEVICE.seconds(1, 1, 4000))
    assert more.seconds <= 1.02 * few.seconds + one_sample


def test_a_plain_step_takes_what_the_table_says() -> None:
    work = SimulatedWorkload(Given([[100]]), 1, 1, 20)
    step = next(ClusterSimulation(SimulationSetup(DEVICE, 1, work)).run())
    decoding = sum(DEVICE.seconds(1, 1, 20 + done) for done in range(100))
    assert step.seconds == pytest.approx(decoding + DEVICE.seconds(1, 20, 0))


def test_drafts_save_steps_and_time() -> None:
    plain = next(ClusterSimulation(SimulationSetup(DEVICE, 2, WORK)).run())
    source = (SimulatedSource("suffix", 0.8),)
    drafted = next(ClusterSimulation(SimulationSetup(DEVICE, 2, WORK, sources=source)).run())
    assert drafted.seconds < 0.5 * plain.seconds
    assert drafted.decode_steps < 0.5 * plain.decode_steps
    assert drafted.acceptance_length == pytest.approx(1 + drafted.acceptance_rate * drafted.draft_length)


def test_a_draft_model_that_is_slow_is_not_used() -> None:
    slow = (SimulatedSource("quantized", 0.9, passes=DEVICE),)
    plain = next(ClusterSimulation(SimulationSetup(DEVICE, 2, WORK)).run())
    drafted = next(ClusterSimulation(SimulationSetup(DEVICE, 2, WORK, sources=slow)).run())
    assert drafted.draft_length == 0
    assert drafted.seconds == pytest.approx(plain.seconds, rel=0.02)


def test_bubbles_and_the_update_leave_drafts_for_the_next_step() -> None:
    setup = SimulationSetup(
        DEVICE,
        4,
        WORK,
        steps=2,
        pregenerated=SimulatedSource(PREGENERATED, 0.95),
        bubbles=BubblesConfig.model_construct(),
        update_seconds=2.0,
    )
    first, second = ClusterSimulation(setup).run()
    assert first.covered == 0
    assert second.covered > 100
    assert second.decode_steps < first.decode_steps
    halted = replace(setup, bubbles=BubblesConfig.model_construct(during_update="halt"))
    *_, without_update = ClusterSimulation(halted).run()
    assert 0 < without_update.covered < second.covered


def test_moves_empty_a_loaded_instance_sooner() -> None:
    # One prompt's samples are long and stay together; nobody has seen them before.
    rows = [[3000] * 96, *[[60] * 96] * 3]
    work = SimulatedWorkload(Given(rows), 4, 96, 20)
    setup = SimulationSetup(DEVICE, 4, work, foreseen=False, affinity_slack=200.0)
    still = next(ClusterSimulation(setup).run())
    moved = next(ClusterSimulation(replace(setup, reallocation=ReallocatorConfig.model_construct())).run())
    assert moved.moved
    assert moved.longest_bubble < still.longest_bubble
    assert moved.seconds < 0.9 * still.seconds


def test_what_a_move_costs_is_paid() -> None:
    rows = [[3000] * 96, *[[60] * 96] * 3]
    setup = SimulationSetup(
        DEVICE,
        4,
        SimulatedWorkload(Given(rows), 4, 96, 20),
        reallocation=ReallocatorConfig.model_construct(),
        foreseen=False,
        affinity_slack=200.0,
    )
    cheap, dear = (next(ClusterSimulation(replace(setup, kv_seconds=each)).run()) for each in (1e-6, 5e-3))
    assert dear.moved
    assert cheap.seconds < dear.seconds


def test_moves_do_no_harm_to_samples_that_are_placed_evenly() -> None:
    for seed in range(3):
        setup = SimulationSetup(DEVICE, 4, WORK, seed=seed)
        still = next(ClusterSimulation(setup).run())
        moved = next(
            ClusterSimulation(replace(setup, reallocation=ReallocatorConfig.model_construct())).run()
        )
        assert moved.seconds <= 1.02 * still.seconds


def test_where_kv_is_short_samples_wait_their_turn() -> None:
    work = SimulatedWorkload(Given([[400] * 8]), 1, 8, 20)
    roomy, tight = (
        next(ClusterSimulation(SimulationSetup(small(kv), 1, work)).run()) for kv in (10_000, 1000)
    )
    assert tight.preempted
    assert not roomy.preempted
    assert tight.seconds > 2 * roomy.seconds


def test_what_is_generated_ahead_is_drafted_as_on_an_instance() -> None:
    def covered(*sources: SimulatedSource) -> float:
        setup = SimulationSetup(
            DEVICE,
            2,
            SimulatedWorkload(LogNormalLengths(300, 0.9, 4000), 12, 8),
            steps=3,
            sources=sources,
            bubbles=BubblesConfig.model_construct(),
            update_seconds=1.0,
        )
        return list(ClusterSimulation(setup).run())[1].covered

    # Drafts make the bubble of the first step shorter, and all the same more is generated ahead.
    assert covered(SimulatedSource("suffix", 0.8)) > 1.3 * covered()


def test_graphs_are_those_of_an_instance_up_to_its_most_verified_tokens() -> None:
    # As many as have logits in float32 in a gigabyte.
    assert DEVICE.most_rows == (1 << 30) // (4 * 151_936)
    assert DEVICE.graphs[-1] == DEVICE.most_rows
    assert DEVICE.graphs == tuple(sorted(set(DEVICE.graphs)))
    assert {1, 256, 512} < set(DEVICE.graphs)
    assert all(rows in DEVICE.rows for rows in DEVICE.graphs)
    between = DEVICE.graphs[-3] + 1
    assert DEVICE.seconds(64, between, 0.0) == DEVICE.seconds(64, DEVICE.graphs[-2], 0.0)


def test_samples_of_a_prompt_that_are_generated_ahead_share_its_prefill() -> None:
    def covered(prompt_tokens: int, groups: int, samples: int) -> float:
        setup = SimulationSetup(
            DEVICE,
            1,
            SimulatedWorkload(LogNormalLengths(900, 0.1, 2000), groups, samples, prompt_tokens),
            steps=2,
            bubbles=BubblesConfig.model_construct(),
            update_seconds=1.0,
        )
        return list(ClusterSimulation(setup).run())[1].covered

    # Reading a long prompt costs much of the trainer's second, once for each prompt and not for each sample.
    assert covered(4000, 1, 8) > 0.6 * covered(20, 1, 8)
    assert covered(4000, 8, 1) < 0.5 * covered(20, 8, 1)
