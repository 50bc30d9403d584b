"""Modelled times follow from logged steps, device tables and draft passes, and an assumed device is planned for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.rollout.modelled import (
    DEVICES,
    H100_8B,
    DraftPasses,
    InstanceWork,
    StepReader,
    assumed_sweep,
    divided,
    modelled,
    modelled_devices,
    passes_of,
)
from bench.scrape import Metrics
from bench.simulate.verification import fitted
from examples.tinymath.spans import SampleSpan
from services.generation.engine.step_log import LoggedStep
from services.step_time.estimator import StepTimeEstimator
from services.step_time.sweep import SavedSweep

_TABLE = DEVICES[H100_8B].steps


def _steps(count: int, samples: int = 4, rows: int = 4, at: float = 0.0) -> list[LoggedStep]:
    return [LoggedStep(at + i, samples, rows, rows - samples, 100 * samples) for i in range(count)]


def test_a_log_is_read_in_parts_and_a_line_that_is_being_written_waits(tmp_path: Path) -> None:
    path, (first, second) = tmp_path / "i.jsonl", _steps(2)
    path.write_text(f"{json.dumps(first)}\n{json.dumps(second)[:9]}")
    reader = StepReader(path)
    assert reader.since() == [first]
    assert reader.since() == []
    with path.open("a") as file:
        file.write(f"{json.dumps(second)[9:]}\n")
    assert reader.since() == [second]


def test_steps_are_of_the_step_while_an_instance_has_samples_of_it_and_else_ahead() -> None:
    spans = [SampleSpan("a", 0.0, 2.0), SampleSpan("a", 1.0, 3.0), SampleSpan("a", 6.0, 7.0)]
    work = divided(_steps(10, at=100.0), spans, 100.0)
    assert [step.at for step in work.steps] == [100.0, 101.0, 102.0, 103.0, 106.0, 107.0]
    assert [step.at for step in work.ahead] == [104.0, 105.0, 108.0, 109.0]


def test_a_rollout_takes_the_slowest_instances_steps_and_the_others_are_idle() -> None:
    one = _TABLE.seconds(4, 4, 400)
    found = modelled([InstanceWork(_steps(10)), InstanceWork(_steps(4), _steps(2))])[H100_8B]
    assert found.rollout == pytest.approx(10 * one)
    assert found.idle == pytest.approx(6 * one / 2)
    assert found.ahead == pytest.approx(2 * one / 2)
    # Verified rows cost what the table says of them.
    wide = modelled([InstanceWork(_steps(10, rows=2000))])[H100_8B]
    assert wide.rollout == pytest.approx(10 * _TABLE.seconds(4, 2000, 400))
    assert wide.rollout > 1.5 * found.rollout


def test_verifying_and_waiting_for_the_host_cost_time_at_the_pessimistic_end() -> None:
    plain, drafted = (InstanceWork([LoggedStep(0.0, 4, rows, rows - 4, 400)] * 10) for rows in (4, 20))
    overhead, wide = fitted(), _TABLE.seconds(4, 20, 400)
    host = overhead.host / 1e3
    found = modelled([plain, drafted])[H100_8B]
    assert found.rollout == pytest.approx(10 * wide)
    assert found.pessimistic == pytest.approx(10 * overhead.factor * (wide + host))
    # Prompts are no drafts.
    prefill = modelled([InstanceWork([LoggedStep(0.0, 4, 20, 0, 400)])])[H100_8B]
    assert prefill.pessimistic == pytest.approx(wide + host)
    # An engine that schedules ahead hides the host, and verifies as slowly.
    ahead = modelled([drafted], host_hidden=True)[H100_8B]
    assert ahead.pessimistic == pytest.approx(10 * overhead.factor * wide)
    assert modelled([plain], host_hidden=True)[H100_8B].pessimistic == modelled([plain])[H100_8B].rollout


def test_a_measured_table_replaces_a_data_sheet_and_has_no_band(tmp_path: Path) -> None:
    table = {"name": H100_8B, "source": "measured: a GPU", "kv_tokens": 1000, "rows": [1, 64]}
    (tmp_path / "8b.json").write_text(json.dumps(table | {"milliseconds": [9.0, 11.0]}))
    found = modelled_devices(tmp_path)
    ours = found[H100_8B]
    assert ours.steps.source == "measured: a GPU"
    assert ours.steps.seconds(1, 1, 300) == 0.009
    assert ours.pessimistic is ours.steps
    other = next(name for name in found if name != H100_8B)
    assert found[other].steps.source == "data sheet"
    assert found[other].pessimistic.seconds(1, 17, 300) > 1.2 * found[other].steps.seconds(1, 17, 300)
    # Two files with one name would be an accident.
    (tmp_path / "other.json").write_text((tmp_path / "8b.json").read_text())
    with pytest.raises(ValueError, match=r"other.json: another file .* is named '8B H100'"):
        modelled_devices(tmp_path)


def test_passes_of_a_draft_model_cost_what_its_table_says() -> None:
    counted = passes_of(
        Metrics({"paceline_quantized_draft_steps_total": 5.0, "paceline_quantized_draft_tokens_total": 15.0})
    )
    assert counted == {"quantized": DraftPasses(5.0, 15.0)}
    bare = modelled([InstanceWork(_steps(10))])[H100_8B].rollout
    found = modelled([InstanceWork(_steps(10), passes=counted)])[H100_8B]
    drafted = found.rollout
    assert (
        drafted - bare
        == found.passes
        == pytest.approx(5 * DEVICES[H100_8B].passes["quantized"].seconds(3, 3, 300))
    )
    # A 4-bit copy reads a third of the weights at most.
    assert drafted - bare < 5 * _TABLE.seconds(3, 3, 300) / 2


def test_an_assumed_device_is_planned_for_by_its_table(tmp_path: Path) -> None:
    sweep = SavedSweep.read(assumed_sweep(H100_8B, tmp_path))
    estimator = StepTimeEstimator(sweep.steps)
    for samples, rows, context in (
        (1, 1, 300),
        (1, 17, 800),
        (8, 136, 4000),
        (64, 64, 9000),
        (64, 512, 20000),
    ):
        expected = _TABLE.seconds(samples, rows, context)
        assert estimator.seconds(samples, rows, context) == pytest.approx(expected, rel=0.05), (samples, rows)
