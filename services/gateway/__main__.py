"""Starts the gateway: `python -m services.gateway --port 7400 --redis-url redis://...`"""

from prometheus_client import REGISTRY

from services.gateway.config import GatewayConfig
from services.gateway.gateway import Gateway
from services.platform.process import Shutdown, run, serve


async def main(config: GatewayConfig, shutdown: Shutdown) -> None:
    """Serves until asked to stop. A successor takes the lease at once and goes on from the journal."""
    await serve(Gateway(config, REGISTRY), config, shutdown)


if __name__ == "__main__":
    run("gateway", main, GatewayConfig)
