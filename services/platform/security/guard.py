"""Authorize calls by their tokens: scopes, rates, and the files that they are read from."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Self

import structlog
import yaml
from pydantic import Field, TypeAdapter, ValidationError, model_validator

from paceline.tokens import TokenScope, hash_token
from services.contracts.errors import PermissionDenied, ResourceExhausted, Unauthenticated
from services.platform.config import ConfigError, ServiceConfig
from services.platform.security.caller import TokenHolder, act_for, read_caller
from services.platform.security.certificates import Unreadable, Watched

log = structlog.get_logger(__name__)

_READERS = frozenset({TokenScope.ROLLOUTS, TokenScope.WEIGHTS, TokenScope.FLEET})
"""Scopes that each allow to read the state of the platform."""

SCRAPE = "metrics"
"""Name for `admit` of a read of metrics, where they have no separate port."""
_SERVICES: dict[str, frozenset[TokenScope]] = {
    SCRAPE: frozenset({TokenScope.METRICS}),
    "paceline.v1.RolloutService": frozenset({TokenScope.ROLLOUTS}),
    "paceline.v1.WeightService": frozenset({TokenScope.WEIGHTS}),
    "paceline.v1.FleetService": frozenset({TokenScope.FLEET}),
    "grpc.reflection.v1.ServerReflection": _READERS,
    "grpc.reflection.v1alpha.ServerReflection": _READERS,
}
_METHODS: dict[str, frozenset[TokenScope]] = {
    "paceline.v1.WeightService/GetVersions": _READERS,
    "paceline.v1.FleetService/ListInstances": _READERS,
    "paceline.v1.FleetService/WatchFleet": _READERS,
    "paceline.v1.FleetService/GetKnobs": _READERS,
    "paceline.v1.FleetService/GetDrafter": _READERS,
    "paceline.v1.FleetService/WatchDecisions": _READERS,
}

_TICKETED = frozenset({"paceline.v1.WeightStreamService/PushWeights"})
"""Methods whose bearer token is a ticket for one update, known only to their servicer."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Sustained calls a second, and most calls at once."""

    per_second: float
    burst: float


class Bucket:
    """Token bucket that starts full, refills at the rate up to the burst, and loses one token per call."""

    def __init__(self, rate: Rate, now: float) -> None:
        """`now` is in seconds, monotonic."""
        self.rate = rate
        self._level = rate.burst
        self._at = now

    def take(self, now: float) -> float:
        """Return 0 if a call is admitted, else the seconds until one will be; a refused call takes no token."""
        self._level = min(self.rate.burst, self._level + max(0.0, now - self._at) * self.rate.per_second)
        self._at = max(self._at, now)
        if self._level >= 1.0:
            self._level -= 1.0
            return 0.0
        return (1.0 - self._level) / self.rate.per_second


class Grant(TokenHolder):
    """One accepted token.

    A token is 32 random bytes, so its plain SHA-256 is kept: slow password hashes protect against dictionaries, and
    no dictionary has such a token.
    """

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of the token, in hexadecimal."""
    scopes: Annotated[frozenset[TokenScope], Field(min_length=1)]
    """Scopes of the token."""
    requests_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Sustained rate of RPCs at each server. Unset: unlimited."""
    burst: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """RPCs that may begin at once. Unset: as many as in two seconds."""

    @model_validator(mode="after")
    def _check_internal(self) -> Self:
        bounds = (self.runs, self.max_queued_samples, self.max_queued_tokens)
        if TokenScope.INTERNAL in self.scopes and any(each is not None for each in bounds):
            raise ValueError("scopes: internal is for services, which have no runs and no limits of samples")
        return self

    @property
    def rate(self) -> Rate | None:
        """Rate limit; None for none."""
        if self.requests_per_second is None:
            return None
        return Rate(self.requests_per_second, self.burst or max(1.0, 2 * self.requests_per_second))


_GRANTS = TypeAdapter(list[Grant])


@lru_cache(maxsize=4)
def service_grant(token: str) -> Grant:
    """Return the grant of the services' own token: all scopes, no limit."""
    return Grant(name="services", sha256=hash_token(token), scopes=frozenset(TokenScope))


def grant_files(path: Path) -> list[Path]:
    """Return the files of `tokens_file`: itself, or the *.yaml files in a folder and one level below it.

    Folders whose names begin with a dot are left out: Kubernetes keeps the versions of a secret in them. Unreadable
    if there is no file.
    """
    if not path.is_dir():
        return [path]
    found = [each for pattern in ("*.yaml", "*/*.yaml") for each in path.glob(pattern)]
    found = [each for each in found if not each.parent.name.startswith(".") or each.parent == path]
    if not found:
        raise Unreadable(f"{path}: neither the folder nor one in it has a *.yaml file")
    return sorted(found)


def read_grants(*paths: Path) -> tuple[Grant, ...]:
    """Return the grants of YAML files: lists of `name`, `sha256`, `scopes` and optionally runs and limits.

    OSError if one cannot be read, Unreadable if an entry is invalid or a name or token occurs twice.
    """
    grants: list[Grant] = []
    for path in paths:
        try:
            grants += _GRANTS.validate_python(yaml.safe_load(path.read_text()) or [])
        except (ValueError, RecursionError, yaml.YAMLError) as error:
            raise Unreadable(f"{path}: {_text(error)}") from error
    for field in ("name", "sha256"):
        values = [getattr(grant, field) for grant in grants]
        if len(set(values)) < len(values):
            raise Unreadable(f"{', '.join(map(str, paths))}: two entries have the same {field}")
    return tuple(grants)


