"""Keep web pages out where no token does.

A page that somebody of this machine or network looks at can send requests here with that person's browser, and can
read the answers once its own name leads here (DNS rebinding). It can neither choose the header Host nor hide its
origin. Where a request needs a token, the page would have to know one.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.address import is_loopback
from services.facade.access import OPEN
from services.facade.config import FacadeConfig
from services.facade.http_errors import HttpError, error_body, in_dialect

_AUTHORITY = re.compile(r"(?P<host>[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(:(?P<port>[0-9]{1,5})?)?")
_CROSS = "{} is another origin than this server, and no token was sent; pages of others may not call it"
_PORTS = {"http": 80, "https": 443}
_NO_OTHER_PAGE = ("same-origin", "none")
"""What browsers say of a request that no page of another origin has caused."""


class Origins:
    """ASGI middleware: refuse requests without a token under unknown names, or from pages of other origins."""

    def __init__(self, app: ASGIApp, config: FacadeConfig) -> None:
        self._app = app
        self._tokens = config.token is not None or config.tokens_file is not None
        self._anonymous = bool(config.anonymous_scopes)
        # With TLS the certificate has the names: a browser goes to no other.
        self._any_host = config.tls is not None
        self._here = is_loopback(config.host)
        own = {config.host, config.advertise_host or config.host}
        self._names = {each.strip("[]").lower() for each in own | set(config.allowed_hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or refuse it."""
        if scope["type"] == "http" and scope["path"] not in OPEN:
            headers = Headers(scope=scope)
            if not self._needs_token(headers) and (found := self._refused(headers)) is not None:
                found = in_dialect(scope["path"], found)
                await JSONResponse(found.body, status_code=found.status)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _needs_token(self, headers: Headers) -> bool:
        return self._tokens and ("authorization" in headers or not self._anonymous)

    def _refused(self, headers: Headers) -> HttpError | None:
        named = headers.getlist("host")
        host, port = _read(named[0]) if len(named) == 1 else (None, None)
        if not self._any_host and not self._known(host):
            message = (
                f"host: {', '.join(named)[:256]!r} is not a name of this server, and no token was sent; send one, "
                "dial a loopback address, or add the name to the setting allowed_hosts"
            )
            return _error(421, message, "UNKNOWN_HOST")
        for origin in headers.getlist("origin"):
            scheme, _, rest = origin.partition("://")
            usual = _PORTS.get(scheme)
            if usual is None or host is None or _read(rest, usual) != (host, port or usual):
                return _error(403, _CROSS.format(f"origin: {origin[:256]!r}"), "CROSS_ORIGIN")
        for site in headers.getlist("sec-fetch-site"):
            if site not in _NO_OTHER_PAGE:
                return _error(403, _CROSS.format(f"sec-fetch-site: {site[:256]!r}"), "CROSS_ORIGIN")
        return None

    def _known(self, host: str | None) -> bool:
        if host is None:
            return False
        if is_loopback(host) or any(fnmatchcase(host, name) for name in self._names):
            return True
        # Where more than loopback is served, whoever dials a number was led here by no name.
        return not self._here and _is_number(host)


def _read(authority: str, usual_port: int | None = None) -> tuple[str | None, int | None]:
    """Return the host, in lower case and without brackets, and the port; (None, None) if it is no authority."""
    found = _AUTHORITY.fullmatch(authority)
    if found is None:
        return None, None
    return found["host"].strip("[]").removesuffix(".").lower(), int(found["port"] or usual_port or 0) or None


def _is_number(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _error(status: int, message: str, code: str) -> HttpError:
    return HttpError(status, error_body(message, "permission_error", param=None, code=code), {})
