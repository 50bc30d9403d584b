"""Open channels to peers, with the TLS, token and limits of this service.

`Links` keeps a link to every registered generation instance, and calls each instance in rounds.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast

import grpc
import structlog
from prometheus_client import Counter

from paceline.transport.channel import is_loopback, keepalive_options
from services.platform.config import ServiceConfig, TlsConfig
from services.platform.grpc.interceptor import REQUEST_ID
from services.platform.observability import tracing
from services.platform.observability.tracing import TRACE_PARENT
from services.platform.redis.registry import INSTANCES, InstanceRecord, Registry
from services.platform.security.certificates import Certificates, watch_certificates
from services.platform.security.guard import own_token
from services.platform.tasks import ExponentialBackoff, Notifier, end

log = structlog.get_logger(__name__)

Options = list[tuple[str, int | str]]
Metadata = tuple[tuple[str, str], ...]
Dial = Callable[[], grpc.aio.Channel]

FIRST_DELAY, LONGEST_DELAY = 0.1, 2.0
"""Seconds until the round after a failed one, doubling with each failure in a row."""
_REGISTRY_SECONDS = 0.25
_CALLS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
"""Methods of a channel that make the callables of a stub."""


def common_options(config: ServiceConfig) -> Options:
    """Return message limits and keepalive, the same for channels and servers."""
    return [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        *keepalive_options(),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def channel_options(config: ServiceConfig) -> Options:
    """Return the options of a channel: it tries to reconnect every second and never uses a proxy."""
    options: Options = [
        *common_options(config),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Longest attempt without an answer, which takes seconds on a busy machine.
        ("grpc.min_reconnect_backoff_ms", 5000),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.enable_http_proxy", 0),
    ]
    if config.tls is not None and config.tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", config.tls.server_name))
    return options


def open_channel(address: str, config: ServiceConfig) -> grpc.aio.Channel:
    """Return a channel to "host:port", which connects at first use and sends the token and request id with calls.

    ValueError if the token would travel in plain text beyond loopback (and `config.insecure` is unset); OSError or
    Unreadable if no good certificates or token have been read in this process: bad ones are not used later either.
    """
    token = own_token(config)
    options = channel_options(config)
    if config.tls is not None:
        return cast(grpc.aio.Channel, _CallerChannel(_redialling(address, config.tls, options), token))
    if token() is not None and not config.insecure and not is_loopback(address.rpartition(":")[0]):
        raise ValueError(f"will not send the token to {address} in plain text; set tls, or insecure")
    plain = grpc.aio.insecure_channel(address, options)
    return cast(grpc.aio.Channel, _CallerChannel(lambda: plain, token))


def _redialling(address: str, tls: TlsConfig, options: Options) -> Dial:
    """Return a function that returns a channel with the current certificates, and a new one once they change."""
    watched = watch_certificates(tls)
    dialled: tuple[Certificates, grpc.aio.Channel] | None = None

    def dial() -> grpc.aio.Channel:
        nonlocal dialled
        certificates = watched.current()
        if dialled is None or dialled[0] is not certificates:
            pems = (certificates.roots, certificates.key, certificates.chain)
            channel = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(*pems), options)
            dialled = (certificates, channel)
        return dialled[1]

    return dial


class _CallerChannel:
    """Channel that adds metadata to every call, and makes each call on the channel that `dial` then returns.

    Not client interceptors, which put a task and a queue between caller and stream. A replaced channel stays open
    until this one is closed, for the streams that still use it.
    """

    def __init__(self, dial: Dial, token: Callable[[], str | None]) -> None:
        self._dial = dial
        self._token = token
        self._channels: list[grpc.aio.Channel] = []
        self._current()

    def __getattr__(self, name: str) -> Any:
        if name in _CALLS:
            return lambda *args, **kwargs: self._on_current(lambda on: getattr(on, name)(*args, **kwargs))
        return getattr(self._current(), name)

    async def close(self, grace: float | None = None) -> None:
        for channel in self._channels:
            await channel.close(grace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _current(self) -> grpc.aio.Channel:
        channel = self._dial()
        if not self._channels or self._channels[-1] is not channel:
            self._channels.append(channel)
        return channel

    def _on_current(self, make: Callable[[grpc.aio.Channel], Any]) -> Callable[..., Any]:
        channel = self._current()
        method = make(channel)

        def call(*args: Any, metadata: Any = None, **kwargs: Any) -> Any:
            nonlocal channel, method
            current = self._current()
            if current is not channel:
                channel, method = current, make(current)
            given = tuple(metadata or ())
            followed = (*_bearer(self._token()), *_trace_parent(given), *_request_id(given))
            return method(*args, metadata=(*given, *followed), **kwargs)

        return call


def _bearer(token: str | None) -> Metadata:
    return () if token is None else (("authorization", f"Bearer {token}"),)


def _trace_parent(given: tuple[tuple[str, Any], ...]) -> Metadata:
    """Return the span of the call being served, so that the peer continues its trace."""
    parent = tracing.current().traceparent
    if not parent or any(key == TRACE_PARENT for key, _ in given):
        return ()
    return ((TRACE_PARENT, parent),)


def _request_id(given: tuple[tuple[str, Any], ...]) -> Metadata:
    """Return the id of the call being served, so that one id follows a request through all services."""
    current = structlog.contextvars.get_contextvars().get("request_id")
    if current is None or any(key == REQUEST_ID for key, _ in given):
        return ()
    return ((REQUEST_ID, str(current)),)


class Link(ABC):
    """Link to one process, which is called in rounds (`call`); `run` until cancelled."""

    def __init__(
        self, record: InstanceRecord, config: ServiceConfig, changed: Notifier, failures: Counter
    ) -> None:
        """Open the channel; a notification of `changed` begins a round at once, `failures` counts failed ones.

        ValueError if the token would travel to the process in plain text.
        """
        self.record = record
        self._channel = open_channel(record.address, config)
        self._changed = changed
        self._failures = failures
        self._backoff = ExponentialBackoff(FIRST_DELAY, LONGEST_DELAY)

    @abstractmethod
    async def call(self) -> float:
        """Make one round of calls and return the seconds until the next; an AioRpcError makes the round fail."""

    async def run(self) -> None:
        """Keep the process up to date until cancelled."""
        try:
            while True:
                # Taken before the round, so that no change is missed.
                mark = self._changed.next_change()
                pause = await self._once()
                try:
                    async with asyncio.timeout(pause):
                        await mark.wait()
                except TimeoutError:
                    continue
        finally:
            await self._channel.close()

    async def _once(self) -> float:
        try:
            pause = await self.call()
        except grpc.aio.AioRpcError as error:
            return self._failed(error)
        self._backoff.succeeded()
        return pause

    def _failed(self, error: grpc.aio.AioRpcError) -> float:
        self._failures.inc()
        if self._backoff.failures == 0:
            log.warning(
                "instance_unreachable",
                instance=self.record.instance_id,
                error=f"{error.code().name}: {error.details()}",
            )
        return self._backoff.failed()


L = TypeVar("L", bound=Link)


class Links(Generic[L]):
    """Links by instance id, one for each process; `run` until cancelled.

    `dial` makes a link, or raises ValueError if the token must not be sent there. `looked` receives the records
    after each read of the registry, or None in an outage of Redis, in which the links stay unchanged.
    """

    def __init__(
        self,
        registry: Registry,
        dial: Callable[[InstanceRecord], L],
        looked: Callable[[dict[str, InstanceRecord] | None], None],
    ) -> None:
        self.known: dict[str, L] = {}
        self._registry = registry
        self._dial = dial
        self._looked = looked
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # Addresses to which the token must not be sent.
        self._refused: set[str] = set()

    async def run(self) -> None:
        """Follow the registry until cancelled, then end all links."""
        try:
            await self._registry.watch(INSTANCES, _REGISTRY_SECONDS, self._look)
        finally:
            await end(self._tasks.values())

    async def _look(self, records: dict[str, InstanceRecord] | None) -> None:
        if records is not None:
            await self._drop_others(records)
            self._refused &= {record.address for record in records.values()}
            for name, record in records.items():
                if name not in self.known and record.address not in self._refused:
                    self._connect(record)
        self._looked(records)

    async def _drop_others(self, records: dict[str, InstanceRecord]) -> None:
        """End links to processes that are no longer registered, and drop failed ones."""
        for name, link in list(self.known.items()):
            record, task = records.get(name), self._tasks[name]
            known = (link.record.epoch, link.record.address)
            if record is not None and (record.epoch, record.address) == known and not task.done():
                continue
            if task.done() and not task.cancelled():
                log.error("link_failed", instance=name, error=repr(task.exception()))
            del self.known[name], self._tasks[name]
            await end([task])

    def _connect(self, record: InstanceRecord) -> None:
        name = record.instance_id
        try:
            link = self._dial(record)
        except ValueError as error:
            # A mistake in the configuration, which another attempt does not cure.
            log.error("instance_not_dialled", address=record.address, error=str(error))
            self._refused.add(record.address)
            return
        self.known[name] = link
        self._tasks[name] = asyncio.create_task(link.run(), name=f"link-{name}")
