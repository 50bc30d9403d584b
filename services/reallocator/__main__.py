"""Start the reallocator: `python -m services.reallocator --redis-url URL`."""

from __future__ import annotations

from prometheus_client import REGISTRY

from services.platform.leading import LeadingServer
from services.platform.redis.connection import Keys
from services.platform.redis.decision_log import DecisionLog
from services.platform.redis.registry import Registry
from services.platform.service import Shutdown, run, serve
from services.reallocator.config import ReallocatorConfig
from services.reallocator.members import Rooflines
from services.reallocator.metrics import ReallocatorMetrics
from services.reallocator.planning.learned_costs import LearnedCosts, MoveCosts
from services.reallocator.reallocator import Reallocator


async def main(config: ReallocatorConfig, shutdown: Shutdown) -> None:
    """Serve until shutdown is requested, or until another process has registered under the same name."""
    rooflines, metrics = Rooflines(config), ReallocatorMetrics(REGISTRY)
    learned = LearnedCosts(MoveCosts(config.ways()))

    async def decide(_: int) -> Reallocator:
        return Reallocator(config, registry, decisions, metrics, rooflines, learned)

    server = LeadingServer(
        config,
        "reallocator",
        config.instance_id,
        title="reallocator",
        lease=f"{config.namespace}:{{reallocator}}:lease",
        open_term=decide,
        leader=metrics.leader,
        registry=REGISTRY,
        metrics_port=shutdown.metrics_port,
    )
    registry = Registry(server.redis, Keys(config.namespace))
    decisions = DecisionLog(server.redis, config.namespace)
    await serve(server, config, shutdown)


if __name__ == "__main__":
    run("reallocator", main, ReallocatorConfig)
