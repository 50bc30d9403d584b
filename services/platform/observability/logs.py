"""Write the logs of a process and its libraries as JSON lines to stdout."""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.typing import EventDict, Processor

from services.platform.config import ServiceConfig


def configure_logging(service: str, config: ServiceConfig) -> None:
    """Send every log line of this process to stdout in `config.log_format`, marked with `service`."""

    def add_service(_logger: object, _method: str, event: EventDict) -> EventDict:
        event.setdefault("service", service)
        return event

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        add_service,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderers(config)],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.log_level.upper())
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def _renderers(config: ServiceConfig) -> list[Processor]:
    if config.log_format == "console":
        # The default traceback shows local variables, and with them secrets.
        plain = structlog.dev.plain_traceback
        return [structlog.dev.ConsoleRenderer(sys.stdout.isatty(), exception_formatter=plain)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
