"""Build the facade: the ASGI application, and the process that serves it.

uvicorn, Ray Serve or any other ASGI server can run the application. `FacadeProcess` runs it with the facade's own
HTTP server, its workers and the port of probes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from importlib import metadata

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from paceline.errors import PacelineError
from services.contracts.errors import ServiceError
from services.facade.access import Access, Origins
from services.facade.config import FacadeConfig, GenerationDefaults
from services.facade.dialects.vllm import GENERATION_CONFIG, model_defaults
from services.facade.gateway import Forecasts, GatewayClient, ServedFleet, Updates
from services.facade.http_errors import HttpError, error_body, http_error, in_dialect, validation_error
from services.facade.metrics import FacadeMetrics
from services.facade.routes.paceline import health_routes, paceline_routes, server_routes
from services.facade.routes.sglang import sglang_routes
from services.facade.routes.vllm import tokens_routes, vllm_routes
from services.facade.sample_names import SampleNames
from services.facade.samples import SamplesInWork
from services.facade.server.connections import ConnectionLimits
from services.facade.server.http_server import HttpServer, most_connections
from services.facade.serving import Facade, JobRunner, names_in_body
from services.facade.text import FolderTokenizer, Tokenizer
from services.facade.work.pool import WorkerPool
from services.platform.config import ConfigError, listening_problems
from services.platform.grpc.server import advertised
from services.platform.observability.http_ports import ProbeServer
from services.platform.observability.metrics import rpc_metrics
from services.platform.security.guard import guard_of

log = structlog.get_logger(__name__)


def app(config: FacadeConfig, registry: CollectorRegistry, *, warm: bool = False) -> FastAPI:
    """Return the application; it connects to the gateway at the first request.

    ConfigError if the tokenizer, the tokens or the certificates cannot be read. The metrics are in `registry`.
    Unless `warm`, the workers start with the first job.
    """
    client = GatewayClient(config)
    pool = WorkerPool(
        config.model, config.workers, config.work_seconds, config.work_memory_bytes, config.max_waiting_work
    )
    if warm:
        pool.launch()
    facade = _facade(config, client, pool, FacadeMetrics(registry))
    made = FastAPI(
        title="Paceline",
        summary="Rollouts over HTTP, in the dialects of vLLM (OpenAI) and SGLang",
        version=metadata.version("paceline"),
        lifespan=_closing(client, pool, facade.forecasts),
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    made.state.samples, made.state.fleet, made.state.metrics = facade.samples, facade.fleet, facade.metrics
    made.state.workers = pool
    _add_routes(made, facade, registry)
    made.add_exception_handler(PacelineError, _failed)
    made.add_exception_handler(ServiceError, _failed)
    made.add_exception_handler(RequestValidationError, _invalid)
    made.add_exception_handler(HTTPException, _plain)
    _restrict(made, config, registry)
    return made


def _facade(config: FacadeConfig, client: GatewayClient, pool: WorkerPool, metrics: FacadeMetrics) -> Facade:
    """Return what the routes share."""
    tokenizer = _tokenizer(config)
    # Each of several facades sees only a part of a step, and numbers its own samples.
    remembered = config.forecast_prompts if config.alone else 0
    return Facade(
        config=config,
        client=client.current,
        fleet=ServedFleet(client.current, config.model_names),
        samples=SamplesInWork(
            client.current,
            config.max_concurrent_samples,
            config.max_request_seconds,
            metrics.samples_in_flight.set,
        ),
        tokenizer=tokenizer,
        metrics=metrics,
        names=SampleNames(alone=config.alone),
        forecasts=Forecasts(client.current, remembered, config.max_hinted_samples, metrics),
        jobs=JobRunner(tokenizer, pool),
        defaults=_defaults(config),
    )


def _add_routes(made: FastAPI, facade: Facade, registry: CollectorRegistry) -> None:
    updates = Updates(facade.client, facade.samples, facade.metrics, facade.fleet.published)
    made.include_router(health_routes(facade.fleet))
    made.include_router(server_routes(registry, made.openapi))
    made.include_router(vllm_routes(facade, updates))
    made.include_router(tokens_routes(facade))
    made.include_router(sglang_routes(facade, updates))
    made.include_router(paceline_routes(facade))


def _restrict(made: FastAPI, config: FacadeConfig, registry: CollectorRegistry) -> None:
    """Add the middleware that decides who may call."""
    made.add_middleware(Origins, config=config)
    guard = guard_of(config)
    if guard is not None:
        guard.warn_of_shared_runs()
    made.add_middleware(
        Access,  # type: ignore[arg-type]
        guard=guard,
        metrics=rpc_metrics(registry),
        most_bytes=config.max_message_bytes,
        anonymous=config.anonymous_scopes,
        alone=config.alone,
    )


def _tokenizer(config: FacadeConfig) -> Tokenizer | None:
    if config.model is None:
        return None
    try:
        return FolderTokenizer(config.model)
    except (OSError, ValueError) as error:
        raise ConfigError([f"model: {config.model} has no tokenizer that can be read: {error}"]) from error


def _defaults(config: FacadeConfig) -> dict[str, float]:
    """Return the sampling parameters for requests that leave them out; log the ones in the model's folder."""
    if config.model is None:
        return {}
    applied = config.generation_config is GenerationDefaults.AUTO
    try:
        found = model_defaults(config.model)
    except (OSError, ValueError) as error:
        if applied:
            raise ConfigError(
                [f"model: {GENERATION_CONFIG} in {config.model} cannot be used: {error}"]
            ) from error
        log.warning("generation_config_not_read", file=GENERATION_CONFIG, error=str(error))
        return {}
    if found:
        log.info("generation_config", applied=applied, **found)
    return found if applied else {}


