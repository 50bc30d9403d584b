"""Start the processes of the fleet benchmark and measure them: a gateway, its Redis, and simulated instances."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from redis import Redis

from bench.fleet.simulated_instance import CLIENT
from bench.scrape import Metrics, metrics_at
from services.platform.launching import ProcessEndpoint, read_ready_file, tied
from services.platform.redis.embedded import EmbeddedRedis

_START_SECONDS = 60.0
_TURNS_SHOWN = 3
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources that the control plane has used since its processes began: processor seconds, and Redis traffic.

    `redis_bytes` are the bytes that the control plane sent to Redis, without traffic of simulated instances.
    """

    gateway_seconds: float
    redis_seconds: float
    redis_bytes: int

    def since(self, before: Usage) -> Usage:
        """Return the increase since an earlier reading."""
        return Usage(
            self.gateway_seconds - before.gateway_seconds,
            self.redis_seconds - before.redis_seconds,
            self.redis_bytes - before.redis_bytes,
        )


class ControlPlane:
    """A gateway with a dedicated Redis and hosts of simulated instances, in `folder`.

    Use it as a context manager; `start` returns when all instances serve.
    """

    def __init__(self, folder: Path, gateway_options: Sequence[str] = ()) -> None:
        self._folder = folder
        self._options = gateway_options
        self._server = EmbeddedRedis(folder / "redis")
        self._children: list[subprocess.Popen[bytes]] = []
        self._redis: Any = None
        self.gateway: ProcessEndpoint

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._redis = Redis.from_url(self._server.start())
        self._redis.flushall()
        return self

    def __exit__(self, *_: object) -> None:
        for child in reversed(self._children):
            child.kill()
            child.wait()
        # Its data is not needed any more, so it need not write it.
        self._redis.close()
        self._server.kill()

    async def start(self, instances: range, hosts: int, host_options: Sequence[str] = ()) -> None:
        """Start the gateway and the instances with these numbers. TimeoutError if not all serve in time."""
        ready_file = self._folder / "gateway.ready.json"
        ready_file.unlink(missing_ok=True)
        url = f"--redis-url={self._server.url}"
        flags = (url, "--port=0", f"--ready-file={ready_file}", *self._options)
        gateway = self._spawn("gateway", "services.gateway", flags)
        async with asyncio.timeout(_START_SECONDS):
            while (found := read_ready_file(ready_file)) is None:
                await self._pause(gateway)
        self.gateway = found
        bounds = [len(instances) * number // hosts for number in range(hosts + 1)]
        for number, (first, end) in enumerate(itertools.pairwise(bounds)):
            share = (url, f"--first={instances[first]}", f"--count={end - first}", *host_options)
            self._spawn(f"host-{number}", "bench.fleet.simulated_instance", share)
        async with asyncio.timeout(_START_SECONDS + len(instances) / 4):
            while await asyncio.to_thread(self.serving) < len(instances):
                await self._pause(gateway)

    def metrics(self) -> Metrics:
        """Return the metrics of the gateway."""
        return metrics_at(self.gateway.metrics_port, None)

    def serving(self) -> int:
        """Return the number of instances that the gateway can place samples on."""
        return int(self.metrics()['paceline_gateway_instances{state="serving"}'])

    def usage(self) -> Usage:
        """Return the resources that gateway and Redis have used so far."""
        theirs = sum(
            int(client["tot-net-in"]) for client in self._redis.client_list() if client["name"] == CLIENT
        )
        total = int(self._redis.info("stats")["total_net_input_bytes"])
        assert self._server.pid is not None
        seconds = (_processor_seconds(self.gateway.pid), _processor_seconds(self._server.pid))
        return Usage(*seconds, total - theirs)

    def peak_memory(self) -> int:
        """Return the peak memory of the gateway in bytes."""
        status = Path(f"/proc/{self.gateway.pid}/status").read_text()
        (line,) = (each for each in status.splitlines() if each.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    def leases_lost(self) -> int:
        """Return how often the gateway lost its lease, by its log."""
        return len(self._logged("lease_lost")) + len(self._logged("fenced"))

    def longest_turns(self) -> list[dict[str, Any]]:
        """Return the work in the gateway's long turns, longest first, by its log."""
        shown = ("timestamp", "cpu_ms", "wall_ms", "collection_ms", "callbacks", "calls")
        turns = sorted(self._logged("long_turn"), key=lambda line: -line["cpu_ms"])
        return [{name: turn[name] for name in shown} for turn in turns[:_TURNS_SHOWN]]

    def _logged(self, event: str) -> list[dict[str, Any]]:
        log = (self._folder / "gateway.log").read_text()
        lines = (json.loads(line) for line in log.splitlines() if f'"{event}"' in line)
        return [line for line in lines if line.get("event") == event]

    async def _pause(self, gateway: subprocess.Popen[bytes]) -> None:
        if gateway.poll() is not None:
            raise RuntimeError(f"the gateway ended; see {self._folder / 'gateway.log'}")
        await asyncio.sleep(0.25)

    def _spawn(self, name: str, module: str, flags: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("wb") as log:
            command = tied([sys.executable, "-m", module, *flags])
            child = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self._children.append(child)
        return child


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
