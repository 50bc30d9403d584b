"""Process of simulated instances: `python -m bench.fleet.host --first 0 --count 250 ...`, until it is killed."""

from __future__ import annotations

import argparse
import asyncio
from functools import partial

from bench.fleet.simulated_instance import EngineClock, ReplayingInstance
from bench.fleet.workload import MAX_TOKENS, Reporting, SimulatedPolicy
from services.platform.config import ServiceConfig
from services.platform.redis.connection import Keys, connect
from services.platform.redis.registry import Registration

CLIENT = "simulated-fleet"
"""Name of this process's connections to Redis, by which their traffic is told from the control plane's."""
_BEAT_SECONDS = 1.0
# The simulated fleet shares its cores with what is measured: a late heartbeat must not look like a lost instance.
_TTL = 20.0


def main() -> None:
    """Serve instances until killed."""
    asyncio.run(_serve(_arguments()))


async def _serve(given: argparse.Namespace) -> None:
    config = ServiceConfig(redis_url=f"{given.redis_url}?client_name={CLIENT}", log_level="warning")
    redis, keys = connect(config), Keys(config.namespace)
    mode = Reporting.stream if given.reporting == "stream" else Reporting.checkpoints
    clock = EngineClock(SimulatedPolicy.create(given.longest), mode(given.speed, given.compression))
    registrations = [
        await ReplayingInstance(f"instance-{number}", config, clock).start(
            partial(Registration, redis, keys, ttl=_TTL)
        )
        for number in range(given.first, given.first + given.count)
    ]
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(clock.run())
        tasks.create_task(_beat(registrations))


async def _beat(registrations: list[Registration]) -> None:
    """Send every instance's heartbeat once a second, one after the other over one connection."""
    loop = asyncio.get_running_loop()
    while True:
        began = loop.time()
        for each in registrations:
            await each.update()
        await asyncio.sleep(max(0.0, began + _BEAT_SECONDS - loop.time()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--reporting", choices=("checkpoints", "stream"), default="checkpoints")
    parser.add_argument("--speed", type=float, default=50.0)
    parser.add_argument("--compression", type=float, default=1.0)
    parser.add_argument("--longest", type=int, default=MAX_TOKENS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
