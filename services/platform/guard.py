"""Who may call what, how often: the tokens that a server accepts, as they are on disk now."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from services.platform.auth import bearer_token
from services.platform.config import ConfigError, ServiceConfig
from services.platform.errors import PermissionDenied, ResourceExhausted, Unauthenticated
from services.platform.limits import Bucket, Rate
from services.platform.scopes import Scope, scopes_for
from services.platform.tokens import Grant, find_grant, read_grants, service_grant
from services.platform.watched import Unreadable, Watched


class Guard:
    """Made by `guard_of`. Thread-safe as far as `Watched` is; buckets belong to one server's event loop."""

    def __init__(
        self,
        own: Callable[[], str | None],
        grants: Callable[[], tuple[Grant, ...]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`own` is the services' token, None where there is none; `grants` are those of callers."""
        self._own = own
        self._grants = grants
        self._clock = clock
        self._buckets: dict[str, Bucket] = {}

    def admit(self, method: str, authorization: str) -> None:
        """Lets a call of "/package.Service/Method" pass.

        Unauthenticated without a known token, PermissionDenied without the scope, ResourceExhausted above the
        token's rate.
        """
        grant = self._known(authorization)
        if grant is None:
            raise Unauthenticated("a valid bearer token is needed in the metadata `authorization`")
        self._check_scope(grant, method)
        self._check_rate(grant)

    def may_scrape(self, authorization: str) -> bool | None:
        """Whether the bearer may read metrics; None when it is not known who that is."""
        grant = self._known(authorization)
        return None if grant is None else bool(grant.scopes & {Scope.METRICS, Scope.INTERNAL})

    def _known(self, authorization: str) -> Grant | None:
        token = bearer_token(authorization)
        own = self._own()
        accepted = (*self._grants(), *([service_grant(own)] if own else []))
        return find_grant(token, accepted)

    def _check_scope(self, grant: Grant, method: str) -> None:
        wanted = scopes_for(method)
        if grant.scopes & wanted:
            return
        named = sorted(wanted - {Scope.INTERNAL}) or [Scope.INTERNAL]
        raise PermissionDenied(
            f"{method.removeprefix('/')} needs a token with the scope {' or '.join(named)}; "
            f"that of {grant.name} has {', '.join(sorted(grant.scopes))}",
            "MISSING_SCOPE",
            scope=",".join(named),
            token=grant.name,
        )

    def _check_rate(self, grant: Grant) -> None:
        rate = grant.rate
        if rate is None:
            return
        now = self._clock()
        bucket = self._buckets.get(grant.name)
        if bucket is None or bucket.rate != rate:
            bucket = self._buckets[grant.name] = Bucket(rate, now)
        if wait := bucket.take(now):
            raise ResourceExhausted("requests", _too_many(grant.name, rate), retry_after=wait)


def guard_of(config: ServiceConfig) -> Guard | None:
    """The guard of a server with this configuration; None when no token is asked for. ConfigError when the tokens
    cannot be read."""
    if config.token is None and config.tokens_file is None:
        return None
    return Guard(own_token(config), _grants_of(config.tokens_file))


def own_token(config: ServiceConfig) -> Callable[[], str | None]:
    """The services' own token as it is now: from its file, if it came from one, else as it was set."""
    path = config.rotating_token_file
    if path is None:
        fixed = config.token.get_secret_value() if config.token is not None else None
        return lambda: fixed
    return Watched("token", [path], lambda: _read_token(path)).current


def _grants_of(path: Path | None) -> Callable[[], tuple[Grant, ...]]:
    if path is None:
        return lambda: ()
    try:
        return Watched("tokens", [path], lambda: read_grants(path)).current
    except (OSError, Unreadable) as error:
        raise ConfigError([f"tokens_file: {error}"]) from error


def _read_token(path: Path) -> str:
    token = path.read_text().strip()
    if not token:
        raise Unreadable(f"{path} is empty")
    return token


def _too_many(name: str, rate: Rate) -> str:
    return f"{name} may begin {rate.per_second:g} calls a second, {rate.burst:g} at once"
