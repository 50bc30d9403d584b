"""Connect to Redis, classify its outages, and name the keys that services share.

Only commands of Redis 6.2 and later are used, and no server-side functions. A command can be applied twice
when the connection breaks between its execution and its answer, so writes must be idempotent (or, as for
the epoch counter, harmless when repeated).
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any, Self, cast

from prometheus_client import Counter, Gauge
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.client import Pipeline
from redis.asyncio.cluster import ClusterNode, ClusterPipeline
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import ExponentialWithJitterBackoff
from redis.commands.helpers import list_or_args
from redis.exceptions import (
    BusyLoadingError,
    ClusterError,
    ConnectionError,
    RedisClusterException,
    ResponseError,
    TimeoutError,
)

from services.platform.config import ServiceConfig, parse_store_url

CONNECT_TIMEOUT = 2.0
"""Seconds to open a connection."""
COMMAND_TIMEOUT = 5.0
"""Seconds to wait for an answer; blocking reads must block for less."""
RETRIES = 4
"""Retries of a command after a connection error: with the delays below, about a second in all."""
RETRY_DELAY, MAX_RETRY_DELAY = 0.05, 0.5
"""First and longest delay between tries, in seconds."""
MAX_CONNECTIONS = 4096
"""Most connections of a process to one server; redis-py fails beyond it (by default beyond 100)."""
HEALTH_CHECK_INTERVAL = 5
"""Seconds that a connection may be idle before it is checked at its next use."""

_RETRIED = (ConnectionError, TimeoutError)


class Refused(ResponseError):
    """Raised when Redis answers but cannot execute a command now; `reason` is one of `REFUSALS`."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


OUTAGES = (ConnectionError, TimeoutError, Refused)
"""Errors of clients from `connect` while Redis cannot be reached, or cannot accept writes.

Errors of the command itself (WRONGTYPE, NOSCRIPT, NOPERM, a script's own error) are not among them.
"""

REFUSALS = {
    "OOM": "full",
    "READONLY": "read_only",
    "UNBLOCKED": "read_only",
    "MISCONF": "snapshot_failed",
    "NOREPLICAS": "no_replicas",
    "MASTERDOWN": "primary_down",
    "CLUSTERDOWN": "cluster_down",
    "TRYAGAIN": "resharding",
    "LOADING": "loading",
    "BUSY": "script_runs",
}
"""Error codes of a server that cannot accept a command now, and their names in metrics."""
# A reply begins with its code, after a prefix that redis-py adds for pipelines, or Redis 6.2 for scripts.
_CODE = re.compile(rf"(?:^|of pipeline caused error: |: -)({'|'.join(REFUSALS)})\b")
# Messages of redis-py's cluster client until it has found nodes for all slots.
_NO_CLUSTER = (
    "cannot be connected",
    "not all slots",
    "slots are not covered",
    "is not covered",
    "TTL exhausted",
)


def translated(error: Exception) -> Exception:
    """Return the error of a command as one of OUTAGES, or unchanged if it is no outage."""
    code = getattr(error, "status_code", None)
    if isinstance(error, ResponseError) and not isinstance(error, Refused):
        found = _CODE.search(str(error))
        code = code if code in REFUSALS else found and found[1]
        if code is not None:
            return Refused(f"{code} {str(error).removeprefix(f'{code} ')}", REFUSALS[code])
    if isinstance(error, RedisClusterException | ClusterError) and any(
        each.lower() in str(error).lower() for each in _NO_CLUSTER
    ):
        return ConnectionError(str(error))
    return error


def reason_of(error: Exception) -> str:
    """Return the name in metrics of one of OUTAGES."""
    if isinstance(error, Refused):
        return error.reason
    return "loading" if isinstance(error, BusyLoadingError) else "unreachable"


@functools.cache
def redis_up() -> Gauge:
    """Return the gauge that heartbeats and leases set."""
    text = "1 if Redis accepted the last write, else 0."
    return Gauge("paceline_redis_up", text)


@functools.cache
def redis_errors() -> Counter:
    """Return the counter of heartbeats and renewals of leases that Redis refused, by reason."""
    text = "Heartbeats and renewals of leases that Redis did not take, by reason."
    return Counter("paceline_redis_errors_total", text, ["reason"])


def show_outage(error: Exception | None) -> None:
    """Show in metrics that Redis could not be used, or, with None, that it accepted a write."""
    redis_up().set(error is None)
    if error is not None:
        redis_errors().labels(reason_of(error)).inc()


