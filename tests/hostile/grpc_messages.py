"""Attacks through the gateway's port: messages of every public RPC."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor

from paceline import AsyncClient, SampleRequest, SamplingParams
from paceline.errors import PacelineError
from paceline.v1 import fleet_pb2, rollout_pb2, weight_pb2
from tests.hostile.answers import UNANSWERED, Answer, Attack, either, grpc_answer
from tests.hostile.rig import ATTACKER, LOOKER, MOVER, Rig, together, token_of

SERVICES = {
    ATTACKER: rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"],
    MOVER: weight_pb2.DESCRIPTOR.services_by_name["WeightService"],
    LOOKER: fleet_pb2.DESCRIPTOR.services_by_name["FleetService"],
}
"""The public services, by who may call them."""
METHODS: list[tuple[str, MethodDescriptor]] = [
    (caller, method) for caller, service in SERVICES.items() for method in service.methods
]
WAIT = 60.0
"""Deadline of an attacker's call, in seconds."""
MESSAGE = 16 << 20
REFUSED = either("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED")
# gRPC itself refuses what is compressed where no compression is allowed, and what is longer than a message may be.
REFUSED_BY_GRPC = either("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED", "INTERNAL", typed=False)
_STREAMED_SECONDS = 3.0


def call(
    rig: Rig, caller: str, method: MethodDescriptor, payload: bytes, zipped: bool = False, parts: int = 1
) -> list[Answer]:
    """Call a method with bytes on a connection of its own, and return how that ended."""
    options = [("grpc.max_send_message_length", 1 << 30), ("grpc.use_local_subchannel_pool", 1)]
    path = f"/{method.containing_service.full_name}/{method.name}"
    more: dict[str, Any] = {
        "metadata": (("authorization", f"Bearer {token_of(caller)}"),),
        "compression": grpc.Compression.Gzip if zipped else None,
    }
    with grpc.insecure_channel(rig.address("gateway"), options) as channel:
        try:
            if method.client_streaming:
                channel.stream_unary(path)(iter([payload] * parts), timeout=WAIT, **more)
            elif method.server_streaming:
                # Of those that are open for good, so much is read.
                list(channel.unary_stream(path)(payload, timeout=_STREAMED_SECONDS, **more))
            else:
                channel.unary_unary(path)(payload, timeout=WAIT, **more)
        except grpc.RpcError as error:
            found = grpc_answer(error, method.name)
            if found.status != "DEADLINE_EXCEEDED":
                return [found]
            return [Answer("OK" if method.server_streaming else UNANSWERED, to=method.name)]
    return [Answer("OK", to=method.name)]


def method(name: str) -> tuple[str, MethodDescriptor]:
    """Return a method and who may call it."""
    (found,) = (each for each in METHODS if each[1].name == name)
    return found


