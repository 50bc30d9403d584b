"""The part of the Kubernetes API that scaling needs, with typed errors. Nothing else here knows its client."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import structlog
from kubernetes.aio import client, config
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.config import ConfigException

from services.policy.scaling.errors import (
    ApiConflict,
    ApiForbidden,
    ApiNotFound,
    ApiUnreachable,
    ClusterError,
)

log = structlog.get_logger(__name__)

CALL_SECONDS = 5.0
"""Deadline of one call."""

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_KINDS: dict[int, type[ClusterError]] = {
    401: ApiForbidden,
    403: ApiForbidden,
    404: ApiNotFound,
    409: ApiConflict,
    408: ApiUnreachable,
    429: ApiUnreachable,
}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Scale:
    """Replicas that a StatefulSet is meant to have, and the version of the object that says so."""

    replicas: int
    version: str


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """A coordination.k8s.io Lease. `renewed` is when its holder says that it renewed it; `version` is empty for one
    that is not there yet."""

    holder: str = ""
    renewed: datetime.datetime | None = None
    seconds: int = 0
    transitions: int = 0
    version: str = ""
    notes: dict[str, str] = field(default_factory=dict)
    """Annotations."""


class Cluster:
    """One namespace. Make it with `connected`. Every method raises ClusterError."""

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self.namespace = namespace
        self._apps = client.AppsV1Api(api)
        self._core = client.CoreV1Api(api)
        self._leases = client.CoordinationV1Api(api)

    async def scale(self, pool: str) -> Scale:
        """The scale of a StatefulSet."""
        return _scale(
            await _made(self._apps.read_namespaced_stateful_set_scale(pool, self.namespace, **_TIME))
        )

    async def set_scale(self, pool: str, replicas: int, version: str) -> Scale:
        """Changes it; ApiConflict when the StatefulSet is not the one of `version` any more."""
        meta = client.V1ObjectMeta(name=pool, namespace=self.namespace, resource_version=version)
        body = client.V1Scale(metadata=meta, spec=client.V1ScaleSpec(replicas=replicas))
        call = self._apps.replace_namespaced_stateful_set_scale(pool, self.namespace, body, **_TIME)
        return _scale(await _made(call))

    async def pod_is_ready(self, name: str) -> bool:
        """Whether a pod is there and ready to be worked with."""
        try:
            pod = await _made(self._core.read_namespaced_pod(name, self.namespace, **_TIME))
        except ApiNotFound:
            return False
        conditions = (pod.status.conditions if pod.status is not None else None) or []
        return any(each.type == "Ready" and each.status == "True" for each in conditions)

    async def lease(self, name: str) -> LeaseRecord:
        """A Lease; an empty record when there is none."""
        try:
            found = await _made(self._leases.read_namespaced_lease(name, self.namespace, **_TIME))
        except ApiNotFound:
            return LeaseRecord()
        return _lease(found)

    async def write_lease(self, name: str, record: LeaseRecord) -> LeaseRecord:
        """Makes a Lease, or changes the one of `record.version`; ApiConflict when somebody else did."""
        meta = client.V1ObjectMeta(name=name, namespace=self.namespace, annotations=record.notes)
        spec = client.V1LeaseSpec(
            holder_identity=record.holder or None,
            lease_duration_seconds=record.seconds,
            lease_transitions=record.transitions,
            renew_time=record.renewed,
        )
        body = client.V1Lease(metadata=meta, spec=spec)
        if not record.version:
            return _lease(await _made(self._leases.create_namespaced_lease(self.namespace, body, **_TIME)))
        meta.resource_version = record.version
        call = self._leases.replace_namespaced_lease(name, self.namespace, body, **_TIME)
        return _lease(await _made(call))


@asynccontextmanager
async def connected(
    url: str | None = None, namespace: str | None = None, ca_file: Path | None = None
) -> AsyncIterator[Cluster]:
    """The cluster at `url`, with a certificate from the authorities in `ca_file`, where it is https; without an
    address the cluster that this process runs in, else the kubeconfig's.

    ClusterError when there is neither, or no namespace is known.
    """
    settings = client.Configuration()
    if url is not None:
        settings.host = url
        settings.ssl_ca_cert = None if ca_file is None else str(ca_file)
    else:
        await _configure(settings)
    settings.retries = None  # whoever calls tries again, and says so
    async with client.ApiClient(settings) as api:
        yield Cluster(api, namespace or _own_namespace())


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


_TIME: dict[str, Any] = {"_request_timeout": CALL_SECONDS}


async def _made(call: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(CALL_SECONDS * 2):
            return await call
    except ApiException as error:
        status = int(error.status or 0)
        kind = _KINDS.get(status, ApiUnreachable if status >= 500 or not status else ClusterError)
        raise kind(f"{status} {error.reason}: {_message(error)}") from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ApiUnreachable(f"{type(error).__name__}: {error}") from error


def _message(error: ApiException) -> str:
    return str(error.body or "")[:500]


def _scale(found: Any) -> Scale:
    replicas = found.spec.replicas if found.spec is not None else 0
    return Scale(int(replicas or 0), str(found.metadata.resource_version))


def _lease(found: Any) -> LeaseRecord:
    spec = found.spec
    return LeaseRecord(
        holder=spec.holder_identity or "",
        renewed=spec.renew_time,
        seconds=spec.lease_duration_seconds or 0,
        transitions=spec.lease_transitions or 0,
        version=found.metadata.resource_version or "",
        notes=dict(found.metadata.annotations or {}),
    )
