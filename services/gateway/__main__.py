"""Start a gateway: `python -m services.gateway --port 7400 --redis-url URL`."""

import gc

from prometheus_client import REGISTRY

from services.gateway.config import GatewayConfig
from services.gateway.gateway import Gateway
from services.platform.service import Shutdown, run, serve


async def main(config: GatewayConfig, shutdown: Shutdown) -> None:
    """Serve until asked to stop; a successor takes the lease at once and resumes from the journal."""
    gateway = Gateway(config, REGISTRY)
    # Modules and classes live until the end, so garbage collection need not scan them.
    gc.freeze()
    await serve(gateway, config, shutdown)


if __name__ == "__main__":
    run("gateway", main, GatewayConfig)
