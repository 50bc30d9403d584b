"""Requests of attackers over HTTP, as data, and what sends them."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.hostile.answers import CLOSED, UNANSWERED, Answer, http_answer
from tests.hostile.rig import ATTACKER, MOVER, Rig, bearer, together
from tests.hostile.watching import ask

WAIT = 60.0
"""Seconds for which an attacker waits for an answer."""
SOURCE = "127.0.0.2"
"""Address of an attacker; an honest tenant has another one."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
UPDATES = ("/pause_generation", "/update_weights", "/update_weights_from_disk")
"""Routes with a body that a token for weights opens."""


@dataclass(frozen=True)
class Sent:
    """A request."""

    path: str
    body: Callable[[], bytes] | bytes | None = None
    method: str = "POST"
    caller: str = ATTACKER
    headers: dict[str, str] = field(default_factory=dict)
    facade: str = "facade"

    def __call__(self, rig: Rig, _: int = 1) -> list[Answer]:
        """Send it on a connection of its own."""
        content = self.body() if callable(self.body) else self.body
        headers = {"content-type": "application/json"} if content is not None else {}
        if self.caller:
            # In a run of its own, unless it says otherwise.
            headers |= {"x-paceline-run": f"{self.caller}-http", **bearer(self.caller)}
        headers |= self.headers
        try:
            found = ask(rig.address(self.facade), self.method, self.path, content, headers, WAIT, SOURCE)
        except TimeoutError:
            return [Answer(UNANSWERED, to=self.path)]
        except (OSError, http.client.HTTPException) as error:
            return [Answer(CLOSED, str(error), to=self.path)]
        return [http_answer(*found, to=self.path)]


def sent(path: str, caller: str = ATTACKER, **body: Any) -> Sent:
    """Return a request with a body in JSON."""
    return Sent(path, partial(encoded, body), caller=caller)


def encoded(body: Any) -> bytes:
    return json.dumps(body).encode()


def text_of(size: int) -> str:
    """Return a text of so many characters, none of which can be merged with its neighbours."""
    return ("a1" * (size // 2 + 1))[:size]


def each(make: Callable[[int], Iterator[Sent]]) -> Callable[[Rig, int], list[Answer]]:
    """Return what sends requests of a size one after the other."""

    def send(rig: Rig, size: int) -> list[Answer]:
        return [answer for request in make(size) for answer in request(rig)]

    return send


def sized(make: Callable[[int], Sent]) -> Callable[[Rig, int], list[Answer]]:
    """Return what sends one request of a size."""
    return lambda rig, size: make(size)(rig)


def many(make: Callable[[int], Sent], size: int) -> Callable[[Rig, int], list[Answer]]:
    """Return what sends the same request several times at once."""
    return lambda rig, count: together([partial(make(size), rig)] * count)


def caller_of(path: str) -> str:
    """Return whose token opens a route."""
    return MOVER if path in UPDATES else ATTACKER
