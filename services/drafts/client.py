"""Client of the draft store for the gateway and the instances: find its replicas and spread prompts over them."""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
import structlog

from paceline.internal.v1 import draft_pb2 as pb
from paceline.internal.v1 import draft_pb2_grpc as rpc
from services.contracts.errors import InvalidArgument
from services.contracts.rollout import StoredRollout, batches, from_proto
from services.platform.config import ServiceConfig
from services.platform.grpc.channel import open_channel
from services.platform.redis.registry import InstanceRecord, Registry
from services.platform.tasks import ExponentialBackoff, is_cancelled

log = structlog.get_logger(__name__)

FIRST_DELAY, LONGEST_DELAY = 0.5, 10.0
"""Seconds without calls to a peer: after its first failure, and at most. Each failure in a row doubles them."""
SERVICE = "drafts"
"""Name of the store's replicas in the registry."""
POLL_SECONDS = 0.5
"""Time between two reads of the registry."""
# Statuses of a replica that is alive.
_FAULT_OF_THE_REQUEST = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
_PERSON = b"paceline-drafts"


class DraftStores:
    """All replicas of the store, found through the registry.

    An outage costs drafts, but raises no error and delays no call beyond `timeout` (seconds). A replica that failed
    is not called for a time that doubles from 0.5 to 10 seconds; meanwhile its prompts have no drafts.

    Usage: `run()` in a separate task until the end, then `close()`. Until the registry has been read for the first
    time there are no replicas, and nothing is stored or found.
    """

    def __init__(self, config: ServiceConfig, registry: Registry, *, timeout: float = 1.0) -> None:
        self._config = config
        self._registry = registry
        self._timeout = timeout
        self._replicas: dict[str, Replica] = {}
        self._refused: set[str] = set()
        """Addresses that the token must not be sent to."""

    @property
    def available(self) -> bool:
        """True if some known replica would be called now."""
        return any(replica.ready for replica in self._replicas.values())

    @property
    def replicas(self) -> frozenset[str]:
        """Ids of the replicas that are registered."""
        return frozenset(self._replicas)

    async def run(self) -> None:
        """Follow the registry until cancelled, through outages of Redis."""
        await self._registry.watch(SERVICE, POLL_SECONDS, self._look)

    async def put(self, rollouts: Sequence[StoredRollout]) -> int:
        """Store rollouts, each on the replica of its prompt, and return how many were taken.

        Rollouts without tokens are left out. Rollouts whose replica cannot be reached are lost.
        """
        shares: dict[str, list[StoredRollout]] = defaultdict(list)
        for rollout in rollouts:
            replica_id = owner(rollout.run_id, rollout.prompt_id, self._replicas)
            if replica_id is not None and len(rollout.tokens):
                shares[replica_id].append(rollout)
        calls = [self._replicas[name].put(share, self._timeout) for name, share in shares.items()]
        return sum(await asyncio.gather(*calls))

    async def fetch(self, run_id: str, prompt_ids: Sequence[str], *, whole: bool = True) -> Fetched:
        """Return the rollouts of a run's prompts that arrived within `timeout`.

        Unless `whole`, slots with a finished pre-generated rollout come without their history. Prompts whose
        replica did not answer are missed; without any replica, all are.
        """
        if not self._replicas:
            return Fetched([], frozenset(prompt_ids))
        shares: dict[str, list[str]] = defaultdict(list)
        for prompt_id in dict.fromkeys(prompt_ids):
            replica_id = owner(run_id, prompt_id, self._replicas)
            assert replica_id is not None, "there are replicas"
            shares[replica_id].append(prompt_id)
        calls = [
            self._replicas[name].fetch(run_id, ids, self._timeout, whole=whole)
            for name, ids in shares.items()
        ]
        parts = await asyncio.gather(*calls)
        rollouts = [rollout for part in parts for rollout in part.rollouts]
        return Fetched(rollouts, frozenset().union(*(part.missed for part in parts)))

    async def close(self) -> None:
        """End all connections. `run` must have ended."""
        replicas, self._replicas = self._replicas, {}
        await asyncio.gather(*(replica.close() for replica in replicas.values()))

    async def _look(self, records: dict[str, InstanceRecord] | None) -> None:
        if records is None:
            # Keep the known replicas: they may well be alive.
            return
        gone = [each for name, each in self._replicas.items() if not _same(each, records.get(name))]
        for replica in gone:
            log.info("draft_store_gone", replica=replica.replica_id, epoch=replica.epoch)
            del self._replicas[replica.replica_id]
        self._refused &= {record.address for record in records.values()}
        for name, record in records.items():
            if name not in self._replicas:
                self._add(record)
        await asyncio.gather(*(replica.close() for replica in gone))

    def _add(self, record: InstanceRecord) -> None:
        name = record.instance_id
        try:
            self._replicas[name] = Replica(name, record.epoch, record.address, self._config)
        except ValueError as error:
            if record.address not in self._refused:
                log.warning("draft_store_refused", replica=name, error=str(error))
            self._refused.add(record.address)
        else:
            log.info("draft_store_found", replica=name, epoch=record.epoch, address=record.address)


def _same(replica: Replica, record: InstanceRecord | None) -> bool:
    return record is not None and (record.epoch, record.address) == (replica.epoch, replica.address)


@dataclass(frozen=True, slots=True)
class Fetched:
    """Rollouts that arrived, and the prompts whose replica did not answer completely.

    The store may have more rollouts of a `missed` prompt. All rollouts of every other prompt are here.
    """

    rollouts: list[StoredRollout]
    missed: frozenset[str] = frozenset()


