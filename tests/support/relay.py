"""A receiver with trouble on the way to it: a MigrationService that passes calls on, and a proxy of its KV.

async with relaying(receiver.address) as relay:
    relay.trouble = Trouble(cut_after=10_000)
    movers.aliases[relay.address] = 1
    report = await movers.move(1, 1, receiver_address=relay.address)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from paceline.internal.v1 import migration_pb2 as pb
from paceline.internal.v1 import migration_pb2_grpc as rpc
from tests.support.instances import CALL

Hook = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class Trouble:
    """What goes wrong. Bytes count from the beginning of a connection for KV, from the donor to the receiver.

    `reserve`, `commit` and `cancel` fail before they reach the receiver; `commit_answer` and `cancel_answer` after.
    The hooks run when a call has arrived, and before it is passed on.
    """

    reserve: bool = False
    commit: bool = False
    cancel: bool = False
    commit_answer: bool = False
    cancel_answer: bool = False
    cut_after: int | None = None
    stall_after: int | None = None
    break_at: int | None = None
    wrong_token: bool = False
    on_reserved: Hook | None = None
    on_commit: Hook | None = None
    on_committed: Hook | None = None


@dataclass(slots=True)
class Relay(rpc.MigrationServiceServicer):
    """See above. `sent` counts the bytes of KV that were passed on, `calls` the calls that arrived, by name."""

    receiver: Any
    trouble: Trouble = field(default_factory=Trouble)
    address: str = ""
    sent: int = 0
    calls: list[str] = field(default_factory=list)
    _target: str = ""
    _port: int = 0

    async def Reserve(self, request: pb.ReserveRequest, context: Any) -> pb.ReserveResponse:
        self.calls.append("Reserve")
        if self.trouble.reserve:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "trouble")
        response: pb.ReserveResponse = await self.receiver.Reserve(request, timeout=CALL)
        if response.WhichOneof("result") == "reserved":
            self._target = response.reserved.data_addresses[0]
            response.reserved.data_addresses[0] = f"127.0.0.1:{self._port}"
            if self.trouble.wrong_token:
                response.reserved.token = b"x" * 32
            if self.trouble.on_reserved is not None:
                await self.trouble.on_reserved()
        return response

    async def Commit(self, request: pb.CommitRequest, context: Any) -> pb.CommitResponse:
        self.calls.append("Commit")
        if self.trouble.on_commit is not None:
            await self.trouble.on_commit()
        if self.trouble.commit:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "trouble")
        response: pb.CommitResponse = await self.receiver.Commit(request, timeout=CALL)
        if self.trouble.on_committed is not None:
            await self.trouble.on_committed()
        if self.trouble.commit_answer:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "trouble")
        return response

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:
        self.calls.append("Disown" if request.disown else "Cancel")
        if self.trouble.cancel:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "trouble")
        response: pb.CancelResponse = await self.receiver.Cancel(request, timeout=CALL)
        if self.trouble.cancel_answer:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "trouble")
        return response

    async def _pass_on(self, donor: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        """One connection for KV."""
        host, _, port = self._target.rpartition(":")
        try:
            answers, receiver = await asyncio.open_connection(host, int(port))
        except OSError:
            back.close()
            return
        returning = asyncio.create_task(_copy(answers, back))
        try:
            await self._forward(donor, receiver)
        except OSError:
            # The receiver has gone: what it said before is passed on.
            await asyncio.wait([returning], timeout=CALL)
        finally:
            returning.cancel()
            await asyncio.wait([returning])
            receiver.close()
            back.close()

    async def _forward(self, donor: asyncio.StreamReader, receiver: asyncio.StreamWriter) -> None:
        # Of the move that the connection belongs to: what is set for a later one is not its trouble.
        passed, trouble = 0, self.trouble
        while data := bytearray(await donor.read(4096)):
            if trouble.break_at is not None and passed <= trouble.break_at < passed + len(data):
                data[trouble.break_at - passed] ^= 0x55
            if trouble.stall_after is not None and passed + len(data) > trouble.stall_after:
                await donor.read()
                return
            if trouble.cut_after is not None and passed + len(data) > trouble.cut_after:
                return
            receiver.write(data)
            await receiver.drain()
            passed += len(data)
            self.sent += len(data)


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(4096):
            target.write(data)
            await target.drain()
    except OSError:
        return
    finally:
        target.close()


@asynccontextmanager
async def relaying(receiver: str) -> AsyncIterator[Relay]:
    """A relay in front of an instance."""
    async with grpc.aio.insecure_channel(receiver) as channel:
        stub: Any = rpc.MigrationServiceStub(channel)
        relay = Relay(stub)
        proxy = await asyncio.start_server(relay._pass_on, "127.0.0.1", 0)
        relay._port = proxy.sockets[0].getsockname()[1]
        server = grpc.aio.server()
        rpc.add_MigrationServiceServicer_to_server(relay, server)
        relay.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            yield relay
        finally:
            await server.stop(0)
            proxy.close()
