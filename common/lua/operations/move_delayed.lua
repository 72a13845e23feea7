-- move_delayed: delayed messages are due at another time, in the order in which they are named.
-- KEYS: 1 delayed, 2 due, 3 due_until
-- ARGV: 1 ms since the epoch, 2 number of the first of them among all that are moved together, 3 by how much the number
--       grows from one to the next: 1 or -1, then for each its member of `due`
-- Returns: {the id up to which `delayed` is in `due`, or "", then for each, from the first one (fewer than given where
--          they are large): "MOVED", "GONE": it does not wait (any more), or "HELD": no leader has put it in order
--          yet}. GONE and HELD change nothing.
-- Why Lua: what is sent at this very moment is either gone before, or not due any more (send_delayed looks again).
--          Repeating the call repeats the move.
-- Memory: refused when full
--- @numbers large 1 2
redis.call('XLEN', KEYS[1]) -- what is no stream fails here, before anything has changed
local at_ms, first, step = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3] == '-1' and -1 or whole(ARGV[3], 1)
local reply = {redis.call('GET', KEYS[3]) or ''}
for at = 4, #ARGV do
  if not has_room() then break end
  local member, outcome = ARGV[at], 'MOVED'
  local is_ordered, is_there = redis.call('ZSCORE', KEYS[2], member), body_of(KEYS[1], member)
  if not is_there then
    if is_ordered then redis.call('ZREM', KEYS[2], member) end -- deleted by hand
    outcome = 'GONE'
  elseif not is_ordered then
    outcome = 'HELD'
  else
    -- A thousandth apart: of one time they would be in the order of their ids, and no longer in that of their times.
    redis.call('ZADD', KEYS[2], 'XX', string.format('%.3f', at_ms + (first + step * (at - 4)) / 1000), member)
  end
  reply[at - 2] = outcome
end
return reply
