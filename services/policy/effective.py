"""Knobs that instances really use: their own configuration under the settings of all scopes. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.internal.v1 import policy_pb2 as pb
from paceline.knobs import knobs_from_proto, knobs_to_proto
from paceline.v1 import knobs_pb2
from services.contracts.errors import InvalidArgument
from services.contracts.knob_store import KnobRecords
from services.contracts.knobs import Knobs, KnobScope, capped, check, resolved


def is_of(report: pb.GetSpeculationReportResponse, scope: KnobScope) -> bool:
    """Return True if the settings of a scope apply to an instance; a run's apply to all instances."""
    return scope.name == {"model": report.model, "pool": report.pool}.get(scope.kind, scope.name)


def effective(
    records: KnobRecords, scope: KnobScope, reports: Mapping[str, pb.GetSpeculationReportResponse]
) -> tuple[list[knobs_pb2.EffectiveKnobs], list[str]]:
    """Return what instances use, in the samples of a run if `scope` is one.

    Args:
        records: settings and ladders in force.
        scope: of which the instances are.
        reports: latest reports of these instances, by instance id.

    Returns:
        Distinct knobs with the ids of their instances, most instances first, and the ids of instances that do not
        tell their own configuration. Without any instance: the knobs of an instance that has no configuration.
    """
    alike: dict[tuple[bytes, str, str], list[str]] = {}
    untold = []
    for instance_id, report in sorted(reports.items()):
        if report.HasField("own_knobs"):
            own = report.own_knobs.SerializeToString(deterministic=True)
            alike.setdefault((own, report.model, report.pool), []).append(instance_id)
        else:
            untold.append(instance_id)
    found: dict[Knobs, list[str]] = {}
    for (own, model, pool), ids in alike.items():
        try:
            base = _knobs(own)
        except InvalidArgument:
            # The instance is of a later version, which has other values.
            untold += ids
            continue
        found.setdefault(_used(records, scope, base, model, pool), []).extend(ids)
    if not reports:
        named = {scope.kind: scope.name}
        found[_used(records, scope, Knobs(), named.get("model", ""), named.get("pool", ""))] = []
    entries = sorted(found.items(), key=lambda entry: (-len(entry[1]), entry[1]))
    return [_message(knobs, sorted(ids)) for knobs, ids in entries], sorted(untold)


def _knobs(own: bytes) -> Knobs:
    return resolved(Knobs(), [check(knobs_from_proto(knobs_pb2.Knobs.FromString(own)))])


def _used(records: KnobRecords, scope: KnobScope, base: Knobs, model: str, pool: str) -> Knobs:
    shared, runs = records.settings_for(model, pool)
    knobs = resolved(base, [shared])
    if scope.kind != "run":
        return knobs
    return capped(resolved(knobs, [runs.get(scope.name, {})]), records.caps().get(scope.name))


def _message(knobs: Knobs, instance_ids: list[str]) -> knobs_pb2.EffectiveKnobs:
    return knobs_pb2.EffectiveKnobs(
        knobs=knobs_to_proto(knobs.model_dump(mode="json")), instance_ids=instance_ids
    )
