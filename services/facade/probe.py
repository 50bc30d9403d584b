"""Health probe of a facade of this machine: `python -m services.facade.probe --path /livez`.

It exits with status 0 if the facade answers 200. For probes of containers, which have no client certificate. It
reads the same variables as the service. It is started often, so it imports nothing but the standard library.
"""

from __future__ import annotations

import argparse
import http.client
import os
import socket
import ssl
import sys
from collections.abc import Mapping, Sequence

UNHEALTHY = 1
_TLS = "PACELINE_TLS__"


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Return the exit status: 0 if the answer is 200; else 1, with the reason on stderr."""
    arguments = _parser().parse_args(argv)
    try:
        status = ask(arguments.address, arguments.path, arguments.server_name, arguments.timeout, environ)
    except (OSError, http.client.HTTPException) as error:
        print(f"{arguments.address}: {error}", file=sys.stderr)
        return UNHEALTHY
    if status != 200:
        print(f"{arguments.address}{arguments.path}: {status}", file=sys.stderr)
        return UNHEALTHY
    return 0


def ask(address: str, path: str, server_name: str | None, timeout: float, environ: Mapping[str, str]) -> int:
    """Return the status of a GET. OSError if there is none within `timeout` seconds."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=timeout)
    files = {name: environ.get(f"{_TLS}{name}_FILE") for name in ("CA", "CERT", "KEY")}
    plain = socket.create_connection((host, int(port)), timeout=timeout)
    connection.sock = plain
    if files["CERT"]:
        context = ssl.create_default_context(cafile=files["CA"])
        context.load_cert_chain(files["CERT"], files["KEY"])
        name = server_name or environ.get(f"{_TLS}SERVER_NAME") or host
        connection.sock = context.wrap_socket(plain, server_hostname=name)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m services.facade.probe", description=__doc__)
    parser.add_argument("--address", default="127.0.0.1:7480", help="host:port")
    parser.add_argument("--path", default="/livez", help="what is asked for")
    parser.add_argument("--server-name", help="name in its certificate, if that is not the host dialled")
    parser.add_argument("--timeout", type=float, default=3.0, help="seconds to wait for the answer")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
