-- drop_delayed: delayed messages are thrown away before they are sent.
-- KEYS: 1 delayed, 2 due, 3 due_until
-- ARGV: for each its member of `due`
-- Returns: {the id up to which `delayed` is in `due`, or "", then for each "DROPPED", or "GONE": it does not wait (any
--          more)}
-- Why Lua: entry and place in `due` go together, and one that is sent at this very moment is not told as dropped.
-- Memory: works when full
redis.call('XLEN', KEYS[1]) -- what is no stream, or no sorted set, fails here, before anything has changed
redis.call('ZREM', KEYS[2], '') -- removes nothing: a write that needs no memory (includes/at_full_memory.lua)
local reply = {redis.call('GET', KEYS[3]) or ''}
for at = 1, #ARGV do
  reply[at + 1] = redis.call('XDEL', KEYS[1], ARGV[at]) == 1 and 'DROPPED' or 'GONE'
  redis.call('ZREM', KEYS[2], ARGV[at])
end
return reply
