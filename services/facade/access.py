"""Refuse HTTP requests that may not be served, before their bodies are read.

`Access` checks tokens, scopes and sizes, and counts every request, as the interceptor does for RPCs. `Origins`
keeps web pages out where no token does.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Mapping
from fnmatch import fnmatchcase
from ipaddress import ip_address

import structlog
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.tokens import TokenScope
from paceline.transport.channel import is_loopback
from services.contracts.errors import ServiceError, Unimplemented
from services.facade.config import FacadeConfig
from services.facade.http_errors import HttpError, error_body, fault, http_error, in_dialect
from services.platform.observability.metrics import RpcMetrics
from services.platform.security.caller import act_for
from services.platform.security.guard import SCRAPE, Guard, scopes_for

log = structlog.get_logger(__name__)

GENERATE = "paceline.v1.RolloutService/Generate"
HINT = "paceline.v1.RolloutService/HintNextBatch"
REWARDS = "paceline.v1.RolloutService/ReportRewards"
READ = "paceline.v1.FleetService/ListInstances"
UPDATE = "paceline.v1.WeightService/StartUpdate"

UPDATE_PATHS = (
    "/continue_generation",
    "/flush_cache",
    "/pause",
    "/pause_generation",
    "/reset_prefix_cache",
    "/resume",
    "/update_weights",
    "/update_weights_from_disk",
)
"""Paths that belong to a weight update."""
ABSENT = (
    "/destroy_weights_update_group",
    "/finish_weight_update",
    "/init_broadcaster",
    "/init_weight_transfer_engine",
    "/init_weights_update_group",
    "/load_lora_adapter",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/sleep",
    "/start_weight_update",
    "/update_weights_from_distributed",
    "/update_weights_from_tensor",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/wake_up",
)
"""Paths of the dialects that are answered 501: weights are pushed by folders, and devices are not shared."""
OF_ONE_FACADE = frozenset(
    {
        "/abort_request",
        "/abort_requests",
        "/continue_generation",
        "/flush_cache",
        "/inference/v1/abort_requests",
        "/is_paused",
        "/pause",
        "/pause_generation",
        "/resume",
        "/v1/loads",
    }
)
"""Paths that concern the running requests of one facade."""
OPEN = frozenset(
    {"/health", "/health/", "/health_generate", "/livez", "/readyz", "/docs", "/openapi.json", "/version"}
)
"""Paths without access control: probes have no token; version and API page reveal nothing of a deployment."""
METHODS: dict[str, str] = {
    "/metrics": SCRAPE,
    "/v1/models": READ,
    "/v1/completions": GENERATE,
    "/v1/chat/completions": GENERATE,
    "/generate/": GENERATE,
    "/get_world_size": READ,
    "/get_world_size/": READ,
    "/generate": GENERATE,
    "/abort_request": GENERATE,
    "/abort_requests": GENERATE,
    "/detokenize": READ,
    "/finish_session": GENERATE,
    "/inference/v1/abort_requests": GENERATE,
    "/inference/v1/generate": GENERATE,
    "/tokenize": READ,
    "/server_info": READ,
    "/get_server_info": READ,
    "/model_info": READ,
    "/get_model_info": READ,
    "/get_weight_version": READ,
    "/v1/loads": READ,
    "/is_paused": READ,
    "/paceline/v1/hint": HINT,
    "/paceline/v1/rewards": REWARDS,
    **dict.fromkeys(UPDATE_PATHS, UPDATE),
    **dict.fromkeys(ABSENT, UPDATE),
}
"""Method of the gateway behind each path."""

_SAFE_ID = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
_CODES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    409: "FAILED_PRECONDITION",
    411: "INVALID_ARGUMENT",
    413: "INVALID_ARGUMENT",
    421: "PERMISSION_DENIED",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_AUTHORITY = re.compile(r"(?P<host>[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(:(?P<port>[0-9]{1,5})?)?")
_CROSS = "{} is another origin than this server, and no token was sent; pages of others may not call it"
_PORTS = {"http": 80, "https": 443}
_NO_OTHER_PAGE = ("same-origin", "none")
"""Values of sec-fetch-site for requests that no page of another origin has caused."""


class Access:
    """ASGI middleware that checks tokens, scopes and sizes of requests, and counts them.

    A path needs the scope of the gateway's method behind it. A path that is not listed needs the scope
    `internal`, so a new one is closed by default.
    """

    def __init__(
        self,
        app: ASGIApp,
        guard: Guard | None,
        metrics: RpcMetrics,
        most_bytes: int,
        anonymous: frozenset[TokenScope] = frozenset(),
        alone: bool = True,
    ) -> None:
        self._app = app
        self._guard = guard
        self._metrics = metrics
        self._most_bytes = most_bytes
        self._anonymous = anonymous
        self._alone = alone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        request_id = headers.get("x-request-id", "")
        if not _SAFE_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        path = str(scope["path"])
        known = path in METHODS or path in OPEN
        labels = ("facade", f"{scope['method']} {path}" if known else "other")
        status, begun = 499, False
        structlog.contextvars.bind_contextvars(request_id=request_id, rpc=labels[1])

        async def answer(message: Message) -> None:
            nonlocal status, begun
            begun = True
            if message["type"] == "http.response.start":
                status = message["status"]
                message.setdefault("headers", []).append((b"x-request-id", request_id.encode()))
            await send(message)

        began = time.perf_counter()
        self._metrics.in_flight.labels(*labels).inc()
        try:
            refused = self._refused(path, headers)
            if refused is None:
                try:
                    await self._app(scope, receive, answer)
                except Exception:
                    log.exception("request_failed")
                    if begun:
                        raise  # Cuts the connection, because the answer that was sent is incomplete.
                    refused = fault()
            if refused is not None:
                found = in_dialect(path, refused)
                response = JSONResponse(found.body, status_code=found.status, headers=found.headers)
                await response(scope, receive, answer)
        finally:
            self._metrics.in_flight.labels(*labels).dec()
            code = "OK" if status < 400 else _CODES.get(status, "INTERNAL")
            self._metrics.requests.labels(*labels, code).inc()
            self._metrics.seconds.labels(*labels).observe(time.perf_counter() - began)
            structlog.contextvars.clear_contextvars()

    def _refused(self, path: str, headers: Mapping[str, str]) -> HttpError | None:
        """Return the answer to a refused request; None: it may continue."""
        # Clears the caller of an earlier request on this connection.
        act_for(None)
        try:
            self._admit(path, headers)
            if path in OF_ONE_FACADE and not self._alone:
                message = (
                    f"{path} is about the requests of one facade, and this is one of several: run one alone"
                )
                raise Unimplemented(path, message)
        except ServiceError as refusal:
            self._metrics.count_refusal("facade", refusal)
            return http_error(refusal)
        if "chunked" in headers.get("transfer-encoding", "").lower():
            body = error_body(
                "send the length of the body", "invalid_request_error", param=None, code="LENGTH_REQUIRED"
            )
            return HttpError(411, body, {})
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._most_bytes:
            message = f"the body has {length} bytes; the most is {self._most_bytes}"
            return HttpError(
                413, error_body(message, "invalid_request_error", param=None, code="BODY_TOO_LONG"), {}
            )
        return None

    def _admit(self, path: str, headers: Mapping[str, str]) -> None:
        if self._guard is None or path in OPEN:
            return
        method = METHODS.get(path, path)
        authorization = headers.get("authorization", "")
        if not authorization and scopes_for(method) & self._anonymous:
            return
        self._guard.admit(method, authorization)


class Origins:
    """ASGI middleware that refuses requests without a token under unknown names, or from pages of other origins.

    A page can send requests with its visitor's browser, and can read the answers once its name resolves to this
    host (DNS rebinding), but it can neither choose the header Host nor hide its origin.
    """

    def __init__(self, app: ASGIApp, config: FacadeConfig) -> None:
        self._app = app
        self._tokens = config.token is not None or config.tokens_file is not None
        self._anonymous = bool(config.anonymous_scopes)
        # With TLS the certificate has the names, and a browser accepts no other.
        self._any_host = config.tls is not None
        self._here = is_loopback(config.host)
        own = {config.host, config.advertise_host or config.host}
        self._names = {each.strip("[]").lower() for each in own | set(config.allowed_hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or refuse it."""
        if scope["type"] == "http" and scope["path"] not in OPEN:
            headers = Headers(scope=scope)
            if not self._needs_token(headers) and (found := self._refused(headers)) is not None:
                found = in_dialect(scope["path"], found)
                await JSONResponse(found.body, status_code=found.status)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _needs_token(self, headers: Headers) -> bool:
        return self._tokens and ("authorization" in headers or not self._anonymous)

    def _refused(self, headers: Headers) -> HttpError | None:
        named = headers.getlist("host")
        host, port = _read(named[0]) if len(named) == 1 else (None, None)
        if not self._any_host and not self._known(host):
            message = (
                f"host: {', '.join(named)[:256]!r} is not a name of this server, and no token was sent; send one, "
                "dial a loopback address, or add the name to the setting allowed_hosts"
            )
            return _error(421, message, "UNKNOWN_HOST")
        for origin in headers.getlist("origin"):
            scheme, _, rest = origin.partition("://")
            usual = _PORTS.get(scheme)
            if usual is None or host is None or _read(rest, usual) != (host, port or usual):
                return _error(403, _CROSS.format(f"origin: {origin[:256]!r}"), "CROSS_ORIGIN")
        for site in headers.getlist("sec-fetch-site"):
            if site not in _NO_OTHER_PAGE:
                return _error(403, _CROSS.format(f"sec-fetch-site: {site[:256]!r}"), "CROSS_ORIGIN")
        return None

    def _known(self, host: str | None) -> bool:
        if host is None:
            return False
        if is_loopback(host) or any(fnmatchcase(host, name) for name in self._names):
            return True
        # A client that dials an IP address was led here by no name. On loopback, only loopback addresses count.
        return not self._here and _is_number(host)


def _read(authority: str, usual_port: int | None = None) -> tuple[str | None, int | None]:
    """Return the host, in lower case and without brackets, and the port; (None, None) for an invalid authority."""
    found = _AUTHORITY.fullmatch(authority)
    if found is None:
        return None, None
    return found["host"].strip("[]").removesuffix(".").lower(), int(found["port"] or usual_port or 0) or None


def _is_number(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _error(status: int, message: str, code: str) -> HttpError:
    return HttpError(status, error_body(message, "permission_error", param=None, code=code), {})
