"""Client of the part of the Kubernetes API that scaling needs, with typed errors.

No other module of scaling imports the `kubernetes` package.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
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

CALL_SECONDS = 5.0
"""Deadline of one call."""
FIELD_MANAGER = "paceline-policy"
"""Name under which the API records which fields this service has written."""

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_ERRORS: dict[int, type[ClusterError]] = {
    401: ApiForbidden,
    403: ApiForbidden,
    404: ApiNotFound,
    409: ApiConflict,
    408: ApiUnreachable,
    429: ApiUnreachable,
}


@dataclass(frozen=True, slots=True)
class Scale:
    """Desired replicas of a StatefulSet, and the version of the object that they were read from."""

    replicas: int
    version: str


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """A coordination.k8s.io Lease; `version` is empty while it does not exist."""

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
    """Connect to the cluster at `url`, or to that of this pod, or else of the kubeconfig.

    `ca_file` holds the authorities that the certificate of an https `url` must come from. ClusterError if no
    cluster is configured or the namespace is unknown.
    """
    settings = client.Configuration()
    settings.retries = None  # the callers try again, and report it
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
        kind = _ERRORS.get(status, ApiUnreachable if status >= 500 or not status else ClusterError)
        raise kind(f"{status} {error.reason}: {str(error.body or '')[:500]}") from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ApiUnreachable(f"{type(error).__name__}: {error}") from error


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
