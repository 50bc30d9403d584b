"""The drafter service with the learner of tests.support.fake_learner, as a process to be killed.

`python -m tests.support.fake_learner_service --model ... --folder ... --redis-url ...`"""

from __future__ import annotations

import asyncio

from prometheus_client import REGISTRY

from services.drafter.config import DrafterConfig
from services.drafter.process import DrafterProcess
from services.platform.service import Shutdown, run
from services.platform.tasks import end
from tests.support.fake_learner import FACTORY


async def main(config: DrafterConfig, shutdown: Shutdown) -> None:
    process = DrafterProcess(config, REGISTRY, shutdown.metrics_port, FACTORY)
    await process.start()
    shutdown.ready(process.server.address)
    working = asyncio.create_task(process.run())
    stopping = asyncio.create_task(shutdown.wait())
    await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
    await end((working, stopping))
    await process.stop(1)


if __name__ == "__main__":
    run("drafter", main, DrafterConfig)
