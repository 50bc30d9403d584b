"""Memory of a gateway process under requests that become large when they are parsed, and who is served beside."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc

from paceline.v1 import fleet_pb2
from tests.integration.gateway.conftest import CALL, Cluster, check_samples, make_batch, until
from tests.integration.gateway.test_faults import _accepted, _connect, _gateway_process

SUBMIT = "/paceline.v1.RolloutService/SubmitRollouts"
OPTIONS = [("grpc.max_send_message_length", 32 << 20), ("grpc.use_local_subchannel_pool", 1)]
EMPTY_GROUPS = b"\x2a\x00" * (8 << 20)
"""16 MiB, of which protobuf makes 600 MiB."""
ATTACKS = (
    (1, grpc.Compression.Gzip, {"UNIMPLEMENTED"}),
    (8, grpc.Compression.NoCompression, {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}),
)
MOST_MIB = 700
"""Far above what the gateway takes beside eight of these, and far below what a single one took when parsed."""


def peak_mib(process: int) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM:"))) >> 10


def attacked(address: str, number: int, compression: grpc.Compression) -> set[str]:
    """Send requests at once; return how they were answered."""
    with grpc.insecure_channel(address, OPTIONS) as channel:
        submit: Any = channel.unary_unary(SUBMIT)
        calls = [submit.future(EMPTY_GROUPS, timeout=CALL, compression=compression) for _ in range(number)]
        return {call.code().name for call in calls}


async def test_eight_requests_of_empty_groups_take_no_memory_and_keep_nobody_waiting(
    cluster: Cluster, tmp_path: Path
) -> None:
    await cluster.instance("i0")
    ready = tmp_path / "ready.json"
    async with _gateway_process(cluster, ready) as gateway:
        trainer = await _connect(ready)
        first = make_batch()
        await until(lambda: _accepted(trainer, first), "the gateway leads, and the instance serves")
        address = json.loads(ready.read_text())["address"]
        # Of another thread: the instance lives in this one.
        for number, compression, answers in ATTACKS:
            attacking = asyncio.create_task(asyncio.to_thread(attacked, address, number, compression))
            request = make_batch()
            await trainer.submit(request)
            check_samples(request, await trainer.collect(request))
            listed = await trainer.fleet.ListInstances(fleet_pb2.ListInstancesRequest(), timeout=CALL)
            assert [each.instance_id for each in listed.instances] == ["i0"]
            assert await attacking <= answers
        assert peak_mib(gateway.process.pid) < MOST_MIB
        await trainer.channel.close()
