"""Start the policy service: `python -m services.policy --redis-url URL`."""

from __future__ import annotations

from prometheus_client import REGISTRY

from services.platform.service import Shutdown, run, serve
from services.policy.config import PolicyConfig
from services.policy.process import PolicyProcess


async def main(config: PolicyConfig, shutdown: Shutdown) -> None:
    """Serve until shutdown is requested; a standby takes over at once."""
    await serve(PolicyProcess(config, REGISTRY, shutdown.metrics_port), config, shutdown)


if __name__ == "__main__":
    run("policy", main, PolicyConfig)
