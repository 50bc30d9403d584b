"""Lua scripts of the journal, the version record and the leniences.

Every script is idempotent, because a client that lost its connection cannot know whether its script was run. A
script about a batch compares the caller's term with the term of the batch: if the batch has a higher one, a
successor has it ("FENCED"); a lower one is replaced. The other scripts check the lease. So a suspended gateway
cannot overwrite its successor's data.

Redis may forget what it acknowledged: a promoted replica, or a truncated append-only file, lacks the last writes.
Therefore a write states what it expects in Redis, and if that is missing it is refused as a whole ("HOLE", "GONE")
or in part ("torn"). The chunks of a sample are complete if their number and their tokens match, which are written
with each chunk into the same hash.
"""

# KEYS[1]: meta. ARGV[1]: the caller's term.
_FENCE = """
local term = redis.call('HGET', KEYS[1], 'term')
if term and tonumber(term) > tonumber(ARGV[1]) then
  return redis.error_reply('FENCED the batch belongs to term ' .. term)
end
"""

_FENCE_EXISTING = (
    _FENCE
    + """
if not term then return redis.error_reply('GONE the batch is not in the journal') end
"""
)

# A script whose first command frees memory may continue to write in a full Redis.
_MAY_BE_FULL = """
redis.call('HDEL', KEYS[1], 'nothing')
"""

# KEYS: all of a batch, which are meta, events, done, cancels, chunks and adds.
_DROP_CHUNKS = """
local function drop_chunks(index)
  local head = redis.call('HGET', KEYS[5], index)
  if not head then return end
  for number = 0, tonumber(string.match(head, '^%d+')) - 1 do
    redis.call('HDEL', KEYS[5], index .. ':' .. number)
  end
  redis.call('HDEL', KEYS[5], index)
end
"""

# KEYS: all of a batch.
_FINISH = """
local function finish(now, expiry)
  if redis.call('HGET', KEYS[1], 'open') == '1' then return end
  if redis.call('HLEN', KEYS[3]) < tonumber(redis.call('HGET', KEYS[1], 'total')) then return end
  redis.call('HSETNX', KEYS[1], 'finished_at', now)
  for at = 1, #KEYS do redis.call('EXPIRE', KEYS[at], expiry) end
end
"""

_SET_TERM = """
if term ~= ARGV[1] then redis.call('HSET', KEYS[1], 'term', ARGV[1]) end
"""

# KEYS: all of a batch. ARGV: term, fingerprint, request, accepted_at, total, lenience (empty for none), 1 if
# groups may be added (else empty), account (empty for none), then cancellations. Returns 1, also where this term
# has made the same record before; 0 if there is another.
CREATE = (
    _FENCE
    + """
if term then
  return (term == ARGV[1] and redis.call('HGET', KEYS[1], 'fingerprint') == ARGV[2]) and 1 or 0
end
redis.call('HSET', KEYS[1], 'term', ARGV[1], 'fingerprint', ARGV[2], 'request', ARGV[3],
           'accepted_at', ARGV[4], 'total', ARGV[5], 'lenience', ARGV[6], 'open', ARGV[7], 'account', ARGV[8])
redis.call('UNLINK', KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6])
for at = 9, #ARGV do redis.call('RPUSH', KEYS[4], ARGV[at]) end
return 1
"""
)

