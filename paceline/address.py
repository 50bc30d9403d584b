"""Addresses of gateways as people write them, read in one place. Pure.

`host`, `host:7400`, `grpc://host:7400/`, `[::1]:7400`, `::1`, `unix:/run/g.sock`; several with commas between.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address

DEFAULT_PORT = 7400
"""Port of a gateway unless it is set up for another one."""
_PLAIN, _SECURE = ("grpc", "http"), ("grpcs", "https")
_UNIX, _DNS = "unix:", "dns:///"
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")


@dataclass(frozen=True, slots=True)
class Address:
    """Address of one gateway."""

    host: str
    """Name or number; empty of a socket in the file system."""
    port: int = DEFAULT_PORT
    path: str = ""
    """Path of a socket in the file system."""

    @property
    def target(self) -> str:
        """The address as gRPC has it."""
        if self.path:
            return f"{_UNIX}{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """True if what is sent there stays on this machine."""
        return bool(self.path) or is_loopback(self.host)


def parse_addresses(text: str, *, tls: bool) -> list[Address]:
    """Return the addresses of a text, which has commas between them; `tls` is whether the client has TLS.

    Raises:
        ValueError: there is none, or one that cannot be meant; the message says which, and what to write.
    """
    if not isinstance(text, str):
        raise ValueError(f"address {text!r} must be a string, such as 'gateway:{DEFAULT_PORT}'")
    found = [parse_address(each.strip(), tls=tls) for each in text.split(",") if each.strip()]
    if not found:
        raise ValueError(f"address {text!r} must be host:port, or several with commas between")
    return found


def parse_address(text: str, *, tls: bool = False) -> Address:
    """Return one address. ValueError: it cannot be meant."""
    if text.startswith(_UNIX):
        path = text.removeprefix(_UNIX).removeprefix("//") or ""
        if not path.strip("/"):
            raise _wrong(text, "names no file; write unix:/path/to/socket")
        return Address("", path=path)
    rest = _without_scheme(text.removeprefix(_DNS), tls)
    rest, slash, path = rest.partition("/")
    if path.strip("/"):
        raise _wrong(text, f"has the path {slash}{path}, which a gateway has not; write host:port")
    host, port = _split(text, rest)
    if port is not None and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise _wrong(text, f"has the port {port!r}; must be a number from 1 to 65535")
    return Address(host, DEFAULT_PORT if port is None else int(port))


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach a listener on `host`."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _without_scheme(text: str, tls: bool) -> str:
    scheme, mark, rest = text.partition("://")
    if not mark:
        return text
    if scheme.lower() not in (*_PLAIN, *_SECURE):
        raise _wrong(text, f"has the scheme {scheme}; write host:port")
    if scheme.lower() in _SECURE and not tls:
        raise _wrong(text, "asks for TLS; give tls as well, such as tls=paceline.Tls()")
    return rest


def _split(text: str, rest: str) -> tuple[str, str | None]:
    """Return host and port; the port is None where there is none."""
    if rest.startswith("["):
        host, closed, after = rest[1:].partition("]")
        if not closed or not _is_ipv6(host) or (after and not after.startswith(":")):
            raise _wrong(text, "is no IPv6 address; write [::1]:7400")
        return host, after[1:] if after else None
    if rest.count(":") > 1:
        before, _, last = rest.rpartition(":")
        if not _is_ipv6(rest):
            raise _wrong(text, "has several colons and is no IPv6 address; write host:port, or [::1]:7400")
        if len(last) == 4 and last.isdigit() and _is_ipv6(before):
            raise _wrong(
                text, f"can be read in two ways; write [{before}]:{last}, or [{rest}]:{DEFAULT_PORT}"
            )
        return rest, None
    host, colon, port = rest.partition(":")
    if not _HOST.fullmatch(host):
        raise _wrong(text, f"has the host {host!r}, which is none; write host:port")
    return host, port if colon else None


def _is_ipv6(text: str) -> bool:
    try:
        IPv6Address(text)
    except ValueError:
        return False
    return True


def _wrong(text: str, why: str) -> ValueError:
    return ValueError(f"address {text!r} {why}")
