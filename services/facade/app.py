"""The facade as an ASGI application, for uvicorn or whatever else serves one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib import metadata

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from paceline.errors import PacelineError
from services.contracts.errors import ServiceError
from services.facade.access import Access
from services.facade.config import FacadeConfig, GenerationDefaults
from services.facade.dialects.defaults import FILE, model_defaults
from services.facade.fleet import ServedFleet
from services.facade.forecasts import Forecasts
from services.facade.gateway_client import GatewayClient
from services.facade.http_errors import HttpError, error_body, http_error, in_dialect, validation_error
from services.facade.metrics import FacadeMetrics
from services.facade.names import SampleNames
from services.facade.origins import Origins
from services.facade.routes.health import health_routes
from services.facade.routes.paceline import paceline_routes
from services.facade.routes.server import server_routes
from services.facade.routes.sglang import sglang_routes
from services.facade.routes.tokens import tokens_routes
from services.facade.routes.vllm import vllm_routes
from services.facade.samples import SamplesInWork
from services.facade.serving import Facade, names_in_body
from services.facade.text import FolderTokenizer, Tokenizer
from services.facade.updates import Updates
from services.facade.work.desk import Desk
from services.facade.work.pool import WorkerPool
from services.platform.config.sources import ConfigError
from services.platform.observability.metrics import rpc_metrics
from services.platform.security.guard import guard_of

log = structlog.get_logger(__name__)


def app(config: FacadeConfig, registry: CollectorRegistry, *, warm: bool = False) -> FastAPI:
    """Return the application; it connects to the gateway at the first request.

    ConfigError if the tokenizer, the tokens or the certificates cannot be read. The metrics are in `registry`.
    Unless `warm`, the workers start with the first work.
    """
    client, metrics = GatewayClient(config), FacadeMetrics(registry)
    pool = WorkerPool(
        config.model, config.workers, config.work_seconds, config.work_memory_bytes, config.max_waiting_work
    )
    if warm:
        pool.launch()
    tokenizer = _tokenizer(config)
    # Each of several facades sees a part of a step only, and numbers its own samples.
    remembered = config.forecast_prompts if config.alone else 0
    forecasts = Forecasts(client.current, remembered, config.max_hinted_samples, metrics)
    facade = Facade(
        config=config,
        client=client.current,
        fleet=ServedFleet(client.current, config.served_model_name),
        samples=SamplesInWork(
            client.current,
            config.max_concurrent_samples,
            config.max_request_seconds,
            metrics.samples_in_flight.set,
        ),
        tokenizer=tokenizer,
        metrics=metrics,
        names=SampleNames(alone=config.alone),
        forecasts=forecasts,
        desk=Desk(tokenizer, pool),
        defaults=_defaults(config),
    )
    made = FastAPI(
        title="Paceline",
        summary="Rollouts over HTTP, in the dialects of vLLM (OpenAI) and SGLang",
        version=metadata.version("paceline"),
        lifespan=_closing(client, pool, forecasts),
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    made.state.samples, made.state.fleet, made.state.metrics = facade.samples, facade.fleet, metrics
    made.state.workers = pool
    updates = Updates(client.current, facade.samples, metrics, facade.fleet.published)
    made.include_router(health_routes(facade.fleet))
    made.include_router(server_routes(registry, made.openapi))
    made.include_router(vllm_routes(facade, updates))
    made.include_router(tokens_routes(facade))
    made.include_router(sglang_routes(facade, updates))
    made.include_router(paceline_routes(facade))
    made.add_exception_handler(PacelineError, _failed)
    made.add_exception_handler(ServiceError, _failed)
    made.add_exception_handler(RequestValidationError, _invalid)
    made.add_exception_handler(HTTPException, _plain)
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
    return made


def _tokenizer(config: FacadeConfig) -> Tokenizer | None:
    if config.model is None:
        return None
    try:
        return FolderTokenizer(config.model)
    except (OSError, ValueError) as error:
        raise ConfigError([f"model: {config.model} has no tokenizer that can be read: {error}"]) from error


def _defaults(config: FacadeConfig) -> dict[str, float]:
    """Return the sampling parameters for requests that name none; tell of those in the model's folder."""
    if config.model is None:
        return {}
    applied = config.generation_config is GenerationDefaults.AUTO
    try:
        found = model_defaults(config.model)
    except (OSError, ValueError) as error:
        if applied:
            raise ConfigError([f"model: {FILE} in {config.model} cannot be used: {error}"]) from error
        log.warning("generation_config_not_read", file=FILE, error=str(error))
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