class _Client(Redis):
    """Client of one server, or of the primary that Sentinels name; errors are `translated`."""

    sentinels: Sentinel | None = None

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().execute_command(*args, **options)
        except Exception as error:
            raise await self.refused(error) from None

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        return _Pipeline(self, transaction, shard_hint)

    async def refused(self, error: Exception) -> Exception:
        """Return the error translated; leave a demoted primary, so that its address is looked up again."""
        error = translated(error)
        if isinstance(error, Refused) and error.reason == "read_only":
            await self.connection_pool.disconnect(inuse_connections=False)
        return error

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool)
        if self.sentinels is not None:
            await self.sentinels.aclose()


class _Pipeline(Pipeline):
    def __init__(self, client: _Client, transaction: bool, shard_hint: str | None) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, transaction, shard_hint)
        self._client = client

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        try:
            replies = await super().execute(raise_on_error)
        except Exception as error:
            raise await self._client.refused(error) from None
        return [await self._client.refused(x) if isinstance(x, Exception) else x for x in replies]


class _Cluster(RedisCluster):
    """Client of a Redis Cluster; errors are `translated`."""

    async def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().execute_command(*args, **kwargs)
        except Exception as error:
            raise translated(error) from None

    async def __aenter__(self) -> Self:
        # The base method connects at once, but the cluster may be unreachable when a service starts.
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def pipeline(self, transaction: Any = None, shard_hint: Any = None) -> ClusterPipeline:
        return _ClusterPipeline(self, transaction)  # type: ignore[abstract]


class _ClusterPipeline(ClusterPipeline):
    def mget(self, keys: Any, *args: Any) -> Any:
        """Queue an MGET of keys in one slot; redis-py has none in pipelines, since keys may span slots."""
        return self.execute_command("MGET", *list_or_args(keys, args))

    async def execute(self, raise_on_error: bool = True, allow_redirections: bool = True) -> list[Any]:
        try:
            replies = await super().execute(raise_on_error, allow_redirections)
        except Exception as error:
            raise translated(error) from None
        return [translated(x) if isinstance(x, Exception) else x for x in replies]


def connect(config: ServiceConfig) -> Redis:
    """Return a client of `config.redis_url` that returns bytes; it connects at first use, and `aclose` closes it.

    In a Redis Cluster all keys of a command, script or transaction must be in one slot; other pipelines may span
    slots, but their commands then run in no particular order.
    """
    address = parse_store_url(config.redis_url)
    options: dict[str, Any] = {
        "decode_responses": False,
        "socket_connect_timeout": CONNECT_TIMEOUT,
        "socket_timeout": COMMAND_TIMEOUT,
        "health_check_interval": HEALTH_CHECK_INTERVAL,
        "retry": Retry(ExponentialWithJitterBackoff(RETRY_DELAY, MAX_RETRY_DELAY), RETRIES, _RETRIED),
        **address.options,
    }
    if not address.hosts:
        return _Client.from_url(address.url, max_connections=MAX_CONNECTIONS, **options)
    if not address.service:
        nodes = [ClusterNode(host, port) for host, port in address.hosts]
        return cast(Redis, _Cluster(startup_nodes=nodes, **options))
    for_sentinels = {"socket_connect_timeout": CONNECT_TIMEOUT, "socket_timeout": CONNECT_TIMEOUT}
    sentinel = Sentinel(address.hosts, sentinel_kwargs={**for_sentinels, **address.sentinel_options})
    client: _Client = sentinel.master_for(
        address.service, redis_class=_Client, max_connections=MAX_CONNECTIONS, **options
    )
    client.sentinels = sentinel
    return client


@dataclass(frozen=True, slots=True)
class Keys:
    """Names of keys under one namespace.

    Keys that are used in one transaction or script share a hash tag (the part in braces), so that they are
    in one slot of a Redis Cluster.
    """

    namespace: str

    def registry(self, service: str, instance_id: str) -> str:
        """Return the record of one live instance; expires when its heartbeat stops."""
        return f"{self.registry_index(service)}:instance:{instance_id}"

    def registry_index(self, service: str) -> str:
        """Return the sorted set of a service's instance ids by the time of their last heartbeat."""
        return f"{self.namespace}:{{registry:{service}}}"

    def epoch(self, service: str, instance_id: str) -> str:
        """Return the counter of the registrations of an instance id."""
        return f"{self.registry_index(service)}:epoch:{instance_id}"

    def batch(self, run_id: str, batch_id: str, name: str) -> str:
        """Return a key of one batch; all keys of a batch are in one slot."""
        return f"{self.namespace}:{{{run_id}:{batch_id}}}:{name}"

    def run(self, run_id: str, name: str) -> str:
        """Return a key of one run."""
        return f"{self.namespace}:{{{run_id}}}:{name}"
