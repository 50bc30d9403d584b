"""Knobs in use: an instance's own configuration under the settings of its scopes."""

from __future__ import annotations

from typing import Any

from paceline.convert.fleet import knobs_from_proto, knobs_to_proto
from paceline.internal.v1 import policy_pb2 as pb
from services.contracts.knob_store import KnobRecords, Rung, StoredSetting
from services.contracts.knobs import Knobs, KnobScope
from services.generation.speculation.planner import KnobDrivenPlanner
from services.policy.knobs_in_force import effective, in_scope
from services.step_time.estimator import StepTimeEstimator

FLEET = KnobScope()
RUN = KnobScope("run", "r")


def report(own: dict[str, Any] | None, model: str = "m", pool: str = "") -> pb.GetSpeculationReportResponse:
    made = pb.GetSpeculationReportResponse(model=model, pool=pool)
    if own is not None:
        made.own_knobs.CopyFrom(knobs_to_proto(Knobs(**own).model_dump(mode="json")))
    return made


def records(**settings: dict[str, Any]) -> KnobRecords:
    scopes = {"fleet": FLEET, "spot": KnobScope("pool", "spot"), "r": RUN}
    return KnobRecords(
        7, {scopes[name]: StoredSetting(3, knobs) for name, knobs in settings.items()}, {"r": Rung(4)}
    )


def values(found: Any) -> dict[tuple[str, ...], dict[str, Any]]:
    return {tuple(each.instance_ids): knobs_from_proto(each.knobs) for each in found}


def test_instances_are_grouped_by_what_they_use() -> None:
    reports = {
        "a": report({"draft_cap": 8}),
        "b": report({"margin": 0.5}),
        "c": report({"draft_cap": 8}),
        "d": report({"draft_cap": 8}, pool="spot"),
        "e": report({"speculation": False}),
    }
    found, unreported = effective(
        records(fleet={"margin": 0.1, "speculation": True}, spot={"margin": 0.2}), FLEET, reports
    )
    used = values(found)
    assert list(used) == [("a", "c"), ("b",), ("d",), ("e",)]
    assert {ids: each["margin"] for ids, each in used.items()} == {
        ("a", "c"): 0.1,
        ("b",): 0.1,
        ("d",): 0.2,
        ("e",): 0.1,
    }
    assert [each["draft_cap"] for each in used.values()] == [8, 16, 8, 16]
    assert [each["speculation"] for each in used.values()] == [True, True, True, False]
    assert unreported == []


def test_a_run_s_are_what_an_instance_prepares_for_its_samples() -> None:
    known = records(fleet={"ladder": {"on": True}, "mode": "fixed"}, r={"draft_cap": 9, "latch": True})
    own = Knobs(draft_cap=32, margin=0.3)
    planner = KnobDrivenPlanner(own, StepTimeEstimator(), lambda _: None)
    prepared = planner.resolve(1, *known.settings_for("m", ""), known.caps())
    found, _ = effective(known, RUN, {"a": report(own.model_dump())})
    assert values(found) == {("a",): prepared.runs["r"].model_dump(mode="json")}
    assert prepared.runs["r"].draft_cap == 4, "the cap of the ladder"
    found, _ = effective(known, FLEET, {"a": report(own.model_dump())})
    assert values(found) == {("a",): prepared.shared.model_dump(mode="json")}


def test_an_instance_that_tells_nothing_or_what_is_not_known_is_in_no_group() -> None:
    later = report({})
    later.own_knobs.mode = "of a later version"
    found, unreported = effective(records(), FLEET, {"old": report(None), "new": later, "a": report({})})
    assert list(values(found)) == [("a",)]
    assert unreported == ["new", "old"]


def test_without_an_instance_they_are_those_of_one_without_configuration() -> None:
    found, unreported = effective(records(spot={"draft_cap": 2}), KnobScope("pool", "spot"), {})
    assert values(found) == {(): Knobs(draft_cap=2).model_dump(mode="json")}
    assert unreported == []


def test_a_scope_has_the_instances_that_its_setting_reaches() -> None:
    scopes = [FLEET, RUN, KnobScope("model", "m"), KnobScope("pool", "spot"), KnobScope("pool", "other")]
    assert [in_scope(report({}, pool="spot"), each) for each in scopes] == [True, True, True, True, False]
