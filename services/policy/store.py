"""Settings, ladders and calibrations in Redis.

All keys share one hash tag. What the leader writes is checked against its lease by the scripts themselves, and
every script may be run twice with the effect of once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from services.platform.errors import Aborted, InvalidArgument, ResourceExhausted, Unavailable
from services.policy.knobs import Knobs, Scope, Setting, check, merged, resolved
from services.policy.ladder import Rung

log = structlog.get_logger(__name__)

MAX_SCOPES = 256
"""Scopes with settings of their own that are kept."""
MAX_LADDERS = 64
"""Runs whose ladders are kept: those that climbed last."""

# KEYS: lease, revision, settings. ARGV: token, scope, revision that the change is made from, id of the change,
# knobs, most scopes. A record is "revision change knobs". Answers {1, revision} when the setting is in force, {0,
# revision} when another came between, {-1, scopes} when there are too many.
_SET = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return redis.error_reply('FENCED the lease belongs to ' .. holder) end
local known = redis.call('HGET', KEYS[3], ARGV[2])
local current = 0
if known then
  local revision, change = string.match(known, '^(%d+) (%S+) ')
  current = tonumber(revision)
  if change == ARGV[4] then return {1, current} end
end
if current ~= tonumber(ARGV[3]) then return {0, current} end
if not known and redis.call('HLEN', KEYS[3]) >= tonumber(ARGV[6]) then
  local all = redis.call('HGETALL', KEYS[3])
  for at = 1, #all, 2 do
    if string.match(all[at + 1], ' {}$') then redis.call('HDEL', KEYS[3], all[at]) end
  end
  if redis.call('HLEN', KEYS[3]) >= tonumber(ARGV[6]) then return {-1, redis.call('HLEN', KEYS[3])} end
end
local new = redis.call('INCR', KEYS[2])
redis.call('HSET', KEYS[3], ARGV[2], new .. ' ' .. ARGV[4] .. ' ' .. ARGV[5])
return {1, new}
"""

# KEYS: lease, revision, ladders. ARGV: token, run, rung as JSON, 1 when the cap moved, most ladders. Answers the
# revision. The least recent ladders go.
_CLIMB = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return redis.error_reply('FENCED the lease belongs to ' .. holder) end
local known = redis.call('HGET', KEYS[3], ARGV[2])
redis.call('HSET', KEYS[3], ARGV[2], ARGV[3])
while redis.call('HLEN', KEYS[3]) > tonumber(ARGV[5]) do
  local all, oldest, at = redis.call('HGETALL', KEYS[3]), nil, math.huge
  for i = 1, #all, 2 do
    local time = cjson.decode(all[i + 1]).at
    if time < at then oldest, at = all[i], time end
  end
  redis.call('HDEL', KEYS[3], oldest)
end
if ARGV[4] == '1' and known ~= ARGV[3] then return redis.call('INCR', KEYS[2]) end
return tonumber(redis.call('GET', KEYS[2]) or '0')
"""

# KEYS: lease, revision. ARGV: token, least. Answers the revision, now at least that.
_RAISE = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return redis.error_reply('FENCED the lease belongs to ' .. holder) end
local known = tonumber(redis.call('GET', KEYS[2]) or '0')
if known >= tonumber(ARGV[2]) then return known end
redis.call('SET', KEYS[2], ARGV[2])
return tonumber(ARGV[2])
"""


@dataclass(frozen=True, slots=True)
class Stored:
    """A scope's setting and the revision it was made with."""

    revision: int = 0
    knobs: Setting = field(default_factory=dict)


@dataclass(slots=True)
class Known:
    """All that is kept. `revision` is the latest of any change; `rungs` are the ladders of runs."""

    revision: int = 0
    settings: dict[Scope, Stored] = field(default_factory=dict)
    rungs: dict[str, Rung] = field(default_factory=dict)

    def settings_for(self, model: str, pool: str) -> tuple[Setting, dict[str, Setting]]:
        """What an instance of a model and a pool is to work by, and what runs set over that."""
        named = [Scope("model", model)] if model else []
        named += [Scope("pool", pool)] if pool else []
        shared = merged([self.settings.get(scope, Stored()).knobs for scope in (Scope(), *named)])
        runs = {
            scope.name: stored.knobs
            for scope, stored in self.settings.items()
            if scope.kind == "run" and stored.knobs
        }
        return shared, runs

    def knobs_of(self, run_id: str) -> Knobs:
        """A run's knobs by fleet and run. What is decided for all instances knows no model or pool."""
        scopes = (Scope(), Scope("run", run_id))
        return resolved(Knobs(), [self.settings.get(scope, Stored()).knobs for scope in scopes])

    def caps(self) -> dict[str, int]:
        """What the ladders of runs have reached, of those that are on."""
        return {run_id: rung.cap for run_id, rung in self.rungs.items() if self.knobs_of(run_id).ladder.on}


