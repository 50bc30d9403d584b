"""One replica of the draft store, as its clients see it: a channel and a circuit breaker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import structlog

from paceline.internal.v1 import draft_pb2 as pb
from paceline.internal.v1 import draft_pb2_grpc as rpc
from services.drafts.breaker import Breaker
from services.drafts.convert import batches, from_proto
from services.drafts.fetched import Fetched
from services.drafts.rollout import Rollout
from services.platform.channel import open_channel
from services.platform.config import ServiceConfig
from services.platform.errors import InvalidArgument
from services.platform.tasks import is_cancelled

log = structlog.get_logger(__name__)

# A replica that answers so is alive.
_FAULT_OF_THE_REQUEST = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)


class Replica:
    """Calls to one store process. What fails is logged, and costs what it would have brought."""

    def __init__(self, replica_id: str, epoch: int, address: str, config: ServiceConfig) -> None:
        """ValueError when the token would travel to `address` in plain text."""
        self.replica_id = replica_id
        self.epoch = epoch
        self.address = address
        self._channel = open_channel(address, config)
        # Connected before the first call, so that this one need not wait.
        self._channel.get_state(try_to_connect=True)
        self._stub = rpc.DraftServiceStub(self._channel)
        self._breaker = Breaker()
        self._loop = asyncio.get_running_loop()

    @property
    def ready(self) -> bool:
        """Whether a call would be made: the circuit is closed, or a trial is due."""
        return self._breaker.ready(self._loop.time())

    async def put(self, rollouts: Sequence[Rollout], seconds: float) -> int:
        """Stores rollouts and returns how many were taken; 0 after a failure. Takes at most `seconds`."""
        began = self._loop.time()
        if not self._breaker.admit(began):
            return 0
        requests = (pb.PutRolloutsRequest(rollouts=batch) for batch in batches(rollouts))
        try:
            answer = await self._stub.PutRollouts(requests, timeout=seconds)
        except grpc.aio.AioRpcError as error:
            self._failed(began, "put", error.code(), error.details())
            return 0
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            self._failed(began, "put", grpc.StatusCode.CANCELLED, "the channel was closed")
            return 0
        self._breaker.succeeded(began)
        return int(answer.stored)

    async def fetch(self, run_id: str, prompt_ids: Sequence[str], seconds: float) -> Fetched:
        """The rollouts of prompts, as far as they arrived within `seconds`; all are missed unless all did."""
        began, missed = self._loop.time(), frozenset(prompt_ids)
        if not self._breaker.admit(began):
            return Fetched([], missed)
        request = pb.FetchRolloutsRequest(run_id=run_id, prompt_ids=prompt_ids)
        found: list[Rollout] = []
        try:
            async for answer in self._stub.FetchRollouts(request, timeout=seconds):
                found += [from_proto(each) for each in answer.rollouts]
        except grpc.aio.AioRpcError as error:
            self._failed(began, "fetch", error.code(), error.details())
        except InvalidArgument as error:
            self._failed(began, "fetch", grpc.StatusCode.DATA_LOSS, error.message)
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            self._failed(began, "fetch", grpc.StatusCode.CANCELLED, "the channel was closed")
        else:
            self._breaker.succeeded(began)
            missed = frozenset()
        return Fetched(found, missed)

    async def connected(self) -> None:
        """Returns once there is a connection; waits for as long as it takes."""
        await self._channel.channel_ready()

    async def close(self) -> None:
        """Ends the connection; calls under way fail."""
        await self._channel.close()

    def _failed(self, began: float, call: str, code: grpc.StatusCode, details: str | None) -> None:
        log.warning("draft_store_failed", replica=self.replica_id, call=call, code=code.name, error=details)
        if code in _FAULT_OF_THE_REQUEST:
            self._breaker.succeeded(began)
        else:
            self._breaker.failed(began, self._loop.time())
