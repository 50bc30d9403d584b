"""Serve the HTTP facade as a Ray Serve application, whose replicas follow the number of requests.

    serve run services.ray.serving:application gateway=HOST:7400 model=DIR max_replicas=8

Serve answers 500 to the requests of a replica that dies. Nothing on the way can send them again, because Ray's own
proxy may die as well, so clients must retry. A retry with the same `seed` returns the same samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from fastapi import FastAPI
from prometheus_client import REGISTRY
from pydantic import Field, ValidationError, model_validator
from ray import serve

from services.facade.app import app
from services.facade.config import FacadeConfig
from services.platform.config import ConfigError

DEPLOYMENT = "facade"
"""Name of the deployment in the application."""


class ServedFacadeConfig(FacadeConfig):
    """Settings of the facade and of its replicas. Ray's own settings, not `host`, say where its proxies listen."""

    alone: bool = False
    min_replicas: int = Field(default=1, ge=1)
    """Fewest replicas."""
    max_replicas: int = Field(default=1, ge=1)
    """Most replicas."""
    requests_per_replica: float = Field(default=256.0, gt=0, allow_inf_nan=False)
    """Target of running requests per replica: Serve adds replicas above it and removes some below."""
    cpus_per_replica: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """CPUs that Ray sets aside for a replica."""

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas: must be at least min_replicas, {self.min_replicas}")
        if self.token is None and self.tokens_file is None and not self.insecure:
            raise ValueError(
                "token: Ray's proxies may be reachable by anyone; set token or tokens_file, or insecure"
            )
        if self.alone and self.max_replicas > 1:
            raise ValueError("alone: cannot be with max_replicas above 1, since callers reach any replica")
        return self


def application(arguments: Mapping[str, Any]) -> serve.Application:
    """Return the application for arguments that are settings of `ServedFacadeConfig`.

    ConfigError names each setting at fault.
    """
    config = _config(arguments)

    def replica() -> Any:
        return _application_of(arguments)

    deployed = serve.deployment(
        name=DEPLOYMENT,
        autoscaling_config={
            "min_replicas": config.min_replicas,
            "max_replicas": config.max_replicas,
            "target_ongoing_requests": config.requests_per_replica,
        },
        max_ongoing_requests=config.max_connections,
        # A replica that is being removed takes no new requests, and finishes its own within this time.
        graceful_shutdown_timeout_s=config.max_request_seconds,
        ray_actor_options={"num_cpus": config.cpus_per_replica},
    )(serve.ingress(replica)())
    bound: serve.Application = deployed.bind()
    return bound


def _application_of(arguments: Mapping[str, Any]) -> FastAPI:
    # Read in the replica: Ray stores the arguments of replicas, and a token in a file must stay on its node.
    return app(_config(arguments), REGISTRY)


def _config(arguments: Mapping[str, Any]) -> ServedFacadeConfig:
    try:
        return ServedFacadeConfig(**arguments)
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise ConfigError(problems) from None