def _closing(
    client: GatewayClient, pool: WorkerPool, forecasts: Forecasts
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await pool.stop()
        await forecasts.close()
        await client.close()

    return lifespan


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, PacelineError | ServiceError)
    return _answer(request, http_error(error, names_in_body(request)))


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _answer(request, validation_error(error.errors()))


async def _plain(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = error_body(str(error.detail), "invalid_request_error", param=None, code=str(error.status_code))
    return _answer(request, HttpError(error.status_code, body, dict(error.headers or {})))


def _answer(request: Request, found: HttpError) -> Response:
    found = in_dialect(request.url.path, found)
    return JSONResponse(found.body, status_code=found.status, headers=found.headers)


_IDLE_SECONDS = 75.0
"""Idle connections are kept longer than clients and proxies usually keep them, so that no request meets a closed
one."""


class FacadeProcess:
    """Content of the process: `start`, then `run` until it is cancelled, then `stop`."""

    def __init__(self, config: FacadeConfig, registry: CollectorRegistry, *, warm: bool = True) -> None:
        """ConfigError if the facade may not listen there, or cannot be built.

        Its workers start with it; unless it is `warm`, with the first work.
        """
        if problems := listening_problems(config):
            raise ConfigError(problems)
        self._config = config
        self._warm = warm
        self.application = app(config, registry, warm=warm)
        ended = self.application.state.metrics.connections_ended
        self._server = HttpServer(
            self.application, _limits(config), config.tls, ended=lambda reason: ended.labels(reason).inc()
        )
        problem = self.application.state.fleet.problem
        self._probes = ProbeServer(
            {
                "/readyz": partial(problem, needs_instance=False),
                "/health": partial(problem, needs_instance=True),
            }
        )

    @property
    def port(self) -> int:
        """Port of the server, once started."""
        return self._server.port

    @property
    def probe_port(self) -> int:
        """Port of probes, once started; 0 if there is none."""
        return self._probes.port

    @property
    def address(self) -> str:
        """ "host:port" as clients dial it, once started."""
        return f"{advertised(self._config)}:{self.port}"

    async def start(self) -> None:
        """Open the ports and serve. OSError if one is taken; WorkersFailed if workers cannot start."""
        config = self._config
        if self._warm:
            await self.application.state.workers.start()
        await self._server.start(config.host, config.port)
        if config.probe_port is not None:
            self._probes.start(config.host, config.probe_port)

    async def run(self) -> None:
        """Serve until cancelled."""
        await self._server.run()

    async def stop(self, grace: float) -> None:
        """Close the ports; requests in progress get `grace` seconds."""
        await self._server.stop(grace)
        await self._probes.stop()


def _limits(config: FacadeConfig) -> ConnectionLimits:
    total = most_connections(config.max_connections)
    each = config.max_connections_per_address
    return ConnectionLimits(
        total=total,
        # A trainer may open thousands; a quarter is left for others.
        each_address=max(1, total * 3 // 4) if each is None else each,
        header_seconds=config.header_seconds,
        idle_seconds=_IDLE_SECONDS,
        body_seconds=config.body_seconds,
        reader_seconds=config.reader_seconds,
    )