class Replica:
    """Calls to one store process. A failed call is logged and returns nothing."""

    def __init__(self, replica_id: str, epoch: int, address: str, config: ServiceConfig) -> None:
        """ValueError when the token would travel to `address` in plain text."""
        self.replica_id = replica_id
        self.epoch = epoch
        self.address = address
        self._channel = open_channel(address, config)
        # Connect now, so that the first call need not wait.
        self._channel.get_state(try_to_connect=True)
        self._stub = rpc.DraftServiceStub(self._channel)
        self._breaker = CircuitBreaker()
        self._loop = asyncio.get_running_loop()

    @property
    def ready(self) -> bool:
        """True if a call would be made: the circuit is closed, or a probe is due."""
        return self._breaker.ready(self._loop.time())

    async def put(self, rollouts: Sequence[StoredRollout], seconds: float) -> int:
        """Store rollouts and return how many were taken; 0 after a failure. Takes at most `seconds`."""
        stored, began = 0, self._loop.time()
        if self._breaker.admit(began):
            requests = (pb.PutRolloutsRequest(rollouts=batch) for batch in batches(rollouts))
            with self._reported("put", began):
                stored = (await self._stub.PutRollouts(requests, timeout=seconds)).stored
        return stored

    async def fetch(self, run_id: str, prompt_ids: Sequence[str], seconds: float, *, whole: bool) -> Fetched:
        """Return the rollouts that arrived within `seconds`; all prompts are missed unless all arrived."""
        found: list[StoredRollout] = []
        missed, began = frozenset(prompt_ids), self._loop.time()
        if self._breaker.admit(began):
            request = pb.FetchRolloutsRequest(
                run_id=run_id, prompt_ids=prompt_ids, omit_covered_history=not whole
            )
            with self._reported("fetch", began):
                async for answer in self._stub.FetchRollouts(request, timeout=seconds):
                    found += [from_proto(each) for each in answer.rollouts]
                missed = frozenset()
        return Fetched(found, missed)

    async def connected(self) -> None:
        """Wait for the connection, without a time limit."""
        await self._channel.channel_ready()

    async def close(self) -> None:
        """End the connection; calls in flight fail."""
        await self._channel.close()

    @contextmanager
    def _reported(self, call: str, began: float) -> Iterator[None]:
        """Report the outcome of a call to the breaker; log a failure instead of raising it."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            code, reason = error.code(), error.details()
        except InvalidArgument as error:
            code, reason = grpc.StatusCode.DATA_LOSS, error.message
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            code, reason = grpc.StatusCode.CANCELLED, "the channel was closed"
        else:
            self._breaker.succeeded(began)
            return
        log.warning("draft_store_failed", replica=self.replica_id, call=call, code=code.name, error=reason)
        if code in _FAULT_OF_THE_REQUEST:
            self._breaker.succeeded(began)
        else:
            self._breaker.failed(began, self._loop.time())


class CircuitBreaker:
    """Circuit breaker that admits calls to a peer until one fails, and then probes the peer.

    A closed breaker admits every call. A failure opens it for a delay. After the delay it admits one probe at a
    time: the outcome closes the breaker or opens it for twice the delay. If the outcome of a probe is never
    reported (its caller was cancelled), another probe is admitted after the same delay.
    """

    def __init__(self, first: float = FIRST_DELAY, longest: float = LONGEST_DELAY) -> None:
        self._backoff = ExponentialBackoff(first, longest)
        self._opened_at = 0.0
        self._until = 0.0

    @property
    def closed(self) -> bool:
        """True before the first call, and while the last call that counts has succeeded."""
        return self._backoff.failures == 0

    def ready(self, now: float) -> bool:
        """Return True if a call would be admitted."""
        return self.closed or now >= self._until

    def admit(self, now: float) -> bool:
        """Return True if a call may be made now; the caller reports its outcome with `began=now`."""
        if not self.ready(now):
            return False
        self._until = now + self._backoff.delay
        return True

    def succeeded(self, began: float) -> None:
        """Record the success of a call that was admitted at `began`."""
        if self._counts(began):
            self._backoff.succeeded()

    def failed(self, began: float, now: float) -> None:
        """Record the failure of a call that was admitted at `began`."""
        if self._counts(began):
            self._opened_at = now
            self._until = now + self._backoff.failed()

    def _counts(self, began: float) -> bool:
        # A call that was in flight when the breaker opened says nothing about the peer since then. Of many calls
        # that fail together, only the first doubles the delay.
        return self.closed or began >= self._opened_at


def owner(run_id: str, prompt_id: str, replicas: Iterable[str]) -> str | None:
    """Return the id of the replica that keeps a prompt, whatever the order of `replicas`; None if there are none.

    Rendezvous hashing: the replica with the highest hash of prompt and replica has the prompt. Replicas get equal
    shares. When one joins or leaves, only its prompts move.
    """
    # The lengths keep ("a", "bc") and ("ab", "c") apart.
    run, prompt = run_id.encode(), prompt_id.encode()
    state = hashlib.blake2b(b"%d:%d:" % (len(run), len(prompt)), digest_size=8, person=_PERSON)
    state.update(run)
    state.update(prompt)
    return max(replicas, key=lambda replica: (_weight(state, replica), replica), default=None)


def _weight(prompt: hashlib.blake2b, replica: str) -> bytes:
    """Return 8 bytes to compare as a big-endian number, uniform and independent for every pair."""
    state = prompt.copy()
    state.update(replica.encode())
    return state.digest()
