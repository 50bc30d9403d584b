"""What is seen of a platform from outside: whether it is healthy, what is left of it, and why it hangs."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.local import Platform
from services.local.child import Child, readable_tail
from services.platform.grpc.server import LEADER, LIVENESS

_CALL = 5.0
_POLL_SECONDS = 0.1
_STACK_SECONDS = 10.0
_LINES = 80


def wait_healthy(platform: Platform, seconds: float) -> None:
    """Wait until every process takes calls, no other is left, one gateway leads and all instances serve.

    AssertionError with the logs of those that do not, `seconds` later.
    """
    deadline = time.monotonic() + seconds
    while ill := list(_ill(platform)):
        assert time.monotonic() < deadline, f"not healthy: {', '.join(ill)}\n{logs(platform)}"
        time.sleep(_POLL_SECONDS)
    platform.wait_serving(platform.config.instances, deadline)


def _ill(platform: Platform) -> Iterator[str]:
    """What is not as it should be."""
    for child in platform.processes:
        if child not in platform.gateways and not serves(child):
            yield child.spec.name
    leading = [child.spec.name for child in platform.gateways if serves(child, LEADER)]
    if len(leading) != 1:
        yield f"{len(leading)} gateways lead"
    for child in platform.gateways:
        if not (serves(child, LIVENESS) and serves(child)):
            yield child.spec.name
    yield from (f"process {pid}, which nobody knows" for pid in strays(platform))


def serves(child: Child, service: str = "") -> bool:
    """Return whether a process says that a service of it serves."""
    if not child.alive or child.ready is None:
        return False
    with grpc.insecure_channel(child.ready.address) as channel, suppress(grpc.RpcError):
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=_CALL)
        return answer.status == health_pb2.HealthCheckResponse.SERVING
    return False


def writers(platform: Platform) -> set[int]:
    """Return the processes that write into the platform's logs: its own, and whatever they have started."""
    folder, found = platform.config.logs.resolve(), set()
    for pid in psutil.pids():
        with suppress(OSError):
            if Path(os.readlink(f"/proc/{pid}/fd/1")).parent == folder:
                found.add(pid)
    return found


def strays(platform: Platform) -> set[int]:
    """Return the processes that belong to no process that is to run."""
    known = {child.pid for child in platform.processes if child.alive}
    found = set()
    for pid in writers(platform):
        with suppress(psutil.NoSuchProcess):
            if not known & {pid, *(parent.pid for parent in psutil.Process(pid).parents())}:
                found.add(pid)
    return found


def logs(platform: Platform) -> str:
    """Return the end of every log."""
    return "\n".join(_tail(child) for child in platform.processes)


def stacks(platform: Platform) -> str:
    """End every process, which writes where its threads are; return that with the ends of the logs."""
    path = platform.config.folder / "stacks of the trainer.txt"
    with path.open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    running = [child for child in platform.processes if child.alive]
    for child in running:
        child.signal(signal.SIGABRT)
        child.signal(signal.SIGCONT)
    gone = [child.spec.log for child in running]
    deadline = time.monotonic() + _STACK_SECONDS
    while gone and time.monotonic() < deadline:
        gone = [log for log in gone if "Fatal Python error: Aborted" not in log.read_text(errors="replace")]
        time.sleep(_POLL_SECONDS)
    return f"{logs(platform)}\n--- the trainer\n{path.read_text()}"


def _tail(child: Child) -> str:
    log = child.spec.log
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join([f"--- {log}", *readable_tail(lines, _LINES)])
