-- charge: note the attempts of messages whose handler is about to be killed with its process, so that they survive it.
-- KEYS: 1 lease, 2 attempts
-- ARGV: id, attempts so far, and so on
-- Returns: "OK" or "LOST"
-- Why Lua: only the owner may charge; after its lease the next owner counts.
-- Memory: works when full
--- @include at_full_memory
if redis.call('EXISTS', KEYS[1]) == 0 then return 'LOST' end
at_full_memory(KEYS[2])
redis.call('HSET', KEYS[2], unpack(ARGV))
return 'OK'
