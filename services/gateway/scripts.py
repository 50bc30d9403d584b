"""Lua scripts of the journal and the version record.

Every script may be run twice with the same arguments with the effect of once, because a client that lost
its connection cannot know whether the first was run. Those that write for a leader check that it is still
the leader ("FENCED"), so that one that was frozen cannot write over its successor.
"""

# KEYS: meta. ARGV: owner, fingerprint, request, accepted_at, total, lenience (empty for none).
# Returns the fingerprint, the total and the lenience that are now recorded, and 1 if this call made the record.
CREATE = """
local known = redis.call('HMGET', KEYS[1], 'fingerprint', 'total', 'lenience')
if known[1] then return {known[1], known[2], known[3], 0} end
redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'fingerprint', ARGV[2], 'request', ARGV[3],
           'accepted_at', ARGV[4], 'total', ARGV[5], 'lenience', ARGV[6])
return {ARGV[2], ARGV[5], ARGV[6], 1}
"""

# KEYS: meta, events, done, cancels, then tokens and logprobs of each extension, then of each ended sample.
# ARGV: owner, retention in seconds, now, number of extensions, then (byte offset, tokens, logprobs) of
# each, then (sample index, payload) of each ended sample.
# Returns the cursors of the ended samples. A finished batch gets its time of expiry here.
WRITE = """
local owner = redis.call('HGET', KEYS[1], 'owner')
if not owner then return redis.error_reply('GONE the batch is not in the journal') end
if owner ~= ARGV[1] then return redis.error_reply('FENCED the batch belongs to ' .. owner) end
local key, arg = 5, 5
for _ = 1, tonumber(ARGV[4]) do
  redis.call('SETRANGE', KEYS[key], ARGV[arg], ARGV[arg + 1])
  redis.call('SETRANGE', KEYS[key + 1], ARGV[arg], ARGV[arg + 2])
  key, arg = key + 2, arg + 3
end
local cursors = {}
while arg < #ARGV do
  local cursor = redis.call('HGET', KEYS[3], ARGV[arg])
  if not cursor then
    cursor = redis.call('RPUSH', KEYS[2], ARGV[arg + 1])
    redis.call('HSET', KEYS[3], ARGV[arg], cursor)
  end
  redis.call('DEL', KEYS[key], KEYS[key + 1])
  cursors[#cursors + 1] = tonumber(cursor)
  key, arg = key + 2, arg + 2
end
if redis.call('LLEN', KEYS[2]) >= tonumber(redis.call('HGET', KEYS[1], 'total')) then
  redis.call('HSETNX', KEYS[1], 'finished_at', ARGV[3])
  for at = 1, 4 do redis.call('EXPIRE', KEYS[at], ARGV[2]) end
end
return cursors
"""

# KEYS: lease, then one key per value. ARGV: token, then values; an empty value deletes its key.
RECORD = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return redis.error_reply('FENCED the lease belongs to ' .. holder) end
for at = 2, #KEYS do
  if ARGV[at] == '' then redis.call('DEL', KEYS[at]) else redis.call('SET', KEYS[at], ARGV[at]) end
end
return 1
"""

# KEYS: lease, then a key. ARGV: token, value, seconds until it expires.
KEEP = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return redis.error_reply('FENCED the lease belongs to ' .. holder) end
redis.call('SET', KEYS[2], ARGV[2], 'EX', ARGV[3])
return 1
"""
