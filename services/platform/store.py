"""The connection to Redis and the names of the keys that services share.

Only commands of Redis 6.2 and later are used, and no server-side functions. A command can be applied twice
when the connection breaks between its execution and its answer, so writes must be idempotent (or, as for
the epoch counter, harmless when repeated).
"""

from __future__ import annotations

from dataclasses import dataclass

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import BusyLoadingError, ConnectionError, TimeoutError

from services.platform.config import ServiceConfig

CONNECT_TIMEOUT = 2.0
"""Seconds to open a connection."""
COMMAND_TIMEOUT = 5.0
"""Seconds to wait for an answer: blocking reads must block for less."""
RETRIES = 4
"""Times a command is tried again after a connection error: with the delays below, about a second."""
RETRY_DELAY, MAX_RETRY_DELAY = 0.05, 0.5
"""First and longest delay between tries, in seconds."""
HEALTH_CHECK_INTERVAL = 5
"""Seconds that a connection may lie idle before it is checked at its next use."""

OUTAGES = (ConnectionError, TimeoutError, BusyLoadingError)
"""What a command raises while Redis cannot be reached or is still loading its data."""


def connect(config: ServiceConfig) -> Redis:
    """A client of `config.redis_url` that answers in bytes. Connects at first use; close with `aclose`."""
    return Redis.from_url(
        config.redis_url,
        decode_responses=False,
        socket_connect_timeout=CONNECT_TIMEOUT,
        socket_timeout=COMMAND_TIMEOUT,
        health_check_interval=HEALTH_CHECK_INTERVAL,
        retry=Retry(ExponentialWithJitterBackoff(base=RETRY_DELAY, cap=MAX_RETRY_DELAY), RETRIES, OUTAGES),
    )


@dataclass(frozen=True, slots=True)
class Keys:
    """Names of keys under one namespace.

    Keys that are used in one transaction or script share a hash tag (the part in braces), so that they lie
    in one slot of a Redis Cluster.
    """

    namespace: str

    def registry(self, service: str, instance_id: str) -> str:
        """The record of one live instance; expires when its heartbeat stops."""
        return f"{self.registry_index(service)}:instance:{instance_id}"

    def registry_index(self, service: str) -> str:
        """Sorted set of the instance ids of a service, by the time of their last heartbeat."""
        return f"{self.namespace}:{{registry:{service}}}"

    def epoch(self, service: str, instance_id: str) -> str:
        """How often an instance id has been registered."""
        return f"{self.registry_index(service)}:epoch:{instance_id}"

    def batch(self, run_id: str, batch_id: str, name: str) -> str:
        """Something of one batch; all keys of a batch lie in one slot."""
        return f"{self.namespace}:{{{run_id}:{batch_id}}}:{name}"

    def run(self, run_id: str, name: str) -> str:
        """Something of one run."""
        return f"{self.namespace}:{{{run_id}}}:{name}"
