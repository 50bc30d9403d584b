"""Store the settings of knobs and the ladders of runs in Redis.

All keys share one hash tag. Scripts check every write of the leader against its lease, and running one twice has
the same effect as once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import structlog
from redis.asyncio import Redis

from services.contracts.errors import Aborted, InvalidArgument, ResourceExhausted
from services.contracts.fenced import FencedScripts
from services.contracts.knobs import Knobs, KnobScope, Setting, check, merged, resolved

log = structlog.get_logger(__name__)

MAX_SCOPES = 256
"""Most scopes with settings."""
MAX_LADDERS = 64
"""Most runs whose ladders are kept; the least recently moved ladder is evicted."""

# KEYS: lease, revision, settings. ARGV: term, scope, revision that the change is made from, id of the change,
# knobs, most scopes. A record is "revision change knobs". Returns {1, revision} if the setting is in force,
# {0, revision} if another change came first, {-1, scopes} if there are too many.
_SET = """
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

# KEYS: lease, revision, ladders. ARGV: term, run, rung as JSON, 1 when the cap moved, most ladders. Returns
# the revision. Evicts the least recent ladders.
_CLIMB = """
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

# KEYS: lease, revision. ARGV: term, least. Returns the revision, raised to at least that.
_RAISE = """
local known = tonumber(redis.call('GET', KEYS[2]) or '0')
if known >= tonumber(ARGV[2]) then return known end
redis.call('SET', KEYS[2], ARGV[2])
return tonumber(ARGV[2])
"""


@dataclass(frozen=True, slots=True)
class StoredSetting:
    """Setting of a scope, and the revision of its last change."""

    revision: int = 0
    knobs: Setting = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rung:
    """Position of a run on its ladder of draft lengths.

    `cap` is the length reached. `streak` counts consecutive steps that suggest the same move: positive for a higher
    cap, negative for a lower one.
    """

    cap: int
    streak: int = 0


@dataclass(slots=True)
class KnobRecords:
    """Settings and ladders in force, with the `revision` of the latest change; `rungs` has the ladders of runs."""

    revision: int = 0
    settings: dict[KnobScope, StoredSetting] = field(default_factory=dict)
    rungs: dict[str, Rung] = field(default_factory=dict)

    def settings_for(self, model: str, pool: str) -> tuple[Setting, dict[str, Setting]]:
        """Return the setting of the instances of a model and pool, and the settings of runs on top of it."""
        named = [KnobScope("model", model)] if model else []
        named += [KnobScope("pool", pool)] if pool else []
        shared = merged([self.settings.get(scope, StoredSetting()).knobs for scope in (KnobScope(), *named)])
        runs = {
            scope.name: stored.knobs
            for scope, stored in self.settings.items()
            if scope.kind == "run" and stored.knobs
        }
        return shared, runs

    def knobs_of(self, run_id: str) -> Knobs:
        """Return a run's knobs by fleet and run, for decisions for all instances, which ignore model and pool."""
        scopes = (KnobScope(), KnobScope("run", run_id))
        return resolved(Knobs(), [self.settings.get(scope, StoredSetting()).knobs for scope in scopes])

    def caps(self) -> dict[str, int]:
        """Return the draft caps that the ladders of runs have reached, if they are on."""
        return {run_id: rung.cap for run_id, rung in self.rungs.items() if self.knobs_of(run_id).ladder.on}


def lease_key(namespace: str) -> str:
    """Return the key of the policy service's lease."""
    return f"{namespace}:{{policy}}:lease"


class KnobStore:
    """Store in Redis. Any process reads; only the holder of the lease, which gives its `term`, writes."""

    def __init__(self, redis: Redis, namespace: str, term: int = 0) -> None:
        self._redis: Any = redis
        self._scripts = FencedScripts(redis, lease_key(namespace), term, "policy service")
        self._revision = f"{namespace}:{{policy}}:revision"
        self._settings = f"{namespace}:{{policy}}:settings"
        self._ladders = f"{namespace}:{{policy}}:ladders"

    async def load(self) -> KnobRecords:
        """Return all settings and ladders. Raises errors of Redis."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.get(self._revision).hgetall(self._settings).hgetall(self._ladders)
            revision, settings, ladders = await pipe.execute()
        known = KnobRecords(int(revision or 0))
        for key, record in settings.items():
            if (read := _setting(key.decode(), record.decode())) is not None:
                known.settings[read[0]] = read[1]
        for run_id, text in ladders.items():
            if (rung := _rung(text)) is not None:
                known.rungs[run_id.decode()] = rung
        # Redis may have lost its counter, which must not be below the revisions of settings.
        known.revision = max([known.revision, *(each.revision for each in known.settings.values())])
        return known

    async def set(self, scope: KnobScope, revision: int, knobs: Setting, change: str) -> int:
        """Store a checked setting made from a revision, and return the new one; `change` identifies the attempt.

        Raises:
            Aborted: the scope has changed since.
            ResourceExhausted: too many scopes have settings.
            Unavailable: another process has the lease.
        """
        text = json.dumps(knobs, separators=(",", ":"), sort_keys=True)
        keys = (self._revision, self._settings)
        done, number = await self._scripts.run(_SET, keys, scope.key, revision, change, text, MAX_SCOPES)
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
        """Store the rung of a run's ladder and return the revision. Raises as `set`."""
        text = json.dumps({"cap": rung.cap, "streak": rung.streak, "at": now})
        keys = (self._revision, self._ladders)
        return int(await self._scripts.run(_CLIMB, keys, run_id, text, int(moved), MAX_LADDERS))

    async def raise_to(self, least: int) -> int:
        """Raise the revision to at least `least`, which instances have seen, and return it. Raises as `set`."""
        return int(await self._scripts.run(_RAISE, (self._revision,), least))


def _setting(key: str, record: str) -> tuple[KnobScope, StoredSetting] | None:
    try:
        revision, _, text = record.split(" ", 2)
        knobs = json.loads(text)
        return KnobScope.of_key(key), StoredSetting(int(revision), check(knobs))
    except (ValueError, TypeError, AttributeError, InvalidArgument) as error:
        # Possibly of another version; the other settings still apply.
        log.warning("setting_unreadable", scope=key, error=str(error))
        return None


def _rung(text: bytes) -> Rung | None:
    try:
        values = json.loads(text)
        return Rung(int(values["cap"]), int(values["streak"]))
    except (ValueError, TypeError, KeyError) as error:
        log.warning("ladder_unreadable", error=str(error))
        return None
