-- move_delayed: delayed messages are due at another time, in the order in which they are named, or are thrown away
--               before they are sent.
-- KEYS: 1 delayed, 2 due, 3 due_until
-- ARGV: 1 ms since the epoch ("": they are thrown away), 2 number of the first of them among all that are moved
--       together, 3 by how much the number grows from one to the next: 1 or -1, then for each its member of `due`
-- Returns: {the id up to which `delayed` is in `due`, or "", then for each, from the first one (fewer than given where
--          they are large): "MOVED", "DROPPED", "GONE": it does not wait (any more), or "HELD": no leader has put it in
--          order yet}. GONE and HELD change nothing.
-- Why Lua: what is sent at this very moment is either gone before, or not due any more (send_delayed looks again), and
--          is not told as dropped. Repeating the call repeats the move.
-- Memory: works when full
--- @numbers large 2
redis.call('XLEN', KEYS[1]) -- what is no stream fails here, before anything has changed
redis.call('ZREM', KEYS[2], '') -- removes nothing: a write that needs no memory (includes/at_full_memory.lua)
local at_ms, step = ARGV[1] ~= '' and whole(ARGV[1], 1e15), ARGV[3] == '-1' and -1 or whole(ARGV[3], 1)
local function drop(member)
  redis.call('ZREM', KEYS[2], member)
  return redis.call('XDEL', KEYS[1], member) == 1 and 'DROPPED' or 'GONE'
end
local function move(member, number)
  if not body_of(KEYS[1], member) then return drop(member) end -- deleted by hand
  if not redis.call('ZSCORE', KEYS[2], member) then return 'HELD' end
  -- A thousandth apart: of one time they would be in the order of their ids, and no longer in that of their times.
  redis.call('ZADD', KEYS[2], 'XX', string.format('%.3f', at_ms + (ARGV[2] + step * number) / 1000), member)
  return 'MOVED'
end
local reply = {redis.call('GET', KEYS[3]) or ''}
for at = 4, #ARGV do
  if not has_room() then break end
  reply[at - 2] = at_ms and move(ARGV[at], at - 4) or drop(ARGV[at])
end
return reply
