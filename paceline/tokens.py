"""Bearer tokens and the entries by which a service knows them.

A token has 256 random bits, so its plain SHA-256 is safe to store: there is nothing to guess from a dictionary,
which is what slow password hashes are for.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

PREFIX = "pl_"
"""Begins every token, so that secret scanners and people recognize one."""
NAME_PATTERN = r"^[\w.-]{1,64}$"
"""Allowed names of a token's holder."""


class TokenScope(StrEnum):
    """Group of methods that a token may call."""

    ROLLOUTS = "rollouts"
    """Generate samples and read them: the data of a run."""
    WEIGHTS = "weights"
    """Change the weights that samples are drawn from."""
    FLEET = "fleet"
    """Control: pause, resume and drain instances, set knobs."""
    METRICS = "metrics"
    """Scrape the metrics port."""
    INTERNAL = "internal"
    """The protocol between services. Not for people or trainers."""


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """Entry of a gateway's `tokens_file`: the hash of one token and what it may do."""

    name: str
    sha256: str
    scopes: tuple[TokenScope, ...]
    requests_per_second: float | None = None
    """Limit on RPCs in the long run; None: no limit."""

    @classmethod
    def of(
        cls, token: str, name: str, scopes: Iterable[str], requests_per_second: float | None = None
    ) -> TokenEntry:
        """Return the entry of a token. ValueError names the field that is wrong."""
        if not re.fullmatch(NAME_PATTERN, name):
            raise ValueError(f"name: {name!r} must be 1 to 64 letters, digits, dots, underscores or dashes")
        wanted, known = sorted(set(scopes)), [scope.value for scope in TokenScope]
        for scope in wanted:
            if scope not in known:
                raise ValueError(f"scopes: {scope!r} must be one of {', '.join(map(repr, known))}")
        if not wanted:
            raise ValueError(f"scopes: at least one of {', '.join(map(repr, known))} is needed")
        if requests_per_second is not None and not 0 < requests_per_second < float("inf"):
            raise ValueError(f"requests_per_second: {requests_per_second} must be above 0 and finite")
        return cls(name, hash_token(token), tuple(map(TokenScope, wanted)), requests_per_second)


def new_token() -> str:
    """Return a new random token."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_token(token: str) -> str:
    """Return the SHA-256 of a token in hexadecimal, which is all that services store of it."""
    return hashlib.sha256(token.encode()).hexdigest()
