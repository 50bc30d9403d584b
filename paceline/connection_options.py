"""Options of a client's connections: where to, with what credentials, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

from paceline import channel
from paceline.address import Address, parse_addresses
from paceline.found_token import FoundToken
from paceline.transport import Stream, Unary

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """Addresses, credentials and time limits of a client's calls."""

    address: str
    """host:port, or several with commas between."""
    tls: channel.Tls | None
    token: str | None = field(repr=False)
    """None: the one that is found; empty: none."""
    timeout: float
    """Seconds for one attempt at a unary call."""
    slow_timeout: float
    """Seconds for one attempt at a call that waits for instances."""
    leaders_only: bool = True
    """Call only gateways that lead; False: any, for calls that need no leader."""

    use_proxy: bool = False
    """Go through the proxy that the environment names, except to this machine."""
    insecure: bool = False
    """Send the token in plain text beyond this machine."""
    found: FoundToken | None = field(default=None, repr=False)
    """Token where none was given."""

    def with_token(self) -> Self:
        """Return the options with the token that is found, where none was given.

        ValueError: as `parsed`, or the environment names a file that is none.
        """
        if self.token is not None:
            return self
        return replace(self, found=FoundToken(parse_addresses(self.address, tls=self.tls is not None)))

    def parsed(self) -> list[Address]:
        """Return the addresses. ValueError: one cannot be meant, or the token would go there in plain text."""
        addresses = parse_addresses(self.address, tls=self.tls is not None)
        for each in addresses:
            self.check_secret(each)
        return addresses

    def check_secret(self, address: Address, tls: channel.Tls | None = None) -> None:
        """Raise ValueError if what shows who calls would go to an address in plain text that others can read.

        `tls` is that to the address where it differs from the one to the gateway.
        """
        if self.tls or tls or self.insecure or address.loopback or not self._secret():
            return
        origin = f" of {self.found.origin}" if self.found else ""
        raise ValueError(
            f"will not send the token{origin} to {address.target} in plain text; give tls=paceline.Tls(...), or "
            "insecure=True on a network that you trust"
        )

    def begin(self, stubs: dict[str, Any], unary: Unary, way: str = "__call__") -> Any:
        """Begin a unary call on the stubs of a channel; `way` is how gRPC's blocking API makes it."""
        request = iter([unary.request]) if unary.streams_request else unary.request
        timeout = self.slow_timeout if unary.slow else self.timeout
        metadata = channel.call_metadata(self._secret())
        make = getattr(getattr(stubs[unary.service], unary.method), way)
        return make(request, timeout=timeout, metadata=metadata)

    def open(self, stubs: dict[str, Any], stream: Stream[Any], seconds: float | None) -> Any:
        """Begin a stream on the stubs of a channel."""
        metadata = channel.call_metadata(self._secret())
        make = getattr(stubs[stream.service], stream.method)
        return make(stream.request(), timeout=seconds, metadata=metadata)

    def _secret(self) -> str | None:
        return self.found.current() if self.found else self.token


def connect_again(
    client: Callable[..., T], address: Any, options: ConnectionOptions, others: dict[str, Any]
) -> T:
    """Return a client that was pickled, in another process, where it connects anew."""
    return client(
        address,
        token=options.token,
        tls=options.tls,
        timeout=options.timeout,
        slow_timeout=options.slow_timeout,
        leaders_only=options.leaders_only,
        use_proxy=options.use_proxy,
        insecure=options.insecure,
        **others,
    )
