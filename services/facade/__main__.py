"""Start the HTTP facade: `python -m services.facade --gateway HOST:PORT`."""

from __future__ import annotations

from prometheus_client import REGISTRY

from services.facade.app import FacadeProcess
from services.facade.config import FacadeConfig
from services.facade.text import leave_out_torch
from services.platform.service import Shutdown, run, serve


async def main(config: FacadeConfig, shutdown: Shutdown) -> None:
    """Serve until shutdown is requested; requests in progress get `shutdown_grace_seconds`."""
    await serve(FacadeProcess(config, REGISTRY), config, shutdown)


if __name__ == "__main__":
    leave_out_torch()
    run("facade", main, FacadeConfig)