@cache
def filled(field: bytes, size: int) -> bytes:
    """Return a message that is nothing but a field, again and again."""
    return field * (size // len(field))


def tag(number: int, wire: int) -> bytes:
    """Return the beginning of a field of a number below 16."""
    return bytes([number << 3 | wire])


EMPTY_GROUP = tag(5, 2) + b"\0"
"""A group of SubmitRollouts without anything in it: two bytes, which become an object."""


def inside(number: int, inner: bytes) -> bytes:
    """Return bytes as the content of a field."""
    size, varint = len(inner), bytearray()
    while size > 0x7F:
        varint.append(size & 0x7F | 0x80)
        size >>= 7
    return tag(number, 2) + bytes(varint) + bytes([size]) + inner


def nested_places(descriptor: Descriptor, seen: tuple[Descriptor, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Yield the numbers of the fields on the way to everything that may come many times."""
    for field in descriptor.fields:
        if field.is_repeated and field.cpp_type in (
            FieldDescriptor.CPPTYPE_MESSAGE,
            FieldDescriptor.CPPTYPE_STRING,
        ):
            yield (field.number,)
        if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE and field.message_type not in seen:
            for rest in nested_places(field.message_type, (*seen, descriptor)):
                yield (field.number, *rest)


def many_parts(descriptor: Descriptor, size: int) -> Iterator[bytes]:
    """Yield messages that consist of very many empty parts, for every place that may have many."""
    for *outer, last in nested_places(descriptor):
        if last > 15 or max(outer, default=0) > 15:
            continue
        message = filled(tag(last, 2) + b"\0", size)
        for number in reversed(outer):
            message = inside(number, message)
        yield message


def every_rpc(rig: Rig, size: int, make: Callable[[MethodDescriptor, int], Iterator[bytes]]) -> list[Answer]:
    """Send messages of so many KiB to every public RPC."""
    return [
        answer
        for caller, each in METHODS
        for message in make(each, size << 10)
        for answer in call(rig, caller, each, message)
    ]


def copies(
    name: str, message: Callable[[], bytes], zipped: bool = False
) -> Callable[[Rig, int], list[Answer]]:
    """Return what sends so many copies of a message at once."""

    def send(rig: Rig, count: int) -> list[Answer]:
        caller, found = method(name)
        payload = message()
        return together([partial(call, rig, caller, found, payload, zipped)] * count)

    return send


def compressed_bomb(rig: Rig, mib: int) -> list[Answer]:
    """Send zeros of so many MiB, compressed by hand, as one message that says that it is compressed."""
    caller, found = method("SubmitRollouts")
    return call(rig, caller, found, bytes(mib << 20), zipped=True)


def much_metadata(rig: Rig, keys: int) -> list[Answer]:
    """Send so many keys of 1,000 bytes."""
    caller, found = method("ListBatches")
    path = f"/{found.containing_service.full_name}/{found.name}"
    metadata = [("authorization", f"Bearer {token_of(caller)}")]
    metadata += [(f"x-{number}", "x" * 1000) for number in range(keys)]
    with grpc.insecure_channel(rig.address("gateway"), [("grpc.max_metadata_size", 1 << 30)]) as channel:
        try:
            channel.unary_unary(path)(b"", timeout=WAIT, metadata=metadata)
        except grpc.RpcError as error:
            return [grpc_answer(error)]
    return [Answer("OK")]


def in_each_part(descriptor: MethodDescriptor, size: int) -> Iterator[bytes]:
    """Yield messages of very many parts for a method."""
    return many_parts(descriptor.input_type, size)


def unknown_fields(descriptor: MethodDescriptor, size: int) -> Iterator[bytes]:
    """Yield messages of fields that the method does not have: empty ones, and groups in groups."""
    yield filled(inside(15, b""), size)
    yield filled(tag(15, 3), size)
    yield tag(15, 3) * (size // 2) + tag(15, 4) * (size // 2)


def schema(text: str) -> bytes:
    """Return a batch of one sample with a JSON schema."""
    batch = rollout_pb2.SubmitRolloutsRequest(run_id=f"{ATTACKER}-run", batch_id=f"schema-{hash(text)}")
    batch.groups.add(prompt_id="p", prompt_token_ids=[1, 2], samples=1)
    batch.sampling.max_tokens = 4
    batch.sampling.json_schema = text
    return batch.SerializeToString()


def schemas(count: int) -> bytes:
    """Return a batch whose groups have so many schemas, none like another and each as long as one may be."""
    batch = rollout_pb2.SubmitRolloutsRequest(run_id=f"{ATTACKER}-run", batch_id="schemas")
    batch.sampling.max_tokens = 4
    for number in range(count):
        group = batch.groups.add(prompt_id=f"p{number}", prompt_token_ids=[1, 2], samples=1)
        group.sampling.max_tokens = 4
        values = [{"const": each} for each in range(number, number + 3_500)]
        group.sampling.json_schema = json.dumps({"oneOf": values}, separators=(",", ":"))
    return batch.SerializeToString()


def alike(alternatives: int) -> str:
    """Return a schema of so many alternatives that all are the same one, which has many names."""
    names = [f"{number:x}" for number in range(alternatives // 3)]
    one = {"type": "object", "properties": {name: {"const": 0} for name in names}, "required": names}
    schema = {"oneOf": [{"$ref": "#/$defs/a"}] * alternatives, "$defs": {"a": one}}
    return json.dumps(schema, separators=(",", ":"))


def batch_of(groups: int, samples: int, ids: int, **sampling: Any) -> bytes:
    """Return a batch of so many groups."""
    batch = rollout_pb2.SubmitRolloutsRequest(run_id=f"{ATTACKER}-run", batch_id="large")
    for number in range(groups):
        batch.groups.add(prompt_id=f"p{number}", prompt_token_ids=range(ids), samples=samples)
    for name, value in sampling.items():
        field = getattr(batch.sampling, name)
        field.extend(value) if isinstance(value, list) else setattr(batch.sampling, name, value)
    return batch.SerializeToString()


def generates_at_once(rig: Rig, count: int) -> list[Answer]:
    """Generate samples as an honest trainer may: so many calls at once, none of which may fail."""

    async def one(client: AsyncClient, number: int) -> str:
        request = SampleRequest(
            f"{ATTACKER}-run", f"p{number}", [1, 2], sampling=SamplingParams(max_tokens=1)
        )
        try:
            events = [event async for event in client.generate(request)]
        except (PacelineError, asyncio.CancelledError) as error:
            return f"{type(error).__name__} {error}"
        return "" if events else "nothing"

    async def all_of_them() -> list[str]:
        async with AsyncClient(rig.address("gateway"), token=token_of(ATTACKER)) as client:
            return await asyncio.gather(*(one(client, number) for number in range(count)))

    failed = [each for each in asyncio.run(all_of_them()) if each]
    return [Answer("FAILED", each) for each in failed] or [Answer("OK")]


def damaged(_: MethodDescriptor, size: int) -> Iterator[bytes]:
    """Yield bytes that are no message."""
    yield b"\xff" * size


ATTACKS: list[Attack] = [
    Attack("generates at once", "F1", generates_at_once, either("OK"), short=100, whole=4000),
    Attack(
        "zipped empty groups",
        "G1",
        copies("SubmitRollouts", lambda: filled(EMPTY_GROUP, MESSAGE), True),
        REFUSED_BY_GRPC,
        short=8,
        whole=32,
    ),
    Attack(
        "empty groups",
        "G1",
        copies("SubmitRollouts", lambda: filled(EMPTY_GROUP, MESSAGE)),
        REFUSED,
        short=4,
        whole=32,
    ),
    Attack(
        "zipped empty rewards",
        "G1",
        copies("ReportRewards", lambda: filled(tag(3, 2) + b"\0", MESSAGE), True),
        REFUSED_BY_GRPC,
        short=0,
        whole=16,
    ),
    Attack(
        "empty groups of a hint",
        "G1",
        copies("HintNextBatch", lambda: filled(tag(4, 2) + b"\0", MESSAGE)),
        REFUSED,
        short=0,
        whole=16,
    ),
    Attack(
        "empty stop strings",
        "G1",
        copies("Generate", lambda: inside(5, filled(inside(8, b""), MESSAGE - 16))),
        REFUSED,
        short=0,
        whole=16,
    ),
    Attack(
        "token ids of one prompt",
        "G1",
        copies("SubmitRollouts", lambda: batch_of(1, 1, 1 << 20)),
        REFUSED,
        short=2,
        whole=16,
    ),
    Attack(
        "many parts in every RPC",
        "G1",
        partial(every_rpc, make=in_each_part),
        either(
            "OK",
            "INVALID_ARGUMENT",
            "RESOURCE_EXHAUSTED",
            "NOT_FOUND",
            "FAILED_PRECONDITION",
            "PERMISSION_DENIED",
            # Knobs are checked by the policy service, and the rig has none.
            "UNAVAILABLE",
        ),
        short=8,
        whole=15 << 10,
    ),
    Attack(
        "unknown fields in every RPC",
        "G1",
        partial(every_rpc, make=unknown_fields),
        either(
            "OK",
            "INVALID_ARGUMENT",
            "RESOURCE_EXHAUSTED",
            "NOT_FOUND",
            "FAILED_PRECONDITION",
            "PERMISSION_DENIED",
            "UNAVAILABLE",
        ),
        short=8,
        whole=15 << 10,
    ),
    Attack(
        "bytes that are no message in every RPC",
        "G1",
        partial(every_rpc, make=damaged),
        either("INVALID_ARGUMENT"),
        short=16,
        whole=15 << 10,
    ),
    Attack("zipped zeros", "G1", compressed_bomb, REFUSED_BY_GRPC, short=64, whole=1024),
    Attack(
        "much metadata",
        "G1",
        much_metadata,
        either("RESOURCE_EXHAUSTED", "UNAVAILABLE", typed=False),
        short=1000,
        whole=1000,
    ),
    Attack(
        "schema nested deep", "J1", copies("SubmitRollouts", lambda: schema('{"allOf":[' * 20_000)), REFUSED
    ),
    Attack(
        "schema of lists nested deep", "J1", copies("SubmitRollouts", lambda: schema("[" * 10**6)), REFUSED
    ),
    Attack(
        "schema that is long",
        "J1",
        copies("SubmitRollouts", lambda: schema('{"const":"' + "x" * (8 << 20) + '"}')),
        REFUSED,
    ),
    Attack(
        "schema that repeats a part endlessly",
        "J1",
        copies("SubmitRollouts", lambda: schema('{"type":"array","minItems":100000000}')),
        REFUSED,
    ),
    Attack(
        "schema of alike references",
        "J1",
        copies("SubmitRollouts", lambda: schema(alike(1600))),
        REFUSED,
        whole=8,
    ),
    Attack(
        "schemas of every group",
        "J1",
        lambda rig, count: call(rig, *method("SubmitRollouts"), schemas(count)),
        either("OK", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"),
        short=4,
        whole=280,
    ),
    Attack(
        "schema with a pattern that could backtrack",
        "J1",
        copies("SubmitRollouts", lambda: schema('{"type":"string","pattern":"^(a+)+$"}')),
        either("OK", *REFUSED.statuses),
    ),
]
