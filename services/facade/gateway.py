"""Call the gateway for everything but samples.

`GatewayClient` holds the SDK's client with the current token and certificates. `ServedFleet` reads the model, the
health and the published version, `Updates` publishes weights and pauses requests, and `Forecasts` announces
coming steps for trainers that announce nothing themselves.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import grpc
import structlog

from paceline import AsyncClient, RetryPolicy, convert
from paceline import types as t
from paceline.batches.parts import MAX_SAMPLES, runs_of
from paceline.errors import PacelineError, UnavailableError
from paceline.prompts import EpochOrders
from paceline.shards import OpenShard
from paceline.transport.channel import Tls, parse_addresses
from paceline.transport.interface import Unary
from paceline.v1 import rollout_pb2
from paceline.weights.version_push import VersionPush
from services.facade.config import FacadeConfig
from services.facade.metrics import FacadeMetrics
from services.facade.samples import SamplesInWork
from services.platform.config import ConfigError
from services.platform.security.certificates import Certificates, watch_certificates
from services.platform.security.guard import own_token
from services.platform.tasks import end

log = structlog.get_logger(__name__)

_MOST_CLIENTS = 8
"""Most clients that are open. One more closes the oldest, with its calls."""
HEALTH_SECONDS = 5.0
"""Deadline of the request to the gateway behind a probe."""
HEALTH_KEPT_SECONDS = 1.0
"""Seconds for which probes share one answer of the gateway."""
VERSION_SECONDS = 1.0
"""Seconds for which requests use the last known published version."""
_LIVE = (t.InstanceState.SERVING, t.InstanceState.PAUSED)


class GatewayClient:
    """Client of the SDK, replaced when the token or the certificates change.

    A replaced client stays open for its streams, until `_MOST_CLIENTS` newer ones exist.
    """

    def __init__(self, config: FacadeConfig) -> None:
        """Read token and certificates.

        ConfigError if an address is malformed, or the token would travel in plain text; OSError or Unreadable if
        the files cannot be used.
        """
        self._config = config
        self._token = own_token(config)
        self._certificates: Callable[[], Certificates | None] = lambda: None
        if config.tls is not None:
            self._certificates = watch_certificates(config.tls).current
        try:
            addresses = parse_addresses(config.gateway, tls=config.tls is not None)
        except ValueError as error:
            raise ConfigError([f"gateway: {error}"]) from error
        if config.tls is None and self._token() is not None and not config.insecure:
            for address in addresses:
                if not address.loopback:
                    raise ConfigError(
                        [f"will not send the token to {address.target} in plain text; set tls, or insecure"]
                    )
        self._made: list[tuple[tuple[str | None, Certificates | None], AsyncClient]] = []
        self._closing: set[asyncio.Task[None]] = set()

    def current(self) -> AsyncClient:
        """Return the current client; to be called on the event loop."""
        key = (self._token(), self._certificates())
        if not self._made or self._made[-1][0] != key:
            self._made.append((key, self._make(key[0])))
            while len(self._made) > _MOST_CLIENTS:
                _, oldest = self._made.pop(0)
                closing = asyncio.create_task(oldest.close())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
        return self._made[-1][1]

    async def close(self) -> None:
        """End all calls and connections."""
        for _, client in self._made:
            await client.close()
        await asyncio.gather(*self._closing)

    def _make(self, token: str | None) -> AsyncClient:
        config, tls = self._config, self._config.tls
        files = None if tls is None else Tls(tls.ca_file, tls.cert_file, tls.key_file, tls.server_name)
        return AsyncClient(
            config.gateway,
            token=token or "",
            tls=files,
            retry=RetryPolicy(seconds=config.retry_seconds),
            insecure=config.insecure,
        )


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Model that the instances serve."""

    names: tuple[str, ...]
    max_model_len: int
    vocab_size: int

    @property
    def name(self) -> str:
        """Name of the model in answers."""
        return self.names[0]


