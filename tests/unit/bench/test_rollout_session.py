"""A call of the benchmark resumes where the last one ended, and a failing system does not affect the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from bench.rollout.__main__ import chosen, result_of
from bench.rollout.cells import AbsentReason, CellName, StepFigures
from bench.rollout.measuring import platform_figures
from bench.rollout.modelled import DEVICES, H100_8B, ModelledStep
from bench.rollout.record import RecordedRun
from bench.rollout.registry import LONG_TAIL, PLAIN, SUBJECTS, SYSTEMS, StockSystem
from bench.rollout.session import BenchmarkError, CellSession
from bench.rollout.systems import System
from bench.rollout.training import TrainedStep, Trajectory
from bench.scrape import Metrics
from examples.tinymath.options import Options
from paceline import Group
from services.generation.engine.step_log import LoggedStep
from tests.unit.bench import steps
from tests.unit.bench.steps import rewarded, sample, span

_NAMES = ["paceline", PLAIN, "vllm ngram"]


def _trained(weights: Path) -> TrainedStep:
    samples = [sample(0, [3, 4]), sample(1, [5])]
    return steps.trained(
        0,
        [Group("p", [1, 2], 2)],
        samples,
        weights=weights,
        update_seconds=2.0,
        push_seconds=3.0,
        reward=0.5,
        moved_kl=0.1,
    )


@dataclass(slots=True)
class _Measured:
    """Stand-in for measuring cells: every step of a cell takes `seconds` of its system."""

    seconds: dict[str, float]
    asked: list[tuple[str, float]] = field(default_factory=list)

    def __call__(
        self,
        setup: StockSystem | System,
        trajectory: Trajectory,
        model: Path,
        instances: int,
        update_seconds: float,
        folder: Path,
        watch: Callable[[StepFigures], None],
        drafter: Path | None,
        kv_bytes: int,
    ) -> tuple[StepFigures, ...]:
        self.asked.append((setup.name, update_seconds))
        if setup.name not in self.seconds:
            raise RuntimeError("Traceback\nMemoryError: no room")
        values: dict[str, Any] = dict.fromkeys(StepFigures.__dataclass_fields__, 0) | {
            "tokens": 1,
            "planned": {},
            "loads": (),
            "modelled": {H100_8B: ModelledStep(1.0, 0.0, 0.0)},
        }
        return (StepFigures(**(values | {"rollout_seconds": self.seconds[setup.name]})),) * 2


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., CellSession]:
    run = RecordedRun(Trajectory(Options(samples=2), (_trained(tmp_path),), tmp_path), "hash")
    monkeypatch.setattr("bench.rollout.session.load_or_record", lambda *_: run)

    def made(measured: _Measured, **changes: Any) -> CellSession:
        monkeypatch.setattr("bench.rollout.session.measure", measured)
        whole = CellSession(SUBJECTS["tinymath"], _NAMES, [LONG_TAIL], 2, 2, 60.0, tmp_path)
        return replace(whole, **changes)

    return made


def test_cells_are_measured_once_and_the_update_is_plains_for_all(
    session: Callable[..., CellSession],
) -> None:
    measured = _Measured({PLAIN: 3.0, "paceline": 1.0, "vllm ngram": 2.0})
    cells = session(measured).run()
    assert [cell.name.system for cell in cells] == [
        PLAIN,
        "paceline",
        "vllm ngram",
        "vllm ngram",
        "paceline",
        PLAIN,
    ]
    assert {cell.update_seconds for cell in cells} == {1.0}
    assert measured.asked[1] == ("paceline", 1.0)
    found = result_of(cells)
    assert found["figures"]["speedup_vs_plain_long_tail"] == 3.0
    assert found["figures"]["speedup_vs_best_vllm_long_tail"] == 2.0
    again = _Measured({})
    assert session(again).run() == cells
    assert again.asked == []
    # More rounds are added to those that are kept.
    more = _Measured({PLAIN: 3.0, "paceline": 1.0, "vllm ngram": 2.0})
    assert len(session(more, rounds=3).run()) == 9
    assert len(more.asked) == 3


def test_another_code_or_run_is_measured_anew(
    session: Callable[..., CellSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {PLAIN: 3.0, "paceline": 1.0, "vllm ngram": 2.0}
    session(_Measured(seconds)).run()
    monkeypatch.setattr("bench.rollout.session._code", lambda stock: "same" if stock else "other")
    again = _Measured(seconds)
    session(again).run()
    # The hash of neither is what it was.
    assert len(again.asked) == 6
    monkeypatch.setattr("bench.rollout.session._code", lambda stock: "same" if stock else "another")
    again = _Measured(seconds)
    session(again).run()
    assert [name for name, _ in again.asked] == ["paceline", "paceline"]


def test_a_system_that_fails_has_a_reason_and_is_tried_again(session: Callable[..., CellSession]) -> None:
    cells = session(_Measured({PLAIN: 3.0, "vllm ngram": 2.0}), rounds=1).run()
    failed = {cell.name.system: cell for cell in cells}["paceline"]
    assert (failed.absent, failed.why) == (AbsentReason.FAILED, "RuntimeError: MemoryError: no room")
    assert result_of(cells)["absent"] == {
        f"paceline, {LONG_TAIL}": {"reason": "failed", "why": "RuntimeError: MemoryError: no room"}
    }
    again = _Measured({"paceline": 1.0})
    assert all(cell.absent is None for cell in session(again, rounds=1).run())
    assert again.asked == [("paceline", 1.0)]


def test_without_plain_there_is_no_table(session: Callable[..., CellSession]) -> None:
    with pytest.raises(BenchmarkError, match="plain decoding failed in long tail: RuntimeError: MemoryError"):
        session(_Measured({"paceline": 1.0})).run()


def test_no_cell_is_begun_after_its_time(session: Callable[..., CellSession]) -> None:
    late = session(_Measured({PLAIN: 3.0}), minutes=-1.0)
    assert late.run() == []
    assert late.left == 6


def test_the_figures_of_a_platforms_step_are_of_its_samples_and_services() -> None:
    first = sample(
        0, [3, 4], decode_steps=2, drafted=4, accepted=1, verify_steps=1, instance_spans=span("a", 10.0, 12.0)
    )
    last = sample(
        1,
        [6],
        decode_steps=1,
        instance_spans=span("b", 10.0, 14.0),
        queue_seconds=0.5,
        generation_seconds=3.5,
    )
    went = steps.step(
        first,
        last,
        covered=(2,),
        metrics={
            "reallocator": Metrics({"paceline_reallocator_moved_bytes_total": 7.0}),
            "a": Metrics({'paceline_planner_steps_total{reason="drafts"}': 2.0}),
            "b": Metrics({'paceline_planner_steps_total{reason="drafts"}': 3.0}),
        },
    )
    logged = {
        "a": [LoggedStep(10.0 + i, 1, 1, 0, 3) for i in range(4)],
        "b": [LoggedStep(10.0 + i, 1, 3, 2, 3) for i in range(4)],
    }
    found = platform_figures(_trained(Path("w")), went, "paceline", logged, rewarded(lambda name: 0.25))
    # Instance a has no sample any more in its last step.
    plain, verifying = (DEVICES[H100_8B].steps.seconds(1, rows, 3) for rows in (1, 3))
    times = found.modelled[H100_8B]
    assert times.rollout == pytest.approx(4 * verifying)
    assert times.idle == pytest.approx((4 * verifying - 3 * plain) / 2)
    assert times.ahead == pytest.approx(plain / 2)
    assert (found.last_steps, found.last_seconds) == (1, 4.0)
    assert (found.covered, found.moved_bytes, found.reward) == (2, 7.0, 0.25)
    assert (found.drafted, found.accepted, found.verified) == (4, 1, 1)
    assert (found.decode_steps_mean, found.decode_steps_max, found.tokens) == (1.5, 2, 3)
    assert (found.bubble_seconds_mean, found.bubble_seconds_max) == (1.0, 2.0)
    assert (found.differing, found.compared) == (1, 3)
    assert (found.samples, found.loads) == (2, ((3, 3, 2.0), (4, 12, 4.0)))
    assert found.planned == {"drafts": 5.0}


def test_systems_are_chosen_by_name_or_by_form() -> None:
    assert chosen(["all"]) == list(SYSTEMS)
    without = chosen(["without"])
    assert without[:3] == [PLAIN, "paceline", "paceline off"]
    assert len(without) == 11
    assert chosen(["quick"]) == [PLAIN, "vllm ngram", "vllm suffix", "paceline"]
    assert chosen(["respec", PLAIN]) == [PLAIN, "respec"]
    assert CellName("vllm ngram", LONG_TAIL, 0).file == "vllm_ngram-long_tail-0.json"
