"""HTTP/1.1 of one connection: uvicorn's over h11, which also says what the connection is at, and ends it in time.

h11 by name: it bounds the bytes of a header. httptools, which uvicorn prefers where it is installed, does not.
"""

from __future__ import annotations

import asyncio
import json
import sys

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from services.facade.http_errors import error_body
from services.facade.server.connections import Connections, State

MOST_HEADER_BYTES = 64 * 1024
"""Most bytes of a request's line and header."""
_TOO_LONG = 431


class ServerConfig(uvicorn.Config):
    """Settings of a server, and its connections."""

    connections: Connections


class FacadeProtocol(H11Protocol):
    """One connection."""

    config: ServerConfig

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._connections = self.config.connections
        self._place = self._connections.by_file[transport.get_extra_info("socket").fileno()]
        self._place.end = self._end
        self._partial = False

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        self._connections.count(self._place, len(data))
        if not self._in_work() and len(data) > MOST_HEADER_BYTES:
            # h11 bounds what it has of a header that goes on. All of it may come at once.
            super().data_received(data[: MOST_HEADER_BYTES + 1])
            data = data[MOST_HEADER_BYTES + 1 :]
        if not self.transport.is_closing():
            super().data_received(data)
        self._partial = not self._in_work()
        self._settle()

    def on_response_complete(self) -> None:
        """Go on with the next request."""
        super().on_response_complete()
        # The rest of a body that was refused is still to come, or a next header has begun.
        self._partial = self.conn.their_state is not h11.IDLE or bool(self.conn.trailing_data[0])
        self._settle()

    def pause_writing(self) -> None:
        """Let whoever answers wait."""
        super().pause_writing()
        self._settle()

    def resume_writing(self) -> None:
        """Let whoever answers go on."""
        super().resume_writing()
        self._settle()

    def timeout_keep_alive_handler(self) -> None:
        """Do nothing: the connection has a deadline in every state."""

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, and close."""
        error = sys.exception()
        if getattr(error, "error_status_hint", 400) == _TOO_LONG:
            self._refuse(_TOO_LONG, f"the header is longer than {MOST_HEADER_BYTES} bytes", "HEADER_TOO_LONG")
        else:
            self._refuse(400, f"this is no HTTP/1.1 request: {error or msg}", "INVALID_HTTP")

    def _in_work(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _settle(self) -> None:
        self._connections.enter(self._place, self._state())

    def _state(self) -> State:
        if self.flow.write_paused:
            return State.SENDING
        if self.transport.is_closing():
            return State.ENDING
        if self._in_work():
            return State.RECEIVING if self.cycle.more_body else State.WORKING
        if self._partial or self.cycle is None:
            return State.WAITING
        return State.RESTING

    def _end(self, state: State) -> None:
        """Close the connection, whose deadline in the state has passed."""
        if state is State.WAITING and self._partial and self.conn.our_state is h11.IDLE:
            self._refuse(408, "the header did not come in time", "HEADER_TOO_SLOW")
        elif state is State.RECEIVING and self.conn.our_state is h11.SEND_RESPONSE:
            self._refuse(408, "the body did not come in time", "BODY_TOO_SLOW")
        elif state is State.RESTING:
            self.transport.close()
        else:
            self.transport.abort()

    def _refuse(self, status: int, message: str, code: str) -> None:
        body = json.dumps(error_body(message, "invalid_request_error", param=None, code=code)).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        if self.cycle is not None:
            # Nothing more may be sent by whoever reads the body.
            self.cycle.disconnected = True
        if self.transport.is_closing():
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            for event in (
                h11.Response(status_code=status, headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
