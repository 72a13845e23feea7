-- revoke: a consumer that does not answer its health URL may not renew its lease any more; the lease then ends by
--         itself.
-- KEYS: 1 leader, 2 lease, 3 changed, by which the leader hears of it
-- ARGV: 1 epoch, 2 incarnation
-- Returns: "OK", "FENCED" or "LOST" (there is no lease)
-- Why Lua: the value changes only while the lease lives and while we lead. Its time to live stays, so that no
--          other program waits longer for its end.
-- Memory: works when full
--- @include leads
if not leads(KEYS[1], ARGV[1]) then return 'FENCED' end
local state = redis.call('GET', KEYS[2])
if not state then return 'LOST' end
if state == 'revoked' then return 'OK' end
redis.call('PEXPIRE', KEYS[2], math.max(1, redis.call('PTTL', KEYS[2]))) -- a write that needs no memory goes first
redis.pcall('XADD', KEYS[3], 'MAXLEN', '~', '10000', '*', 'consumer', ARGV[2]) -- not told, it is seen a little later
-- XX: the clock goes on inside a script, and a PEXPIRE whose time has come meanwhile deletes; a lease made anew would
-- have no end.
return redis.call('SET', KEYS[2], 'revoked', 'XX', 'KEEPTTL') and 'OK' or 'LOST'
