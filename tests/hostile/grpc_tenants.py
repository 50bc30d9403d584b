"""Attacks of one tenant on the runs of another, through the gateway's port."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.message import Message

from paceline.v1 import rollout_pb2, rollout_pb2_grpc
from tests.hostile.answers import Answer, Attack, either
from tests.hostile.grpc_messages import METHODS, WAIT, call, method
from tests.hostile.rig import ATTACKER, MOVER, Rig, token_of
from tests.hostile.watching import TENANT

DENIED = either("PERMISSION_DENIED")
ELSEWHERE = ("*", "?lice-run", "[a]lice-run", "alice-run ", " mallory-run", "ALICE-run", "alice-run\0", "al")
"""Names of runs that no pattern of the attacker's covers."""


def in_anothers_run(rig: Rig, _: int) -> list[Answer]:
    """Name another's run in every public RPC that names one."""
    found = []
    for caller, each in METHODS:
        if "run_id" in each.input_type.fields_by_name and caller in (ATTACKER, MOVER):
            message: Message = each.input_type._concrete_class()
            values = {
                "run_id": f"{TENANT}-run",
                "batch_id": "step-000001.v0.0",
                "prompt_id": "p",
                "update_id": "u",
            }
            for name, value in values.items():
                if name in each.input_type.fields_by_name:
                    setattr(message, name, value)
            found += call(rig, caller, each, message.SerializeToString())
    return found


def under_odd_names(rig: Rig, _: int) -> list[Answer]:
    """Submit a batch under names that somebody might take for a pattern."""
    caller, submit = method("SubmitRollouts")
    batch = rollout_pb2.SubmitRolloutsRequest(batch_id="b")
    batch.groups.add(prompt_id="p", prompt_token_ids=[1], samples=1)
    found = []
    for name in ELSEWHERE:
        batch.run_id = name
        found += call(rig, caller, submit, batch.SerializeToString())
    return found


def listing_all(rig: Rig, _: int) -> list[Answer]:
    """List the batches of all runs; of another's, none is told."""
    metadata = (("authorization", f"Bearer {token_of(ATTACKER)}"),)
    with grpc.insecure_channel(rig.address("gateway")) as channel:
        stub: Any = rollout_pb2_grpc.RolloutServiceStub(channel)
        listed = stub.ListBatches(rollout_pb2.ListBatchesRequest(), timeout=WAIT, metadata=metadata)
    others = [each for each in _names(listed) if each.startswith(TENANT)]
    return [Answer("TOLD" if others else "OK", f"{len(others)} batches of another's")]


def _names(message: Message) -> Iterator[str]:
    for field, value in message.ListFields():
        if field.name == "run_id":
            yield str(value)
        elif field.message_type is not None:
            for each in value if field.is_repeated else [value]:
                yield from _names(each)


ATTACKS: list[Attack] = [
    Attack("in another's run over gRPC", "S2", in_anothers_run, DENIED),
    Attack("under odd names", "S2", under_odd_names, either("PERMISSION_DENIED", "INVALID_ARGUMENT")),
    Attack("listing all", "S2", listing_all, either("OK")),
]