class ServedFleet:
    """Model, instances and policy version of the fleet, as requests see them."""

    def __init__(self, client: Callable[[], AsyncClient], names: Sequence[str] = ()) -> None:
        """`names` replace the model's name, unless there are none."""
        self._client = client
        self._names = names
        self._model: ServedModel | None = None
        self._recent, self._recent_until = 0, -math.inf
        self._version_call: asyncio.Task[int] | None = None
        self._health: _Health | None = None

    async def model(self) -> ServedModel:
        """Return the model, which never changes. UnavailableError: no instance is known."""
        if self._model is None:
            self._model = served_model(await self._client().instances(), self._names)
        return self._model

    async def instances(self) -> tuple[t.Instance, ...]:
        """Return the instances, or raise within the deadline of a probe."""
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                return await self._client().instances()
        except TimeoutError:
            raise UnavailableError(grpc.StatusCode.UNAVAILABLE, "the gateway does not answer") from None

    async def policy_version(self) -> int:
        """Return the published version of the weights."""
        return (await self._client().versions()).policy_version

    async def recent_version(self) -> int:
        """Return the published version, or one of the last second: concurrent requests share a call."""
        if time.monotonic() < self._recent_until:
            return self._recent
        if self._version_call is None or self._version_call.done():
            self._version_call = asyncio.create_task(self.policy_version())
        # Shielded, because the first caller may leave.
        version = await asyncio.shield(self._version_call)
        if time.monotonic() >= self._recent_until:
            self.published(version)
        return version

    def published(self, version: int) -> None:
        """Record the version that is published now."""
        self._recent, self._recent_until = version, time.monotonic() + VERSION_SECONDS

    async def problem(self, *, needs_instance: bool) -> str:
        """Return the reason why requests cannot be served, empty if they can. It may be a second old."""
        health = self._health
        if health is None or time.monotonic() >= health.until:
            # Probes share one call, which is shielded because the first probe may leave.
            health = self._health = _Health(asyncio.create_task(self._problems()))
            health.call.add_done_callback(health.keep)
        return (await asyncio.shield(health.call))[needs_instance]

    async def _problems(self) -> tuple[str, str]:
        """Return the problem of the gateway alone, and the problem with regard to instances."""
        try:
            instances = await self.instances()
        except PacelineError as error:
            return error.message, error.message
        return "", "" if any(each.state in _LIVE for each in instances) else "no instance serves"


class _Health:
    """Call for the health of the gateway, and the time until which its result is used."""

    def __init__(self, call: asyncio.Task[tuple[str, str]]) -> None:
        self.call = call
        self.until = math.inf

    def keep(self, call: asyncio.Task[tuple[str, str]]) -> None:
        failed = call.cancelled() or call.exception() is not None
        self.until = time.monotonic() + (0.0 if failed else HEALTH_KEPT_SECONDS)


def served_model(instances: Sequence[t.Instance], names: Sequence[str] = ()) -> ServedModel:
    """Return the model of the instances, with the least of their lengths and of their vocabularies."""
    if not instances:
        raise UnavailableError(grpc.StatusCode.UNAVAILABLE, "no instance has registered yet")
    return ServedModel(
        tuple(names) or (instances[0].model,),
        min(each.max_model_len for each in instances),
        min(each.vocab_size for each in instances),
    )


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """Result of a published update."""

    version: int
    instances: Sequence[t.InstanceUpdate]
    aborted: int
    continued: int

    @property
    def message(self) -> str:
        """Summary with the failed instances."""
        failed = [f"{each.instance_id}: {each.error}" for each in self.instances if each.error]
        counts = f"{self.aborted} samples ended and {self.continued} go on"
        summary = f"version {self.version} is published; {counts}"
        return "; ".join([summary, *failed])


