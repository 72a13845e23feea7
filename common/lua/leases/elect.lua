-- elect: become the leader of a stream, or take a new epoch as its leader, or resign at a clean stop, so that a standby
--        need not wait for the end of the lease.
-- KEYS: 1 leader, 2 counters, 3 changed, by which standbys hear of it (none, where nobody reads one)
-- ARGV: 1 url of this master, 2 lease in ms (0: resign), 3 the epoch to succeed, or to end ("" = only if there is no
--       leader)
-- Returns: {"ELECTED", epoch}, {"RESIGNED"} or {"HELD", "<epoch> <url>", ms that the lease has left, -1: it has no end}
-- Why Lua: read, compare, number and write are one step; two masters, or one master's delayed call, must never both
--          win.
-- Memory: works when full (without a leader nothing is ever freed)
--- @numbers large 2
local held = redis.call('GET', KEYS[1])
if held and not (ARGV[3] ~= '' and leads(KEYS[1], ARGV[3])) then
  return {'HELD', held, redis.call('PTTL', KEYS[1])}
end
if tonumber(ARGV[2]) == 0 then
  if redis.call('DEL', KEYS[1]) == 1 and KEYS[3] then tell(KEYS[3], 'leader', '') end
  return {'RESIGNED'}
end
at_full_memory(KEYS[2])
local epoch = next_number(KEYS[2], 'epoch')
redis.call('SET', KEYS[1], epoch .. ' ' .. ARGV[1], 'PX', ARGV[2])
if KEYS[3] then tell(KEYS[3], 'leader', epoch) end
return {'ELECTED', epoch}
