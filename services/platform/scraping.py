"""An HTTP server with TLS whose certificate can be changed while it runs."""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from typing import Any

from prometheus_client.exposition import ThreadingWSGIServer

from services.platform.certificates import server_context
from services.platform.config import TlsConfig
from services.platform.watched import Watched

_HANDSHAKE_SECONDS = 10.0


def tls_server(tls: TlsConfig) -> type[ThreadingWSGIServer]:
    """The server class for `make_server`. Raises as `certificates.read_certificates`."""
    paths = [path for path in (tls.key_file, tls.cert_file, tls.ca_file) if path is not None]
    context = Watched("metrics_certificate", paths, lambda: server_context(tls))

    class Server(_TlsServer):
        contexts = context

    return Server


class _TlsServer(ThreadingWSGIServer):
    contexts: Watched[ssl.SSLContext]

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Shakes hands in the connection's own thread, so that a client that does not cannot hold up others."""
        request.settimeout(_HANDSHAKE_SECONDS)
        try:
            secured = self.contexts.current().wrap_socket(request, server_side=True)
        except OSError:
            return  # a stranger, or somebody who left: no news
        with secured:
            super().finish_request(secured, client_address)
            with suppress(OSError):
                secured.shutdown(socket.SHUT_WR)
