"""The engine loop over a core that knows the texts decodes these texts, and its parts and functions are counted."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from bench.host_step.__main__ import GOALS, figures
from bench.host_step.host import HostCase, measure, running_loop, warm_up
from services.simulator.device_tables import devices

SAMPLES, VOCABULARY, STEPS = 3, 500, 12
DEVICE = next(each for each in devices() if each.name == "8B H100")


@pytest.mark.parametrize("drafters", [("reference",), ("reference", "suffix"), ()])
def test_responses_are_the_known_texts_with_and_without_drafts(drafters: tuple[str, ...]) -> None:
    warm_up()
    loop, core = running_loop(HostCase(SAMPLES, VOCABULARY, drafters), DEVICE)
    for _ in range(STEPS):
        loop._turn()
    assert len(loop.samples) == SAMPLES
    for name, sample in loop.samples.items():
        assert sample.response == core._texts[name][: len(sample.response)].tolist()
        assert (len(sample.response) > 2 * STEPS) == bool(drafters)
        assert sample.decode_steps == STEPS
        assert (sample.verify_steps > 0) == bool(drafters)


def test_each_step_is_measured_and_its_parts_are_the_whole() -> None:
    found = measure(HostCase(SAMPLES, VOCABULARY), DEVICE, STEPS)
    parts = (found.drafting, found.engine, found.rest)
    assert [len(each) for each in parts] == [STEPS] * 3
    assert min(map(min, parts)) >= 0
    assert sum(found.whole) == pytest.approx(sum(map(sum, parts)))
    assert found.tokens > SAMPLES * STEPS
    assert 0 < found.functions <= found.calls
    plain = measure(HostCase(SAMPLES, VOCABULARY, ()), DEVICE, STEPS)
    assert plain.tokens == SAMPLES * STEPS
    # A step without drafters enters no planner.
    assert plain.functions < found.functions


def test_goals_name_figures() -> None:
    rows = [
        {"samples": samples, "vocabulary": vocabulary, "drafters": drafters, "host_us": float(vocabulary)}
        for samples in (1, 64, 256)
        for vocabulary, drafters in (
            (1, "reference"),
            (2, "reference"),
            (3, "reference and suffix"),
            (4, "none"),
        )
    ]
    found = figures(rows)
    assert found.keys() | {"off_step_ratio"} >= GOALS.keys()
    assert (found["host_us_64"], found["host_us_all_drafters_64"], found["off_host_us_64"]) == (2, 3, 4)
