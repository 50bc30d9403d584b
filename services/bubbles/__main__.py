"""Start the bubble coordinator: `python -m services.bubbles --redis-url URL`."""

from __future__ import annotations

from functools import partial

from prometheus_client import REGISTRY

from paceline.internal.v1 import bubble_pb2_grpc as rpc
from services.bubbles.config import BubblesConfig
from services.bubbles.service import BubbleMetrics, BubbleService
from services.platform.redis.connection import Keys
from services.platform.redis.decision_log import DecisionLog
from services.platform.redis.registry import Registry
from services.platform.service import RegisteredServer, Shutdown, run, serve


async def main(config: BubblesConfig, shutdown: Shutdown) -> None:
    """Serve until shutdown, or until another process has registered under the same name."""
    server = RegisteredServer(config, "bubbles", config.instance_id, metrics_port=shutdown.metrics_port)
    decisions = DecisionLog(server.redis, config.namespace)
    service = BubbleService(config, BubbleMetrics(REGISTRY), decisions.post)
    rpc.add_BubbleServiceServicer_to_server(service, server.server.server)
    registry = Registry(server.redis, Keys(config.namespace))
    server.work += [service.run, decisions.run, partial(service.watch_instances, registry)]
    await serve(server, config, shutdown)


if __name__ == "__main__":
    run("bubbles", main, BubblesConfig)
