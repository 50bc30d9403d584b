"""Probe the health of a service on this machine: `python -m services.platform.grpc.health`.

The exit status is 0 if the service reports SERVING. Docker's health checks and `helm test` use it, over TLS with
client certificates as well; kubelet uses the port of probes. It reads the same variables as the service. It is
started often, so it imports gRPC and no service.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

UNHEALTHY = 1
_WILDCARDS = ("0.0.0.0", "::", "[::]")
_TLS = "PACELINE_TLS__"


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Return the exit status: 0 if the service reports SERVING; else 1, with the reason on stderr."""
    arguments = _parser().parse_args(argv)
    try:
        address = arguments.address or ready_address(environ)
        server_name = arguments.server_name or environ.get(f"{_TLS}SERVER_NAME")
        with _channel(address, server_name, environ) as channel:
            status = ask(channel, arguments.service, arguments.timeout)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return UNHEALTHY
    except grpc.RpcError as error:
        status = _text(error)
    if status != "SERVING":
        print(f"{address}: {status}", file=sys.stderr)
        return UNHEALTHY
    return 0


def ready_address(environ: Mapping[str, str]) -> str:
    """Return the address of the service on this machine, from its ready file and host.

    OSError if it is not ready, ValueError if no ready file is configured.
    """
    path = environ.get("PACELINE_READY_FILE")
    if not path:
        raise ValueError("give --address, or set PACELINE_READY_FILE as for the service")
    # Only the port, since the address in the file is for peers and may lead to another replica.
    port = str(json.loads(Path(path).read_text())["address"]).rpartition(":")[2]
    host = environ.get("PACELINE_HOST", "127.0.0.1")
    return f"{'127.0.0.1' if host in _WILDCARDS else host}:{port}"


def ask(channel: grpc.Channel, service: str, timeout: float) -> str:
    """Return the status that the service reports, such as SERVING. `timeout` in seconds. Raises grpc.RpcError."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def _channel(address: str, server_name: str | None, environ: Mapping[str, str]) -> grpc.Channel:
    options: list[tuple[str, int | str]] = [("grpc.enable_http_proxy", 0)]
    ca, key, chain = (_read(environ.get(f"{_TLS}{name}_FILE")) for name in ("CA", "KEY", "CERT"))
    if ca is None and chain is None:
        return grpc.insecure_channel(address, options)
    if server_name:
        options.append(("grpc.ssl_target_name_override", server_name))
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, chain), options)


def _text(error: Any) -> str:
    return f"{error.code().name}: {error.details()}"


def _read(path: str | None) -> bytes | None:
    return Path(path).read_bytes() if path else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m services.platform.grpc.health", description=__doc__)
    parser.add_argument("--address", help="host:port; default: from the file PACELINE_READY_FILE")
    parser.add_argument("--service", default="", help='such as "liveness"; default: the whole server')
    parser.add_argument("--server-name", help="name in its certificate, if that is not the host dialled")
    parser.add_argument("--timeout", type=float, default=3.0, help="seconds to wait for the answer")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
