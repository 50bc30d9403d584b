"""Quotas of tokens: what each has in work, counted sample by sample, and what it may have."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from services.contracts.errors import ResourceExhausted
from services.gateway.batches.account import Account
from services.gateway.metrics import GatewayMetrics
from services.platform.security.caller import TokenHolder

_COME_AGAIN = 1.0
"""Seconds until a caller above a quota is to come again; the SDK doubles its waits from there on."""


@dataclass(slots=True, eq=False)
class InUse:
    """Unfinished samples of a token and the most tokens that they may come to, with its limits as last seen."""

    samples: int = 0
    tokens: int = 0
    caller: TokenHolder | None = None


class Accounts:
    """What all tokens have in work. Whoever calls without a token of its own, a service, has no account."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._by_name: dict[str, InUse] = {}
        self._metrics = metrics

    def of(self, name: str) -> InUse:
        """Return what a token has in work."""
        found = self._by_name.get(name)
        if found is None:
            found = self._by_name[name] = InUse()
            for gauge, field in (("grant_samples", "samples"), ("grant_tokens", "tokens")):
                getattr(self._metrics, gauge).labels(name).set_function(partial(getattr, found, field))
        return found

    def note(self, caller: TokenHolder, model_len: int) -> Account:
        """Return the account of a caller, whose limits hold from now on."""
        self.of(caller.name).caller = caller
        return Account(caller.name, model_len)

    def count(self, account: Account | None, samples: int, tokens: int) -> None:
        """Count samples that begin to be unfinished; below 0: that end."""
        if account is not None:
            used = self.of(account.name)
            used.samples += samples
            used.tokens += tokens

    def check(self, account: Account | None, samples: int, tokens: int) -> None:
        """Check that so many more may begin. ResourceExhausted names the limit, what is in use, and the way out."""
        if account is None:
            return
        used = self.of(account.name)
        if (caller := used.caller) is None:
            return
        for resource, most, now, more, what in (
            ("max_queued_samples", caller.max_queued_samples, used.samples, samples, "unfinished samples"),
            (
                "max_queued_tokens",
                caller.max_queued_tokens,
                used.tokens,
                tokens,
                "tokens of unfinished samples",
            ),
        ):
            if most is None or not more or now + more <= most:
                continue
            never = more > most
            way_out = f"ask for at most {most} at once" if never else "come again when some have ended"
            raise ResourceExhausted(
                resource,
                f"{account.name} has {now} {what}; {more} more would exceed {most}, the {resource} of its token: "
                f"{way_out}",
                retry_after=None if never else _COME_AGAIN,
                token=account.name,
                limit=str(most),
                used=str(now),
                wanted=str(more),
            )
