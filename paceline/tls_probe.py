"""Ask a server whether it speaks TLS: one that does closes connections in plain text without a word."""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress

from paceline.address import Address

PROBE_SECONDS = 2.0


def speaks_tls(address: Address) -> bool:
    """Return True if a TLS handshake succeeds at an address, or is refused in TLS. Nothing is sent or trusted."""
    if address.path:
        return False
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with suppress(OSError), socket.create_connection((address.host, address.port), PROBE_SECONDS) as plain:
        try:
            with context.wrap_socket(plain, server_hostname=address.host):
                return True
        except ssl.SSLError as error:
            return "ALERT" in (error.reason or "")
    return False