def find_grant(token: str, grants: Iterable[Grant]) -> Grant | None:
    """Return the grant of a token, in a time that does not depend on which one matches, or how closely."""
    digest = hash_token(token)
    found = None
    for grant in grants:
        if hmac.compare_digest(digest, grant.sha256):
            found = grant
    return found


def _text(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    # Without the values: an entry may have the token itself instead of its hash.
    return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())


class Guard:
    """Check callers, as made by `guard_of`; tokens are thread-safe, rates belong to one server's event loop."""

    def __init__(
        self,
        own: Callable[[], str | None],
        grants: Callable[[], tuple[Grant, ...]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`own` returns the services' token, or None; `grants` returns the grants of callers."""
        self._own = own
        self._grants = grants
        self._clock = clock
        self._buckets: dict[str, Bucket] = {}

    def admit(self, method: str, authorization: str, on_behalf: str = "") -> TokenHolder | None:
        """Admit a call of "/package.Service/Method", or raise; return its caller, None for a service.

        The rest of this task acts for the caller. A service may call `on_behalf` of another caller, as its metadata
        say; metadata of others are ignored.

        Unauthenticated without a known token, PermissionDenied without the scope, ResourceExhausted above the
        token's rate.
        """
        if method.removeprefix("/") in _TICKETED:
            # The servicer checks the ticket before it reads a message.
            return None
        grant = self._known(authorization)
        if grant is None:
            raise Unauthenticated("a valid bearer token is needed in the metadata `authorization`")
        caller: TokenHolder | None = grant
        if TokenScope.INTERNAL in grant.scopes:
            caller = read_caller(on_behalf) if on_behalf else None
        act_for(caller)
        self._check_scope(grant, method)
        self._check_rate(grant)
        return caller

    def warn_of_shared_runs(self) -> list[str]:
        """Warn if several tokens may generate samples and some may name any run; return the names of the latter."""
        holders = [grant for grant in self._grants() if TokenScope.ROLLOUTS in grant.scopes]
        unbounded = sorted(grant.name for grant in holders if grant.runs is None)
        if len(holders) < 2 or not unbounded:
            return []
        log.warning(
            "grants_of_any_run",
            tokens=unbounded,
            reason="several tokens have the scope rollouts, and these may read and end the runs of all others; "
            "give each the `runs` that it is for",
        )
        return unbounded

    def may_scrape(self, authorization: str) -> bool | None:
        """Return True if the bearer may read metrics; None if the token is unknown."""
        grant = self._known(authorization)
        return None if grant is None else bool(grant.scopes & {TokenScope.METRICS, TokenScope.INTERNAL})

    def _known(self, authorization: str) -> Grant | None:
        token = bearer_token(authorization)
        own = self._own()
        accepted = (*self._grants(), *([service_grant(own)] if own else []))
        return find_grant(token, accepted)

    def _check_scope(self, grant: Grant, method: str) -> None:
        wanted = scopes_for(method)
        if grant.scopes & wanted:
            return
        named = sorted(wanted - {TokenScope.INTERNAL}) or [TokenScope.INTERNAL]
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
            most = f"{rate.per_second:g} calls a second, {rate.burst:g} at once"
            raise ResourceExhausted("requests", f"{grant.name} may begin {most}", retry_after=wait)


def guard_of(config: ServiceConfig) -> Guard | None:
    """Return the guard of a server; None if no token is required. ConfigError if the tokens cannot be read."""
    if config.token is None and config.tokens_file is None:
        return None
    return Guard(own_token(config), _grants_of(config.tokens_file))


# The services' own token, by its file.
_tokens: dict[Path, Watched[str]] = {}


def own_token(config: ServiceConfig) -> Callable[[], str | None]:
    """Return a function that returns the services' own token, from its current file if it came from one.

    OSError or Unreadable if no good one has been read from that file in this process.
    """
    path = config.rotating_token_file
    if path is None:
        fixed = config.token.get_secret_value() if config.token is not None else None
        return lambda: fixed
    if path not in _tokens:
        _tokens[path] = Watched("token", [path], lambda: _read_token(path))
    return _tokens[path].current


def _grants_of(path: Path | None) -> Callable[[], tuple[Grant, ...]]:
    if path is None:
        return lambda: ()
    try:
        files = grant_files(path)
        return Watched("tokens", files, lambda: read_grants(*files)).current
    except (OSError, Unreadable) as error:
        raise ConfigError([f"tokens_file: {error}"]) from error


def _read_token(path: Path) -> str:
    token = path.read_text().strip()
    if not token:
        raise Unreadable(f"{path} is empty")
    return token


def bearer_token(authorization: str) -> str:
    """Return the token of an `authorization` value "Bearer <token>"; empty if there is none."""
    scheme, _, token = authorization.partition(" ")
    return token if scheme.lower() == "bearer" else ""


def scopes_for(method: str) -> frozenset[TokenScope]:
    """Return the scopes that each let a token call "/package.Service/Method"; INTERNAL always does.

    Unlisted methods are for services only, so that a new method is closed by default.
    """
    name = method.removeprefix("/")
    service = name.partition("/")[0]
    return _METHODS.get(name, _SERVICES.get(service, frozenset())) | {TokenScope.INTERNAL}