# KEYS: all of a batch. ARGV: term, number of done samples, 1 to repair the content instead of comparing it,
# seconds until a finished batch expires, now, number of chunks, number of samples to forget, samples of the
# batch (Redis may also have the samples of an addition that was not answered); then (index, number, begin, end,
# payload) of each chunk, the index of each sample to forget, and (index, cursor, chunks, their tokens, payload)
# of each ended sample, whose payload is empty if it has been acknowledged.
# Returns the indexes of the samples whose earlier chunks are missing: now they have none, and have not ended.
WRITE = (
    _FENCE_EXISTING
    + _DROP_CHUNKS
    + _FINISH
    + """
local extensions, forgotten = tonumber(ARGV[6]), tonumber(ARGV[7])
if ARGV[3] == '0' then
  local done = redis.call('HLEN', KEYS[3])
  local trimmed = tonumber(redis.call('HGET', KEYS[1], 'trimmed') or '0')
  if done ~= tonumber(ARGV[2]) or redis.call('HLEN', KEYS[2]) + trimmed ~= done then
    return redis.error_reply('HOLE ' .. done .. ' samples are done')
  end
  local total = tonumber(redis.call('HGET', KEYS[1], 'total'))
  if total < tonumber(ARGV[8]) then return redis.error_reply('HOLE the batch has ' .. total .. ' samples') end
end
"""
    + _SET_TERM
    + """
local arg, torn = 9, {}
for _ = 1, extensions do
  local index, number = ARGV[arg], ARGV[arg + 1]
  local before = number .. ':' .. ARGV[arg + 2]
  local after = string.format('%d', tonumber(number) + 1) .. ':' .. ARGV[arg + 3]
  if number == '0' then drop_chunks(index) end
  local head = redis.call('HGET', KEYS[5], index) or '0:0'
  -- The latter where the same write was made before.
  if head == before or head == after then
    redis.call('HSET', KEYS[5], index .. ':' .. number, ARGV[arg + 4], index, after)
  else
    drop_chunks(index)
    torn[#torn + 1] = tonumber(index)
  end
  arg = arg + 5
end
for _ = 1, forgotten do
  redis.call('HDEL', KEYS[3], ARGV[arg])
  redis.call('HDEL', KEYS[2], ARGV[arg])
  arg = arg + 1
end
while arg < #ARGV do
  local index, head = ARGV[arg], ARGV[arg + 2] .. ':' .. ARGV[arg + 3]
  if ARGV[arg + 2] == '0' or redis.call('HGET', KEYS[5], index) ~= head then drop_chunks(index) end
  if ARGV[arg + 2] ~= '0' and redis.call('HEXISTS', KEYS[5], index) == 0 then
    torn[#torn + 1] = tonumber(index)
  else
    redis.call('HSET', KEYS[3], index, ARGV[arg + 1] .. ':' .. head)
    if ARGV[arg + 4] ~= '' then redis.call('HSET', KEYS[2], index, ARGV[arg + 4]) end
  end
  arg = arg + 5
end
local done = redis.call('HLEN', KEYS[3])
if ARGV[3] ~= '0' then redis.call('HSET', KEYS[1], 'trimmed', done - redis.call('HLEN', KEYS[2])) end
finish(ARGV[5], ARGV[4])
return torn
"""
)

# KEYS: all of a batch. ARGV: term, samples of the batch before and after, groups that are added.
ADD = (
    _FENCE_EXISTING
    + """
local total, open = unpack(redis.call('HMGET', KEYS[1], 'total', 'open'))
if open == '1' and total == ARGV[3] and redis.call('LINDEX', KEYS[6], -1) == ARGV[4] then return 1 end
if open ~= '1' or total ~= ARGV[2] then return redis.error_reply('HOLE the batch has ' .. total .. ' samples') end
"""
    + _SET_TERM
    + """
redis.call('RPUSH', KEYS[6], ARGV[4])
redis.call('HSET', KEYS[1], 'total', ARGV[3])
return 1
"""
)

# KEYS: all of a batch. ARGV: term, samples of the batch, seconds until a finished batch expires, now.
CLOSE = (
    _FENCE_EXISTING
    + _FINISH
    + """
local total = redis.call('HGET', KEYS[1], 'total')
if total ~= ARGV[2] then return redis.error_reply('HOLE the batch has ' .. total .. ' samples') end
"""
    + _MAY_BE_FULL
    + _SET_TERM
    + """
redis.call('HSET', KEYS[1], 'open', '')
finish(ARGV[4], ARGV[3])
return 1
"""
)

