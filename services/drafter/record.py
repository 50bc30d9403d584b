"""The published drafter as Redis has it. Instances read it when they start; the leading learner writes it.

A plain module: no torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from services.drafter.keys import DrafterKeys
from services.platform.errors import Unavailable
from services.platform.store import Keys

log = structlog.get_logger(__name__)

# KEYS: lease, version. ARGV: token, least. Answers a version that was never given out and is above `least`.
_NEXT = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return redis.error_reply('FENCED the lease belongs to ' .. holder) end
local known = tonumber(redis.call('GET', KEYS[2]) or '0')
local new = math.max(known, tonumber(ARGV[2])) + 1
redis.call('SET', KEYS[2], string.format('%d', new))
return new
"""

# KEYS: lease, published. ARGV: token, record.
_PUT = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return redis.error_reply('FENCED the lease belongs to ' .. holder) end
redis.call('SET', KEYS[2], ARGV[2])
return 1
"""


@dataclass(frozen=True, slots=True)
class Published:
    """A drafter that instances are to use.

    `path` is a folder in the form of services/drafter/checkpoint.py and `sha256` that of its model.safetensors in
    hexadecimal. `acceptance_length` was measured on held-out rollouts before it was published (tokens a
    verification), `policy_version` is the policy's that it learned from last, `at` is in unix seconds.
    """

    version: int
    path: str
    sha256: str
    acceptance_length: float = 0.0
    policy_version: int = 0
    at: float = 0.0
    before: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class History:
    """The published drafter, and those that were published before it, the latest first, to go back to."""

    current: Published | None = None
    earlier: tuple[Published, ...] = ()

    def to_json(self) -> str:
        """The record as one JSON object."""
        current = asdict(self.current) if self.current is not None else None
        return json.dumps({"current": current, "earlier": [asdict(each) for each in self.earlier]})

    @classmethod
    def from_json(cls, text: str | bytes) -> History:
        """Reads `to_json`; fields of a later version are ignored. ValueError when it is no such record."""
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError("not a record of a drafter")
        current, earlier = values.get("current"), values.get("earlier") or ()
        return cls(_published(current) if current else None, tuple(map(_published, earlier)))

    def with_published(self, new: Published, keep: int) -> History:
        """After a publication; `keep` of the earlier ones stay."""
        before = (self.current,) if self.current is not None else ()
        return History(new, (*before, *self.earlier)[:keep])

    def rolled_back(self) -> History | None:
        """After going back to the one before; None when there is none. What was left is not kept."""
        return History(self.earlier[0], self.earlier[1:]) if self.earlier else None


async def read_published(store: Redis, keys: Keys) -> Published | None:
    """The drafter that instances are to use; None when none was published. Raises what Redis raises.

    A record that cannot be read counts as none: who starts then goes on with what it was started with.
    """
    return (await read_history(store, keys)).current


async def read_history(store: Redis, keys: Keys) -> History:
    """As `read_published`, with those before it."""
    text: Any = await store.get(DrafterKeys(keys.namespace).published)
    if text is None:
        return History()
    try:
        return History.from_json(text)
    except (ValueError, TypeError) as error:
        log.warning("drafter_record_unreadable", error=str(error))
        return History()


class RecordWriter:
    """Writes as the holder of the lease, who gives its token. Methods raise what Redis raises, and Unavailable when
    another process leads; they may be repeated."""

    def __init__(self, redis: Redis, namespace: str, token: str) -> None:
        self._redis: Any = redis
        self._keys = DrafterKeys(namespace)
        self._token = token

    async def next_version(self, least: int) -> int:
        """A version that nobody was ever given, above `least`."""
        return int(await self._run(_NEXT, (self._keys.lease, self._keys.version), least))

    async def put(self, history: History) -> None:
        """From here on instances that start use `history.current`."""
        await self._run(_PUT, (self._keys.lease, self._keys.published), history.to_json())

    async def _run(self, script: str, keys: Sequence[str], *arguments: str | int) -> Any:
        try:
            return await self._redis.eval(script, len(keys), *keys, self._token, *map(str, arguments))
        except ResponseError as error:
            if "FENCED" not in str(error):
                raise
            raise Unavailable("another learner leads") from error


def _published(values: Any) -> Published:
    if not isinstance(values, dict) or not {"version", "path", "sha256"} <= values.keys():
        raise ValueError("not a published drafter")
    known = {each.name for each in fields(Published)}
    chosen = {name: value for name, value in values.items() if name in known}
    return Published(**chosen | {"before": tuple(chosen.get("before", (0, 0, 0)))})
