"""Starts the gateway: `python -m services.gateway --port 7400 --redis-url redis://...`"""

import asyncio

from prometheus_client import REGISTRY

from services.gateway.config import GatewayConfig
from services.gateway.gateway import Gateway
from services.gateway.tasks import end
from services.platform.process import Shutdown, run


async def main(config: GatewayConfig, shutdown: Shutdown) -> None:
    """Serves until asked to stop. A successor takes the lease at once and goes on from the journal."""
    gateway = Gateway(config, REGISTRY)
    await gateway.start()
    shutdown.ready(gateway.address)
    leading = asyncio.create_task(gateway.run(), name="gateway")
    stopping = asyncio.create_task(shutdown.wait(), name="shutdown")
    await asyncio.wait((leading, stopping), return_when=asyncio.FIRST_COMPLETED)
    failed = leading.done()
    await end((leading, stopping))
    await gateway.stop(0 if failed else config.shutdown_grace_seconds)
    if failed:
        leading.result()


if __name__ == "__main__":
    run("gateway", main, GatewayConfig)
