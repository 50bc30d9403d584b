"""The facade's process: its workers, its HTTP server, and the port of probes."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry

from services.facade.app import app
from services.facade.config import FacadeConfig
from services.facade.server.connections import ConnectionLimits
from services.facade.server.http_server import HttpServer
from services.facade.server.listener import most_connections
from services.platform.config.settings import listening_problems
from services.platform.config.sources import ConfigError
from services.platform.grpc.server import advertised
from services.platform.observability.probes import ProbeServer

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
