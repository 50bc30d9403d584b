"""Runs that a request names: every field `run_id`, at any depth, so that no new RPC has to say where it has one."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from services.platform.security.caller import TokenHolder

FIELDS = frozenset({"run_id", "run_ids"})
"""Fields that hold the names of runs."""
WITHOUT_RUN = {
    "paceline.v1.RolloutService/ListBatches": "lists the batches of all runs that the caller may name",
    "paceline.v1.RolloutService/Generate": "a sample of no run, which is kept for nobody",
    "paceline.v1.FleetService/WatchDecisions": "tells of the fleet, and of all runs that the caller may name",
    "paceline.v1.FleetService/GetKnobs": "knobs of the fleet, a model or a pool",
    "paceline.v1.FleetService/SetKnobs": "knobs of the fleet, a model or a pool",
}
"""Methods whose request may leave the run out, and what it means then. Elsewhere no pattern allows that."""


def check_runs(caller: TokenHolder, method: str, request: object) -> None:
    """Raise PermissionDenied if a request names a run that the caller may not name."""
    if caller.runs is None or not isinstance(request, Message):
        return
    for run_id in runs_named(request):
        if run_id or method.removeprefix("/") not in WITHOUT_RUN:
            caller.check_run(run_id)


def runs_named(message: Message) -> Iterator[str]:
    """Yield the runs that a message names; "" for a field that is unset."""
    own, nested = _places(message.DESCRIPTOR)
    for name, repeated in own:
        value = getattr(message, name)
        if repeated:
            yield from value
        else:
            yield value
    for name, repeated, is_map in nested:
        value = getattr(message, name)
        if is_map:
            value = value.values()
        elif not repeated:
            value = (value,) if message.HasField(name) else ()
        for each in value:
            yield from runs_named(each)


@functools.cache
def _places(
    descriptor: Descriptor,
) -> tuple[tuple[tuple[str, bool], ...], tuple[tuple[str, bool, bool], ...]]:
    """Return the fields of a message that hold runs, and those whose messages may."""
    own, nested = [], []
    for field in descriptor.fields:
        if field.name in FIELDS:
            own.append((field.name, field.is_repeated))
            continue
        inner, is_map = field.message_type, False
        if inner is not None and inner.GetOptions().map_entry:
            is_map = True
            inner = inner.fields_by_name["value"].message_type
        if inner is not None and _holds_runs(inner, frozenset()):
            nested.append((field.name, field.is_repeated, is_map))
    return tuple(own), tuple(nested)


def _holds_runs(descriptor: Descriptor, above: frozenset[str]) -> bool:
    if descriptor.full_name in above:
        return False
    above |= {descriptor.full_name}
    return any(
        field.name in FIELDS or (field.message_type is not None and _holds_runs(field.message_type, above))
        for field in descriptor.fields
    )
