"""Call the Kubernetes API with typed errors, and elect a leader among controllers by a Lease.

No other module of scaling imports the `kubernetes` package.
"""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import structlog
from kubernetes.aio import client, config
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.config import ConfigException

from services.policy.metrics import ApiConflict, ApiNotFound, ClusterError, ScalingMetrics

log = structlog.get_logger(__name__)

CALL_SECONDS = 5.0
"""Deadline of one call."""
FIELD_MANAGER = "paceline-policy"
"""Name under which the API records which fields this service has written."""

_RENEW, _TRUST = 1 / 5, 2 / 3
"""Shares of the Lease's duration: a renewal is due after the first, and relied on for the second."""
_NEVER = float("-inf")
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


_KINDS = {
    401: "forbidden",
    403: "forbidden",
    404: "not_found",
    409: "conflict",
    408: "unreachable",
    429: "unreachable",
}
"""Kind of error by HTTP status."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Desired replicas of a StatefulSet, and the version of the object that they were read from."""

    replicas: int
    version: str


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """State of a coordination.k8s.io Lease; `version` is empty while it does not exist."""

    holder: str = ""
    renewed: datetime.datetime | None = None
    """Time of the last renewal, by the clock of the holder."""
    seconds: int = 0
    transitions: int = 0
    version: str = ""
    notes: dict[str, str] = field(default_factory=dict)
    """Annotations."""


class KubernetesClient:
    """Calls within one namespace; made by `connected`. Every method raises ClusterError."""

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self.namespace = namespace
        self._apps = client.AppsV1Api(api)
        self._core = client.CoreV1Api(api)
        self._leases = client.CoordinationV1Api(api)

    async def scale(self, pool: str) -> Scale:
        """Return the scale of a StatefulSet."""
        return _scale(await _answer(self._apps.read_namespaced_stateful_set_scale, pool, self.namespace))

    async def set_scale(self, pool: str, replicas: int, version: str) -> Scale:
        """Change the scale of a StatefulSet; ApiConflict if it has changed since `version`."""
        meta = client.V1ObjectMeta(name=pool, namespace=self.namespace, resource_version=version)
        body = client.V1Scale(metadata=meta, spec=client.V1ScaleSpec(replicas=replicas))
        call = self._apps.replace_namespaced_stateful_set_scale
        return _scale(await _answer(call, pool, self.namespace, body, field_manager=FIELD_MANAGER))

    async def pod_is_ready(self, name: str) -> bool:
        """Return True if the pod exists and its condition Ready holds."""
        try:
            pod = await _answer(self._core.read_namespaced_pod, name, self.namespace)
        except ApiNotFound:
            return False
        conditions = (pod.status.conditions if pod.status is not None else None) or []
        return any(each.type == "Ready" and each.status == "True" for each in conditions)

    async def lease(self, name: str) -> LeaseRecord:
        """Return a Lease; an empty record if it does not exist."""
        try:
            return _lease(await _answer(self._leases.read_namespaced_lease, name, self.namespace))
        except ApiNotFound:
            return LeaseRecord()

    async def write_lease(self, name: str, record: LeaseRecord) -> LeaseRecord:
        """Create a Lease, or replace the one of `record.version`; ApiConflict if it has changed since."""
        spec = client.V1LeaseSpec(
            holder_identity=record.holder or None,
            lease_duration_seconds=record.seconds,
            lease_transitions=record.transitions,
            renew_time=record.renewed,
        )
        meta = client.V1ObjectMeta(name=name, namespace=self.namespace, annotations=record.notes)
        body = client.V1Lease(metadata=meta, spec=spec)
        if not record.version:
            create = self._leases.create_namespaced_lease
            return _lease(await _answer(create, self.namespace, body, field_manager=FIELD_MANAGER))
        meta.resource_version = record.version
        replace = self._leases.replace_namespaced_lease
        return _lease(await _answer(replace, name, self.namespace, body, field_manager=FIELD_MANAGER))


@asynccontextmanager
async def connected(
    url: str | None = None, namespace: str | None = None, ca_file: Path | None = None
) -> AsyncIterator[KubernetesClient]:
    """Connect to the cluster at `url`, or else to the cluster of this pod, or of the kubeconfig.

    `ca_file` holds the authorities that the certificate of an https `url` must come from. ClusterError if no
    cluster is configured or the namespace is unknown.
    """
    settings = client.Configuration()
    settings.retries = None  # callers retry, and report that
    if url is not None:
        settings.host, settings.ssl_ca_cert = url, None if ca_file is None else str(ca_file)
    else:
        await _configure(settings)
    async with client.ApiClient(settings) as api:
        yield KubernetesClient(api, namespace or _own_namespace())


async def _configure(settings: client.Configuration) -> None:
    try:
        config.load_incluster_config(settings)
    except ConfigException:
        try:
            await config.load_kube_config(client_configuration=settings)
        except ConfigException as error:
            raise ClusterError(f"no Kubernetes cluster is configured: {error}") from error


def _own_namespace() -> str:
    try:
        return _NAMESPACE_FILE.read_text().strip()
    except OSError as error:
        raise ClusterError(f"scaling.kubernetes_namespace is not set, and {error}") from error


