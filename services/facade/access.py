"""Check and count every HTTP request before its body is read, as the interceptor does with every RPC.

A request needs the scope of the gateway's method that stands behind its path. Paths that are not listed here need
the scope `internal`, so that a new one is closed by default.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Mapping

import structlog
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.tokens import TokenScope
from services.contracts.errors import ServiceError, Unimplemented
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
"""Paths of a weight update."""
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
"""Paths of the dialects that are answered 501: weights go by folders, and devices are not lent."""
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
"""Paths that are about the requests in work of one facade."""
OPEN = frozenset(
    {"/health", "/health/", "/health_generate", "/livez", "/readyz", "/docs", "/openapi.json", "/version"}
)
"""Paths that anybody may read: probes have no token; version and page of the API say nothing of a deployment."""
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
"""The gateway's method behind each path."""

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


class Access:
    """ASGI middleware: who may call what, how large a body may be, and what is counted of it."""

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
                        raise  # The connection is cut: what has been sent is no whole answer.
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
        """Return the answer to a request that is refused; None: it may go on."""
        # Whatever served this connection before: from here on nothing is done for another caller.
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
