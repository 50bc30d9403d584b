"""Start the online learner: `python -m services.drafter --model DIR --folder DIR --redis-url URL`."""

from __future__ import annotations

from prometheus_client import REGISTRY

from services.drafter.config import DrafterConfig
from services.drafter.process import DrafterProcess
from services.platform.service import Shutdown, run, serve


async def main(config: DrafterConfig, shutdown: Shutdown) -> None:
    """Serve until shutdown is requested; a standby takes over at once."""
    await serve(DrafterProcess(config, REGISTRY, shutdown.metrics_port), config, shutdown)


if __name__ == "__main__":
    run("drafter", main, DrafterConfig)
