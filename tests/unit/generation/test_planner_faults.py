"""A planner that is broken in any way: no sample notices, and that is counted and said once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import nan
from typing import Any

import numpy as np
import pytest
import structlog

from services.contracts.knobs import Knobs
from services.generation.drafters.reference.drafter import ReferenceDrafter
from services.generation.speculation.plan import Drafts
from services.generation.speculation.planner import KnobDrivenPlanner
from services.generation.speculation.speculation import Speculation
from services.step_time.estimator import StepTimeEstimator
from tests.unit.generation.test_loop import Rig
from tests.unit.generation.test_loop_planner import GIVEN, NamedEngine


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("broken")


def _drafts(tokens: list[int], sample: str = "1", drafter: str = "reference") -> Drafts:
    return Drafts({sample: tokens}, {sample: (drafter, drafter)})


def _breaks(name: str, value: Any = broken) -> Callable[[KnobDrivenPlanner], None]:
    def apply(plan: KnobDrivenPlanner) -> None:
        setattr(plan, name, value)

    return apply


def _wide(plan: KnobDrivenPlanner) -> None:
    plan.choose = lambda samples, *_: _drafts([1] * 400, samples[0].sample_id)  # type: ignore[method-assign]


def _from_nowhere(plan: KnobDrivenPlanner) -> None:
    plan.choose = lambda samples, *_: _drafts([1], samples[0].sample_id, "nobody")  # type: ignore[method-assign]


def _nan(plan: KnobDrivenPlanner) -> None:
    plan.choose = lambda samples, *_: Drafts(  # type: ignore[method-assign]
        {samples[0].sample_id: [1]}, {samples[0].sample_id: ("reference", "reference")}, saved=nan
    )


WAYS: dict[str, Callable[[KnobDrivenPlanner], None]] = {
    "choose raises": _breaks("choose"),
    "choose returns nothing": _breaks("choose", lambda *_: None),
    "drafts of a sample that is not there": _breaks("choose", lambda *_: _drafts([1], "nobody")),
    "drafts longer than their sample": _wide,
    "drafts of a drafter that is not there": _from_nowhere,
    "wants raises": _breaks("wants"),
    "stepped raises": _breaks("stepped"),
    "verified raises": _breaks("verified"),
    "back_off raises": _breaks("back_off"),
    "the estimator raises": lambda plan: setattr(plan.step_time, "predict", broken),
    "the estimator predicts no numbers": lambda plan: setattr(
        plan.step_time, "predict", lambda _, rows, *__: np.full(len(rows), np.nan)
    ),
    "the estimator predicts too few steps": lambda plan: setattr(
        plan.step_time, "predict", lambda *_: np.array([0.01])
    ),
    "drafts with a gain that is no number": _nan,
    "the account raises": lambda plan: setattr(plan.account, "begin", broken),
}


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig(NamedEngine())
    yield made
    made.loop.stop()
    made.loop.join(20)


@pytest.mark.parametrize("way", WAYS)
async def test_no_sample_notices(rig: Rig, way: str) -> None:
    plan = KnobDrivenPlanner(
        Knobs(mode="planner", draft_cap=4, margin=0.0), StepTimeEstimator(), lambda _: None
    )
    WAYS[way](plan)
    speculation = Speculation([ReferenceDrafter()], plan, 512, rig.metrics)
    rig.drafts.speculation = speculation
    with structlog.testing.capture_logs() as logs:
        caller = await rig.open()
        await caller.start(1, max_tokens=40, given=(*GIVEN, *range(12, 40)))
        await caller.start(2, max_tokens=9)
        await rig.step(60)
        await caller.read()
    assert caller.tokens == {1: list(range(40)), 2: list(range(9))}
    assert set(caller.finished) == {1, 2}
    faults = [each for each in logs if each["event"] == "planner_fault"]
    counted = rig.value("paceline_speculation_drafter_faults_total", drafter="planner") or 0
    assert (len(faults) == 1) is (counted > 0)
    # Nothing backed off in so few steps.
    if way != "back_off raises":
        assert counted > 0
