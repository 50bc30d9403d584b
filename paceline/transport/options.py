"""Options of a client's connections: address, timeouts and credentials.

A client without a token looks for one in the environment, and then in the file of a platform on this machine.
"""

from __future__ import annotations

import os
import re
import socket
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from paceline.files import NotPrivateError, read_private, read_regular
from paceline.transport import channel
from paceline.transport.channel import Address, parse_addresses
from paceline.transport.interface import Stream, Unary

TOKEN, TOKEN_FILE = "PACELINE_TOKEN", "PACELINE_TOKEN_FILE"
_MOST_BYTES = 4096
_USABLE = re.compile(r"[\x21-\x7e]+")


class TokenFileWarning(UserWarning):
    """A token file exists but is not used, because other users could have written or read it."""


def token_file_of(port: int) -> Path:
    """Return the token file of the platform that this user runs at a port of this machine.

    Its folder has the machine's name, because several machines may share a home folder.
    RuntimeError: this user has no home folder.
    """
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    return Path(state) / "paceline/platforms" / (socket.gethostname() or "localhost") / f"{port}.token"


def token_of_environment(environment: Mapping[str, str]) -> str | None:
    """Return the token from the environment, if there is one.

    ValueError: the file that it names cannot be read, or does not hold a token.
    """
    if given := environment.get(TOKEN):
        return given
    if named := environment.get(TOKEN_FILE):
        return _read_named(Path(named))
    return None


class FoundToken:
    """Token of a client that was created without one. Files are read again when they have changed."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        """Look for it. ValueError: the environment names a file that cannot be used."""
        self._files: list[Path] = []
        self._read = _read_named
        if os.environ.get(TOKEN):
            self.origin = TOKEN
        elif named := os.environ.get(TOKEN_FILE):
            self.origin, self._files = TOKEN_FILE, [Path(named)]
        else:
            self.origin, self._files, self._read = "your platform", _files_for(addresses), _read_found
        self._seen = self._versions()
        self._token = token_of_environment(os.environ) or self._read_any()

    def current(self) -> str | None:
        """Return the token; None: there is none."""
        # This check takes microseconds. A restarted platform writes its new token before it serves.
        if self._files and (seen := self._versions()) != self._seen:
            self._seen = seen
            self._token = self._read_any() or self._token
        return self._token

    def _versions(self) -> list[tuple[int, int, int] | None]:
        return [_version(path) for path in self._files]

    def _read_any(self) -> str | None:
        for path in self._files:
            try:
                if token := self._read(path):
                    return token
            except (NotPrivateError, ValueError) as error:
                warnings.warn(TokenFileWarning(f"a token is not used: {error}"), stacklevel=2)
        return None


def _files_for(addresses: Sequence[Address]) -> list[Path]:
    """Return the token files of platforms at these addresses; empty unless all are ports of this machine."""
    if any(each.path or not each.loopback for each in addresses):
        return []
    try:
        return [token_file_of(each.port) for each in addresses]
    except RuntimeError:
        return []


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path, follow_symlinks=True)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _read_found(path: Path) -> str | None:
    """Return the token in the file of a platform; None: there is no file. NotPrivateError, ValueError."""
    try:
        text = read_private(path, _MOST_BYTES)
    except NotPrivateError:
        raise
    except OSError:
        return None
    return _checked(path, text)


def read_token(path: Path) -> str | None:
    """Return the token in a file that the user has named; None: the file is empty. It may be shared or a link.

    ValueError: the file cannot be read, or holds something else.
    """
    try:
        text = read_regular(path, _MOST_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise ValueError(f"{path}, which cannot be read: {error.strerror}") from error
    return _checked(path, text)


def _read_named(path: Path) -> str | None:
    try:
        return read_token(path)
    except ValueError as error:
        raise ValueError(f"{TOKEN_FILE} names {error}") from error


def _checked(path: Path, text: str) -> str | None:
    """Return the token of a file's text; a platform without a token has an empty file."""
    token = text.strip()
    if token and not _USABLE.fullmatch(token):
        raise ValueError(f"{path} must have a token and nothing else")
    return token or None


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """Addresses, credentials and time limits of a client's calls."""

    address: str
    """host:port, or several with commas between."""
    tls: channel.Tls | None
    token: str | None = field(repr=False)
    """None: look for one; empty: use none."""
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
    """Source of the token where none was given."""

    def with_token(self) -> Self:
        """Return the options, with `found` where no token was given.

        ValueError: an address cannot be parsed, or the environment names a file that cannot be used.
        """
        if self.token is not None:
            return self
        return replace(self, found=FoundToken(parse_addresses(self.address, tls=self.tls is not None)))

    def parsed(self) -> list[Address]:
        """Return the addresses. ValueError: one is invalid, or the token would be sent there in plain text."""
        addresses = parse_addresses(self.address, tls=self.tls is not None)
        for each in addresses:
            self.check_secret(each)
        return addresses

    def check_secret(self, address: Address, tls: channel.Tls | None = None) -> None:
        """Raise ValueError if the token would be sent to an address in plain text that others can read.

        `tls` is used for this address; None: the TLS of the gateway.
        """
        if self.tls or tls or self.insecure or address.loopback or not self._secret():
            return
        origin = f" of {self.found.origin}" if self.found else ""
        raise ValueError(
            f"will not send the token{origin} to {address.target} in plain text; give tls=paceline.Tls(...), or "
            "insecure=True on a network that you trust"
        )

    def begin(
        self,
        stubs: dict[str, Any],
        call: Unary | Stream[Any],
        seconds: float | None = None,
        way: str = "__call__",
    ) -> Any:
        """Begin a call on the stubs of a channel; `way` is how gRPC's blocking API makes it.

        `seconds` is the time limit of a stream; a unary call has the one of these options.
        """
        if isinstance(call, Unary):
            request = iter([call.request]) if call.streams_request else call.request
            seconds = self.slow_timeout if call.slow else self.timeout
        else:
            request = call.request()
        make = getattr(getattr(stubs[call.service], call.method), way)
        return make(request, timeout=seconds, metadata=channel.call_metadata(self._secret()))

    def _secret(self) -> str | None:
        return self.found.current() if self.found else self.token