@dataclass(slots=True)
class Updates:
    """Updates and pauses of one facade."""

    client: Callable[[], AsyncClient]
    samples: SamplesInWork
    metrics: FacadeMetrics
    published: Callable[[int], None]
    """Called with the version of each published update."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def pause(self, mode: str) -> int:
        """Let new requests wait; return the number of aborted samples.

        Mode `abort` ends the running requests of this facade, if the caller may name their runs; `wait` waits until
        all have ended, and in any other mode they continue.
        """
        self.samples.pause()
        self.metrics.paused.set(1)
        if mode == "abort":
            return await self.samples.abort()
        if mode == "wait":
            await self.samples.drained()
        return 0

    def resume(self) -> None:
        """End a pause."""
        self.samples.resume()
        self.metrics.paused.set(0)

    async def from_folder(
        self, run_id: str, path: str, in_flight: t.InFlight, version_of: Callable[[int], int]
    ) -> UpdateOutcome:
        """Check, stage, apply and publish the weights in a folder; an error aborts the update.

        `version_of` returns the new version for the published one. A repeated request continues the update that it
        began, until that is published.
        """
        async with self._lock:
            try:
                outcome = await self._update(run_id, path, in_flight, version_of)
            except PacelineError:
                self.metrics.updates.labels("failed").inc()
                raise
        self.metrics.updates.labels("published").inc()
        self.published(outcome.version)
        return outcome

    async def _update(
        self, run_id: str, path: str, in_flight: t.InFlight, version_of: Callable[[int], int]
    ) -> UpdateOutcome:
        client, policy = self.client(), t.WeightTarget.POLICY
        push = await VersionPush.begin(client, run_id, policy)
        push.version = version_of(push.version - 1)

        def start(member: OpenShard, version: int) -> Awaitable[t.UpdateStarted]:
            return member.calls.start_update(run_id, version, policy)

        async def stage(member: OpenShard, started: t.UpdateStarted) -> None:
            await member.calls.update_weights(started.update_id, path)

        done = await push.stage(start, stage, in_flight)
        return UpdateOutcome(
            done.policy_version, done.instances, done.aborted_samples, done.continued_samples
        )


class Forecasts:
    """Forecasts coming steps from requested samples, and announces them in the background."""

    def __init__(
        self, client: Callable[[], AsyncClient], most_prompts: int, most_samples: int, metrics: FacadeMetrics
    ) -> None:
        """Remember at most `most_prompts` (0: forecast nothing), and announce at most `most_samples` of a step."""
        self._client = client
        self._orders = EpochOrders(most_prompts) if most_prompts else None
        self._most_samples = min(most_samples, MAX_SAMPLES)
        self._metrics = metrics
        self._announcing: dict[str, asyncio.Task[None]] = {}
        """Hint in flight, at most one for each run."""

    def observe(self, requests: Iterable[t.SampleRequest]) -> None:
        """Take in requested samples, in order."""
        if self._orders is None:
            return
        missed = self._orders.missed
        for request in requests:
            hint = self._orders.ask(request)
            if hint is not None and hint.run_id not in self._announcing:
                # Created in the context of the request, so that the call to the gateway names its caller.
                self._announcing[hint.run_id] = asyncio.create_task(self._announce(hint))
        self._metrics.forecasts.labels("missed").inc(self._orders.missed - missed)

    def announced(self, run_id: str, step: int) -> None:
        """Record that a trainer announces a step itself, which a forecast must not replace."""
        if self._orders is not None:
            self._orders.announced(run_id, step)

    async def close(self) -> None:
        """End the hints in flight."""
        await end(self._announcing.values())

    async def _announce(self, hint: t.BatchHint) -> None:
        try:
            # In a thread, because prompts may have millions of tokens, which would delay requests.
            request = await asyncio.to_thread(self._request, hint)
            answer = await self._client().call(Unary("Rollout", "HintNextBatch", request))
        except PacelineError as error:
            self._metrics.forecasts.labels("failed").inc()
            log.warning("forecast_not_announced", run=hint.run_id, step=hint.step, error=error.message)
        except Exception:
            self._metrics.forecasts.labels("failed").inc()
            log.exception("forecast_failed", run=hint.run_id, step=hint.step)
        else:
            self._metrics.forecasts.labels("announced").inc()
            log.info("forecast_announced", run=hint.run_id, step=hint.step, samples=answer.samples)
        finally:
            del self._announcing[hint.run_id]

    def _request(self, hint: t.BatchHint) -> rollout_pb2.HintNextBatchRequest:
        groups = next(runs_of(hint.groups, self._most_samples))
        return convert.hint_to_proto(replace(hint, groups=groups))
