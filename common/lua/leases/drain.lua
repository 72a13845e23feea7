-- drain: an incarnation says that it takes no more hand-overs.
-- KEYS: 1 lease, 2 changed, by which the leader hears of it
-- ARGV: 1 lease in ms, 2 incarnation
-- Returns: "OK" or "LOST"
-- Why Lua: the mark is set only on a lease that lives (a revoked one stays revoked); the note in `changed` stops a plan
--          that does not know of it.
-- Memory: works when full
--- @numbers large 1
local state = redis.call('GET', KEYS[1])
if not state then return 'LOST' end
-- A write that needs no memory goes first.
redis.call('PEXPIRE', KEYS[1], state == 'revoked' and redis.call('PTTL', KEYS[1]) or ARGV[1])
if state ~= 'live' then return 'OK' end
redis.pcall('XADD', KEYS[2], 'MAXLEN', '~', '10000', '*', 'consumer', ARGV[2]) -- not told, it is seen a little later
return redis.call('SET', KEYS[1], 'draining', 'XX', 'KEEPTTL') and 'OK' or 'LOST' -- XX: see revoke