# KEYS: all of a batch. ARGV: term, request with all groups, their samples, 1 if groups may be added (else
# empty), and 1 to replace the stored request even if it has as many samples. Drops additions, which are part of
# the request.
MEND = (
    _FENCE_EXISTING
    + """
local total, open = unpack(redis.call('HMGET', KEYS[1], 'total', 'open'))
if ARGV[5] ~= '1' and tonumber(total) >= tonumber(ARGV[3]) and (ARGV[4] == '1' or open ~= '1') then return 0 end
"""
    + _SET_TERM
    + """
redis.call('HSET', KEYS[1], 'request', ARGV[2], 'total', ARGV[3], 'open', ARGV[4])
redis.call('UNLINK', KEYS[6])
return 1
"""
)

# KEYS: all of a batch. ARGV: term, 1 for the request as well.
# Takes over the batch. Returns (fingerprint, accepted_at, total, lenience, open, account, acked, request),
# the fields and values of done, the indexes that have an event, the cancellations, and with the request the
# additions to it; nothing if there is no such batch. Numbers are returned as one text, because a client takes
# microseconds for each element of a list.
ADOPT = (
    _FENCE
    + """
if not term then return false end
"""
    + _MAY_BE_FULL
    + _SET_TERM
    + """
local head = redis.call('HMGET', KEYS[1], 'fingerprint', 'accepted_at', 'total', 'lenience', 'open', 'account',
                        'acked', ARGV[2] == '1' and 'request' or 'nothing')
return {head, table.concat(redis.call('HGETALL', KEYS[3]), ' '), table.concat(redis.call('HKEYS', KEYS[2]), ' '),
        redis.call('LRANGE', KEYS[4], 0, -1), ARGV[2] == '1' and redis.call('LRANGE', KEYS[6], 0, -1) or {}}
"""
)

# KEYS: all of a batch. ARGV: term, cancellation. Returns 0, and records nothing, if the batch has finished.
CANCEL = (
    _FENCE_EXISTING
    + """
if redis.call('HEXISTS', KEYS[1], 'finished_at') == 1 then return 0 end
"""
    + _SET_TERM
    + """
if redis.call('LINDEX', KEYS[4], -1) ~= ARGV[2] then redis.call('RPUSH', KEYS[4], ARGV[2]) end
return 1
"""
)

# KEYS: all of a batch. ARGV: term, acknowledged cursor, seconds until the batch expires (empty: unchanged), then
# indexes of acknowledged samples. Returns the number of events that were removed.
ACK = (
    _FENCE_EXISTING
    + _MAY_BE_FULL
    + _DROP_CHUNKS
    + """
local trimmed = 0
for at = 4, #ARGV do
  trimmed = trimmed + redis.call('HDEL', KEYS[2], ARGV[at])
  drop_chunks(ARGV[at])
end
redis.call('HINCRBY', KEYS[1], 'trimmed', trimmed)
redis.call('HSET', KEYS[1], 'term', ARGV[1], 'acked', ARGV[2])
if ARGV[3] ~= '' then
  for at = 1, #KEYS do redis.call('EXPIRE', KEYS[at], ARGV[3]) end
end
return trimmed
"""
)

# KEYS: all of a batch. ARGV: term.
DISCARD = (
    _FENCE
    + """
return redis.call('UNLINK', unpack(KEYS))
"""
)

# KEYS: format, batches. ARGV: format version, "1" to give an empty journal this version. Returns the version of the
# journal, or the given one if it is empty.
FORMAT = """
local known = redis.call('GET', KEYS[1])
if known then return known end
if redis.call('SCARD', KEYS[2]) > 0 then return '1' end
if ARGV[2] == '1' then redis.call('SET', KEYS[1], ARGV[1]) end
return ARGV[1]
"""

# KEYS: lease, then one key per value. ARGV: term, then values; an empty value deletes its key.
RECORD = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return redis.error_reply('FENCED the lease belongs to ' .. holder) end
for at = 2, #KEYS do
  if ARGV[at] == '' then redis.call('DEL', KEYS[at]) else redis.call('SET', KEYS[at], ARGV[at]) end
end
return 1
"""

# KEYS: lease, then a key. ARGV: term, value, seconds until it expires.
KEEP = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return redis.error_reply('FENCED the lease belongs to ' .. holder) end
redis.call('SET', KEYS[2], ARGV[2], 'EX', ARGV[3])
return 1
"""
