"""A small fake of the Kubernetes API, as strict as the real one about what scaling uses of it.

Pods, Leases, StatefulSets and their scale: resource versions and conflicts, statuses and their bodies, the format
of times. A StatefulSet's pods come and go at once, the highest ordinal first, as its controller would have it.
tests/integration/scaling/test_contract.py holds it and a real API server to the same behaviour.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, Self

from aiohttp import web

NAMESPACE = "paceline-test"
_MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}(Z|[+-]\d\d:\d\d)")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class KubernetesApi:
    """`async with KubernetesApi() as api:` serves at `api.url`."""

    def __init__(self) -> None:
        self.url = ""
        self.replicas: dict[str, int] = {}
        self.unready: set[str] = set()
        """Pods that are there and not ready."""
        self.pods: dict[str, bool] = {}
        """Pods that no StatefulSet made, and whether they are ready."""
        self.leases: dict[str, dict[str, Any]] = {}
        self.lease_reads = 0
        self.scaled: list[tuple[str, int]] = []
        """Every change of a scale: name and replicas."""
        self.managers: set[str] = set()
        """Field managers that callers have given with what they wrote."""
        self.faults: dict[tuple[str, str], int] = {}
        """(method, kind) -> status to answer with instead; kind is scale, pod or lease."""
        self.interference: Callable[[], None] | None = None
        """Run once, before the next change of a scale."""
        self._versions: dict[str, int] = {}
        self._version = 100
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application(middlewares=[self._faulty])
        apps, core, leases = (
            f"/apis/apps/v1/namespaces/{NAMESPACE}/statefulsets",
            f"/api/v1/namespaces/{NAMESPACE}/pods",
            f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases",
        )
        app.router.add_get(apps + "/{name}/scale", self._get_scale)
        app.router.add_put(apps + "/{name}/scale", self._put_scale)
        app.router.add_get(core + "/{name}", self._get_pod)
        app.router.add_post(leases, self._post_lease)
        app.router.add_get(leases + "/{name}", self._get_lease)
        app.router.add_put(leases + "/{name}", self._put_lease)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await self._listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shut()

    async def shut(self) -> None:
        """The API is gone."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def make_stateful_set(self, name: str, replicas: int) -> None:
        """A StatefulSet with its pods."""
        self.replicas[name] = replicas
        self._touch(f"sts/{name}")

    def make_pod(self, name: str, ready: bool) -> None:
        """A pod of no StatefulSet."""
        self.pods[name] = ready

    def scale_by_hand(self, name: str, replicas: int) -> None:
        """As `kubectl scale`."""
        self.replicas[name] = replicas
        self._touch(f"sts/{name}")

    async def _listen(self) -> None:
        assert self._runner is not None
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    @web.middleware
    async def _faulty(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        kind = next(
            (kind for kind in ("scale", "lease", "pod") if kind in request.path.rpartition(NAMESPACE)[2]), ""
        )
        if status := self.faults.get((request.method, kind)):
            return _status(
                status, {403: "Forbidden", 500: "InternalError"}.get(status, "Failure"), "as the test says"
            )
        if request.method != "GET":
            # Without a name the API takes that of the program, from its User-Agent.
            self.managers.add(request.query.get("fieldManager", request.headers["User-Agent"].split("/")[0]))
        return await handler(request)

    async def _get_scale(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self.replicas:
            return _missing("statefulsets.apps", name)
        return web.json_response(self._scale(name))

    async def _put_scale(self, request: web.Request) -> web.Response:
        name, body = request.match_info["name"], await request.json()
        if self.interference is not None:
            self.interference, interfere = None, self.interference
            interfere()
        if name not in self.replicas:
            return _missing("statefulsets.apps", name)
        version = body["metadata"].get("resourceVersion")
        if version and version != str(self._versions[f"sts/{name}"]):
            return _conflict("statefulsets.apps", name)
        if body["metadata"]["name"] != name or int(body["spec"].get("replicas", 0)) < 0:
            return _status(422, "Invalid", "the name differs, or replicas is negative")
        self.scale_by_hand(name, int(body["spec"].get("replicas", 0)))
        self.scaled.append((name, self.replicas[name]))
        answer = web.json_response(self._scale(name))
        # Its controller notes the change in the status, so that the version of the answer is no longer the last.
        self._touch(f"sts/{name}")
        return answer

    async def _get_pod(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        owner, _, number = name.rpartition("-")
        owned = number.isdecimal() and int(number) < self.replicas.get(owner, 0)
        if not owned and name not in self.pods:
            return _missing("pods", name)
        ready = name not in self.unready if owned else self.pods[name]
        conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
        status = {"phase": "Running", "conditions": conditions}
        meta = {"name": name, "namespace": NAMESPACE}
        spec = {"containers": [{"name": "c", "image": "i"}]}
        return web.json_response(
            {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec, "status": status}
        )

    async def _post_lease(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = body["metadata"]["name"]
        if name in self.leases:
            return _status(409, "AlreadyExists", f'leases.coordination.k8s.io "{name}" already exists')
        return self._store_lease(name, body, 201)

    async def _get_lease(self, request: web.Request) -> web.Response:
        self.lease_reads += 1
        name = request.match_info["name"]
        if name not in self.leases:
            return _missing("leases.coordination.k8s.io", name)
        return web.json_response(self.leases[name])

    async def _put_lease(self, request: web.Request) -> web.Response:
        name, body = request.match_info["name"], await request.json()
        if name not in self.leases:
            return _missing("leases.coordination.k8s.io", name)
        version = body["metadata"].get("resourceVersion")
        if not version:
            return _status(422, "Invalid", "metadata.resourceVersion: must be specified for an update")
        if version != self.leases[name]["metadata"]["resourceVersion"]:
            return _conflict("leases.coordination.k8s.io", name)
        return self._store_lease(name, body, 200)

    def _store_lease(self, name: str, body: dict[str, Any], status: int) -> web.Response:
        spec = body.get("spec", {})
        renewed = spec.get("renewTime")
        if renewed is not None and not _MICRO_TIME.fullmatch(renewed):
            return _status(400, "BadRequest", f"{renewed!r} is no MicroTime")
        if "leaseDurationSeconds" in spec and spec["leaseDurationSeconds"] <= 0:
            return _status(422, "Invalid", "spec.leaseDurationSeconds: must be greater than 0")
        if spec.get("leaseTransitions", 0) < 0:
            return _status(422, "Invalid", "spec.leaseTransitions: must be greater than or equal to 0")
        meta = {
            **body["metadata"],
            "namespace": NAMESPACE,
            "resourceVersion": str(self._touch(f"lease/{name}")),
        }
        self.leases[name] = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {key: value for key, value in meta.items() if value},
            "spec": {key: value for key, value in spec.items() if value is not None},
        }
        return web.json_response(self.leases[name], status=status)

    def _scale(self, name: str) -> dict[str, Any]:
        version = str(self._versions[f"sts/{name}"])
        meta = {"name": name, "namespace": NAMESPACE, "resourceVersion": version}
        # As the API has it, no replicas are no field.
        spec = {"replicas": self.replicas[name]} if self.replicas[name] else {}
        status = {"replicas": self.replicas[name], "selector": f"app={name}"}
        return {
            "apiVersion": "autoscaling/v1",
            "kind": "Scale",
            "metadata": meta,
            "spec": spec,
            "status": status,
        }

    def _touch(self, key: str) -> int:
        self._version += 1
        self._versions[key] = self._version
        return self._version


def _missing(kind: str, name: str) -> web.Response:
    return _status(404, "NotFound", f'{kind} "{name}" not found')


def _conflict(kind: str, name: str) -> web.Response:
    changed = "the object has been modified; please apply your changes to the latest version and try again"
    return _status(409, "Conflict", f'Operation cannot be fulfilled on {kind} "{name}": {changed}')


def _status(code: int, reason: str, message: str) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return web.json_response({**body, "code": code, "reason": reason, "message": message}, status=code)