def lease_key(namespace: str) -> str:
    """The lease of the policy service."""
    return f"{namespace}:{{policy}}:lease"


class KnobStore:
    """Reads for anybody; writes for the holder of the lease, who gives its token."""

    def __init__(self, redis: Redis, namespace: str, token: str = "") -> None:
        self._redis: Any = redis
        self._token = token
        self._lease = lease_key(namespace)
        self._revision = f"{namespace}:{{policy}}:revision"
        self._settings = f"{namespace}:{{policy}}:settings"
        self._ladders = f"{namespace}:{{policy}}:ladders"
        self._calibrations = f"{namespace}:{{policy}}:calibrations"

    async def load(self) -> Known:
        """Everything but the calibrations. Raises what Redis raises."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.get(self._revision).hgetall(self._settings).hgetall(self._ladders)
            revision, settings, ladders = await pipe.execute()
        known = Known(int(revision or 0))
        for key, record in settings.items():
            if (read := _setting(key.decode(), record.decode())) is not None:
                known.settings[read[0]] = read[1]
        for run_id, text in ladders.items():
            if (rung := _rung(text)) is not None:
                known.rungs[run_id.decode()] = rung
        # Redis came back without its counter: what is kept must not be older than it.
        known.revision = max([known.revision, *(each.revision for each in known.settings.values())])
        return known

    async def set(self, scope: Scope, revision: int, knobs: Setting, change: str) -> int:
        """Keep a checked setting made from a revision; the new revision. `change` names the attempt.

        Raises:
            Aborted: the scope was changed since.
            ResourceExhausted: too many scopes have settings.
            Unavailable: another process has the lease.
        """
        text = json.dumps(knobs, separators=(",", ":"), sort_keys=True)
        keys = (self._lease, self._revision, self._settings)
        done, number = await self._run(_SET, keys, scope.key, revision, change, text, MAX_SCOPES)
        if done == 1:
            return int(number)
        if done == 0:
            raise Aborted(
                "STALE_REVISION",
                f"the knobs of {scope} are at revision {number}; the change was made from {revision}",
                current=str(number),
                given=str(revision),
            )
        raise ResourceExhausted(
            "policy scopes", f"{number} scopes have settings; empty one that is not needed"
        )

    async def climb(self, run_id: str, rung: Rung, moved: bool, now: float) -> int:
        """Keep where a run stands on its ladder; the revision. Raises as `set`."""
        text = json.dumps({"cap": rung.cap, "streak": rung.streak, "at": now})
        keys = (self._lease, self._revision, self._ladders)
        return int(await self._run(_CLIMB, keys, run_id, text, int(moved), MAX_LADDERS))

    async def raise_to(self, least: int) -> int:
        """Let the revision be at least this: instances have seen it. The revision. Raises as `set`."""
        return int(await self._run(_RAISE, (self._lease, self._revision), least))

    async def keep_calibrations(self, texts: Mapping[str, str]) -> bool:
        """Keep calibrations by file name, over those of the same name; whether any is another than before."""
        known = await self.calibrations()
        changed = {name: text for name, text in texts.items() if known.get(name) != text}
        if changed:
            await self._redis.hset(self._calibrations, mapping=changed)
        return bool(changed)

    async def calibrations(self) -> dict[str, str]:
        """All calibrations by file name."""
        found = await self._redis.hgetall(self._calibrations)
        return {name.decode(): text.decode() for name, text in found.items()}

    async def _run(self, script: str, keys: tuple[str, ...], *arguments: str | int) -> Any:
        try:
            return await self._redis.eval(script, len(keys), *keys, self._token, *map(str, arguments))
        except ResponseError as error:
            if "FENCED" not in str(error):
                raise
            raise Unavailable("another policy service leads") from error


def _setting(key: str, record: str) -> tuple[Scope, Stored] | None:
    try:
        revision, _, text = record.split(" ", 2)
        knobs = json.loads(text)
        return Scope.of_key(key), Stored(int(revision), check(knobs))
    except (ValueError, TypeError, AttributeError, InvalidArgument) as error:
        # Of a later or an earlier version, perhaps; the others count all the same.
        log.warning("setting_unreadable", scope=key, error=str(error))
        return None


def _rung(text: bytes) -> Rung | None:
    try:
        values = json.loads(text)
        return Rung(int(values["cap"]), int(values["streak"]))
    except (ValueError, TypeError, KeyError) as error:
        log.warning("ladder_unreadable", error=str(error))
        return None
