"""Ports that stay free until a server binds them."""

from __future__ import annotations

import itertools
import os
import socket

NOBODY = "http://127.0.0.1:1"
"""Address of a server that is not there: the port is reserved."""
_FIRST, _COUNT = 20_000, 12_000
"""Below the range from which Linux takes the ports of connections and of servers that ask for any."""
# Processes that run side by side begin in different places.
_numbers = itertools.count(os.getpid() * 97)


def free_port() -> int:
    """Return a TCP port of the loopback interface that nobody listens on and nobody else is given."""
    for number in itertools.islice(_numbers, _COUNT):
        port = _FIRST + number % _COUNT
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no port is free")
