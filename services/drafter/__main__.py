"""Starts the online learner: `python -m services.drafter --model DIR --folder DIR --redis-url URL`."""

from __future__ import annotations

import asyncio

from prometheus_client import REGISTRY

from services.drafter.config import DrafterConfig
from services.drafter.process import DrafterProcess
from services.gateway.tasks import end
from services.platform.process import Shutdown, run


async def main(config: DrafterConfig, shutdown: Shutdown) -> None:
    """Serves until asked to stop. A standby takes over at once."""
    process = DrafterProcess(config, REGISTRY, shutdown.metrics_port)
    await process.start()
    shutdown.ready(process.server.address)
    working = asyncio.create_task(process.run(), name="drafter")
    stopping = asyncio.create_task(shutdown.wait(), name="shutdown")
    await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
    failed = working.done()
    await end((working, stopping))
    await process.stop(0 if failed else config.shutdown_grace_seconds)
    if failed:
        working.result()


if __name__ == "__main__":
    run("drafter", main, DrafterConfig)
