"""The tokens that a service accepts: their hashes, what they may do, and how often.

A token is 32 random bytes, so a plain SHA-256 of it can be kept: there is nothing that could be guessed from a
dictionary, which is what slow password hashes are for.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from services.platform.limits import Rate
from services.platform.scopes import Scope
from services.platform.watched import Unreadable

PREFIX = "pl_"
"""Begins every token, so that secret scanners and people know one when they see it."""


class Grant(BaseModel):
    """One accepted token."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    """Whose token it is: appears in errors and logs, where the token does not."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of the token, in hexadecimal."""
    scopes: Annotated[frozenset[Scope], Field(min_length=1)]
    """What it may do."""
    requests_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """RPCs that it may begin in a second, in the long run, at each server. Unset: any number."""
    burst: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """RPCs that it may begin at once. Unset: those of two seconds."""

    @property
    def rate(self) -> Rate | None:
        """The limit; None for none."""
        if self.requests_per_second is None:
            return None
        return Rate(self.requests_per_second, self.burst or max(1.0, 2 * self.requests_per_second))


_GRANTS = TypeAdapter(list[Grant])


def new_token() -> str:
    """A token with 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def hashed(token: str) -> str:
    """What is kept of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def service_grant(token: str) -> Grant:
    """The services' own token: it may do everything, as often as it likes."""
    return Grant(name="services", sha256=hashed(token), scopes=frozenset(Scope))


def read_grants(path: Path) -> tuple[Grant, ...]:
    """The grants in a YAML file: a list of `name`, `sha256`, `scopes` and optionally limits.

    OSError when it cannot be read, Unreadable when an entry is wrong or a name or token comes twice.
    """
    try:
        grants = _GRANTS.validate_python(yaml.safe_load(path.read_text()) or [])
    except (ValidationError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise Unreadable(f"{path}: {_said(error)}") from error
    for field in ("name", "sha256"):
        values = [getattr(grant, field) for grant in grants]
        if len(set(values)) < len(values):
            raise Unreadable(f"{path}: two entries have the same {field}")
    return tuple(grants)


def find_grant(token: str, grants: Iterable[Grant]) -> Grant | None:
    """The grant of a token. Takes the same time whichever it is, and however much of a hash agrees."""
    digest = hashed(token)
    found = None
    for grant in grants:
        if hmac.compare_digest(digest, grant.sha256):
            found = grant
    return found


def _said(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    # Without the values: somebody may have put the token itself where its hash belongs.
    return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
