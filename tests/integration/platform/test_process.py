"""Real processes: ready file, signals, exit status, logs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.v1 import fleet_pb2, fleet_pb2_grpc

TOY = """
import asyncio, sys, time
from paceline.v1 import fleet_pb2, fleet_pb2_grpc
from services.platform.config import ServiceConfig
from services.platform.service import Shutdown, run
from services.platform.grpc.server import GrpcServer


class Config(ServiceConfig):
    fail: bool = False
    hang: bool = False
    leave: bool = False


class Fleet(fleet_pb2_grpc.FleetServiceServicer):
    async def ListInstances(self, request, context):
        return fleet_pb2.ListInstancesResponse(instances=[fleet_pb2.Instance(instance_id="toy")])


async def main(config: Config, shutdown: Shutdown) -> None:
    server = GrpcServer(config, service="toy")
    fleet_pb2_grpc.add_FleetServiceServicer_to_server(Fleet(), server.server)
    await server.start()
    await server.set_serving(True)
    shutdown.ready(server.address)
    if config.fail:
        raise RuntimeError("the engine broke")
    await shutdown.wait()
    if config.hang:
        print("hangs", flush=True)
    while config.hang:
        time.sleep(0.05)
    if not config.leave:
        await server.stop(config.shutdown_grace_seconds)


run("toy", main, Config)
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def ready_file(tmp_path: Path) -> Path:
    return tmp_path / "run" / "ready.json"


@pytest.fixture
def start(tmp_path: Path, ready_file: Path) -> Iterator[Start]:
    """Start the toy service with flags."""
    script = tmp_path / "toy.py"
    script.write_text(TOY)
    started: list[subprocess.Popen[str]] = []
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
    root = str(Path(__file__).parents[3])

    def launch(*flags: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(script), "--ready-file", str(ready_file), *flags],
            env={**environ, "PYTHONPATH": root},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield launch
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (answer := condition()):
        assert time.monotonic() < deadline, "did not come true within a minute"
        time.sleep(0.02)
    return answer


def ready(process: subprocess.Popen[str], path: Path) -> dict[str, Any]:
    until(lambda: path.exists() or process.poll() is not None)
    assert process.poll() is None, process.communicate()
    return dict(json.loads(path.read_text()))


def lines(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_cleanly(start: Start, ready_file: Path, number: signal.Signals) -> None:
    process = start()
    told = ready(process, ready_file)
    assert told["pid"] == process.pid
    with grpc.insecure_channel(told["address"]) as channel:
        answer = fleet_pb2_grpc.FleetServiceStub(channel).ListInstances(
            fleet_pb2.ListInstancesRequest(), timeout=60
        )
    assert answer.instances[0].instance_id == "toy"
    assert told["metrics_port"] > 0
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert errors == ""
    assert not ready_file.exists()
    written = lines(output)
    assert [line["event"] for line in written] == ["ready", "stopped"]
    assert {line["service"] for line in written} == {"toy"}
    assert {"timestamp", "level", "logger"} <= written[0].keys()


def test_a_second_signal_ends_a_process_that_hangs(start: Start, ready_file: Path) -> None:
    process = start("--hang")
    ready(process, ready_file)
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert "hangs\n" in iter(process.stdout.readline, "")
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM


def test_an_error_is_logged_and_ends_with_status_one(start: Start) -> None:
    process = start("--fail")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    failed = lines(output)[-1]
    assert failed["event"] == "service_failed"
    assert failed["level"] == "error"
    assert "the engine broke" in failed["exception"]


def test_a_server_that_was_not_stopped_does_not_keep_the_process(start: Start, ready_file: Path) -> None:
    process = start("--leave")
    ready(process, ready_file)
    process.terminate()
    assert process.wait(60) == 0


def test_a_taken_port_ends_with_status_one(start: Start, ready_file: Path) -> None:
    first = start()
    port = ready(first, ready_file)["address"].rpartition(":")[2]
    ready_file.unlink()
    second = start("--port", port)
    output, _ = second.communicate(timeout=60)
    assert second.returncode == 1
    assert port in lines(output)[-1]["exception"]


def test_bad_configuration_ends_with_status_two(start: Start) -> None:
    process = start("--port", "many")
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert output == ""
    assert "port" in errors
    assert "Traceback" not in errors


def test_a_forbidden_address_ends_with_status_two(start: Start) -> None:
    process = start("--host", "0.0.0.0")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "needs tls and token" in errors
