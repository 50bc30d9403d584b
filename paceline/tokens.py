"""Bearer tokens, and the entries with which a service recognizes them.

A token has 256 random bits, so its plain SHA-256 is safe to store: slow password hashes protect against guessing
from a dictionary, which is impossible here.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

PREFIX = "pl_"
"""Prefix of every token, by which secret scanners and people recognize it."""
NAME_PATTERN = r"^[\w.-]{1,64}$"
"""Allowed names of a token's holder."""
RUN_PATTERN = r"^[A-Za-z0-9._*?-]{1,128}$"
"""Allowed patterns of runs: characters of run ids, `*` for any number of any characters, `?` for one."""
MOST_PATTERNS, MOST_PATTERN_CHARACTERS = 64, 4096
"""Most patterns of one token, and most characters of them: services send them in the metadata of calls."""


class TokenScope(StrEnum):
    """Group of methods that a token may call."""

    ROLLOUTS = "rollouts"
    """Generate samples and read them: the data of a run."""
    WEIGHTS = "weights"
    """Change the weights that samples are drawn from."""
    FLEET = "fleet"
    """Pause, resume and drain instances, and set knobs."""
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
    """Limit on RPCs, on average; None: no limit."""
    runs: tuple[str, ...] = ()
    """Patterns of the runs that it may name; empty: any run."""
    max_queued_samples: int | None = None
    """Most unfinished samples at once; None: no limit."""
    max_queued_tokens: int | None = None
    """Most tokens of these samples together; None: no limit."""

    @classmethod
    def of(
        cls,
        token: str,
        name: str,
        scopes: Iterable[str],
        requests_per_second: float | None = None,
        runs: Iterable[str] = (),
        max_queued_samples: int | None = None,
        max_queued_tokens: int | None = None,
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
        bounds = {"max_queued_samples": max_queued_samples, "max_queued_tokens": max_queued_tokens}
        for field, most in bounds.items():
            if most is not None and most < 1:
                raise ValueError(f"{field}: {most} must be at least 1")
        patterns = tuple(dict.fromkeys(runs))
        _check_patterns(patterns)
        if TokenScope.INTERNAL in wanted and (patterns or any(bounds.values())):
            raise ValueError("scopes: internal is for services, which have no runs and no limits of samples")
        return cls(
            name, hash_token(token), tuple(map(TokenScope, wanted)), requests_per_second, patterns, **bounds
        )


def _check_patterns(runs: tuple[str, ...]) -> None:
    for pattern in runs:
        if not re.fullmatch(RUN_PATTERN, pattern):
            found = f"{pattern[:140]!r} must be 1 to 128 of A-Z a-z 0-9 . _ -, and * or ? for any of them"
            raise ValueError(f"runs: {found}")
    if len(runs) > MOST_PATTERNS or sum(map(len, runs)) > MOST_PATTERN_CHARACTERS:
        found = (
            f"at most {MOST_PATTERNS} patterns with {MOST_PATTERN_CHARACTERS} characters in all are allowed"
        )
        raise ValueError(f"runs: {found}")


def new_token() -> str:
    """Return a new random token."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_token(token: str) -> str:
    """Return the SHA-256 of a token in hexadecimal, which is all that services store of it."""
    return hashlib.sha256(token.encode()).hexdigest()