async def _answer(call: Any, *arguments: Any, **options: Any) -> Any:
    try:
        async with asyncio.timeout(CALL_SECONDS * 2):
            return await call(*arguments, **options, _request_timeout=CALL_SECONDS)
    except ApiException as error:
        status = int(error.status or 0)
        kind = _KINDS.get(status, "unreachable" if status >= 500 or not status else "failed")
        failure = {"conflict": ApiConflict, "not_found": ApiNotFound}.get(kind, ClusterError)
        raise failure(f"{status} {error.reason}: {str(error.body or '')[:500]}", kind) from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ClusterError(f"{type(error).__name__}: {error}", "unreachable") from error


def _scale(found: Any) -> Scale:
    replicas = found.spec.replicas if found.spec is not None else 0
    return Scale(int(replicas or 0), str(found.metadata.resource_version))


def _lease(found: Any) -> LeaseRecord:
    spec, meta = found.spec, found.metadata
    return LeaseRecord(
        holder=spec.holder_identity or "",
        renewed=spec.renew_time,
        seconds=spec.lease_duration_seconds or 0,
        transitions=spec.lease_transitions or 0,
        version=meta.resource_version or "",
        notes=dict(meta.annotations or {}),
    )


def may_take(record: LeaseRecord, identity: str, unchanged: float) -> bool:
    """Return True if `identity` holds the Lease, or it is free, or expired after `unchanged` seconds. Pure."""
    return record.holder in ("", identity) or unchanged >= record.seconds


class Election:
    """Candidate for the Lease. `run` it until cancelled; `leading` is True while it may act.

    Clocks of different machines are never compared: a Lease has expired when an observer has not seen it change
    for its duration, by the clock of the observer. Its holder stops acting earlier, by its own clock. The
    election of the `kubernetes` package is not used: it compares wall-clock times, ends at the first connection
    error, and neither releases the Lease nor keeps notes in it.

    `notes` are annotations of the Lease. They show a successor what its predecessor was doing.
    """

    def __init__(
        self,
        cluster: KubernetesClient,
        name: str,
        identity: str,
        seconds: float,
        metrics: ScalingMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._name = name
        self._identity = identity
        self._seconds = seconds
        self._metrics = metrics
        self._clock = clock
        self._record = LeaseRecord()
        """The Lease as this candidate wrote it last."""
        self._version, self._changed_at = "", clock()
        self._trusted_until = _NEVER
        self._led = False
        # Serializes cycles of reading, changing and writing back.
        self._lock = asyncio.Lock()

    @property
    def leading(self) -> bool:
        """True while this candidate certainly holds the Lease."""
        leading = self._clock() < self._trusted_until
        if self._led and not leading:
            self._led = False
            log.warning("lease_lost", lease=self._name)
            self._metrics.leader.set(0)
        return leading

    @property
    def notes(self) -> dict[str, str]:
        """Notes in the Lease, as of the last write of this candidate."""
        return dict(self._record.notes)

    async def run(self) -> None:
        """Take the Lease when it is free and renew it; release it when cancelled."""
        try:
            while True:
                async with self._lock:
                    await self._attempt()
                _ = self.leading  # logs a loss
                await asyncio.sleep(self._seconds * _RENEW)
        finally:
            await self._release()

    async def note(self, key: str, value: str | None) -> None:
        """Write a note for the successor, or remove it (None). ClusterError if that fails."""
        async with self._lock:
            notes = {name: text for name, text in self._record.notes.items() if name != key}
            if value is not None:
                notes[key] = value
            if notes != self._record.notes:
                await self._write(replace(self._record, notes=notes))

    async def _attempt(self) -> None:
        try:
            record = await self._cluster.lease(self._name)
            now = self._clock()
            if record.version != self._version:
                self._version, self._changed_at = record.version, now
            if may_take(record, self._identity, now - self._changed_at):
                won = bool(record.version) and record.holder != self._identity
                taken = replace(record, holder=self._identity, transitions=record.transitions + won)
                await self._write(taken)
            else:
                self._trusted_until = _NEVER
            self._metrics.succeeded("lease")
        except ApiConflict:
            log.info("lease_contended", lease=self._name)
        except ClusterError as error:
            self._metrics.failed("lease", error)

    async def _write(self, record: LeaseRecord) -> None:
        # Counted from before the call: other candidates count from when they see the change.
        began = self._clock()
        # The API requires six digits after the point, and its client omits them when they are all zero.
        now = datetime.datetime.now(datetime.UTC)
        renewed = now.replace(microsecond=max(1, now.microsecond))
        fresh = replace(record, renewed=renewed, seconds=max(1, round(self._seconds)))
        self._record = await self._cluster.write_lease(self._name, fresh)
        self._version, self._changed_at = self._record.version, self._clock()
        self._trusted_until = began + self._seconds * _TRUST
        if not self._led:
            self._led = True
            log.info("lease_won", lease=self._name, identity=self._identity)
            self._metrics.leader.set(1)

    async def _release(self) -> None:
        held, self._trusted_until, self._led = self.leading, _NEVER, False
        self._metrics.leader.set(0)
        if held:
            try:
                await self._cluster.write_lease(self._name, replace(self._record, holder=""))
            except ClusterError as error:
                log.warning("lease_not_released", error=str(error))
