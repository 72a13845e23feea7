-- drain: a lease says from now on that nothing is handed over any more: its incarnation drains; or, since it does not
--        answer its health URL, the leader revokes it: it cannot be renewed, and ends by itself.
-- KEYS: 1 lease, 2 changed, by which the leader hears of it, to revoke 3 leader
-- ARGV: 1 incarnation, 2 to drain: lease in ms, to revoke 3 epoch
-- Returns: "OK", "FENCED" or "LOST" (there is no lease)
-- Why Lua: the mark is set only on a lease that lives (a revoked one stays revoked), and while we lead; the note in
--          `changed` stops a plan that does not know of it. A revoked lease keeps its time to live, so that no other
--          program waits longer for its end.
-- Memory: works when full
if ARGV[3] and not leads(KEYS[3], ARGV[3]) then return 'FENCED' end
local state, word = redis.call('GET', KEYS[1]), ARGV[3] and 'revoked' or 'draining'
if not state then return 'LOST' end
local is_revoked = ARGV[3] or state == 'revoked'
local left = is_revoked and math.max(1, redis.call('PTTL', KEYS[1])) or whole(ARGV[2], 1e15)
redis.call('PEXPIRE', KEYS[1], left) -- a write that needs no memory goes first
if state == 'revoked' or state == word then return 'OK' end
tell(KEYS[2], 'consumer', ARGV[1])
-- XX: the clock goes on inside a script, and a PEXPIRE whose time has come meanwhile deletes; a lease made anew would
-- have no end.
return redis.call('SET', KEYS[1], word, 'XX', 'KEEPTTL') and 'OK' or 'LOST'
