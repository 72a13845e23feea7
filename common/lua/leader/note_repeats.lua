-- note_repeats: note the id up to which a group, made again after it was lost, is given entries a second time; or that
--               it is past that.
-- KEYS: 1 leader, 2 position
-- ARGV: 1 epoch, 2 id, or "" when it is past that
-- Returns: {"FENCED"} or {"OK", the id that is noted now, or ""}
-- Why Lua: a late call of a deposed master would take away what its successor has noted, and finished entries would run
--          again after later messages. A higher note stays: the group may be lost once more while it is given what it
--          had lost before.
-- Memory: works when full
--- @include leads util at_full_memory
if not leads(KEYS[1], ARGV[1]) then return {'FENCED'} end
if ARGV[2] == '' then
  redis.call('HDEL', KEYS[2], 'repeats_until')
  return {'OK', ''}
end
local noted = redis.call('HGET', KEYS[2], 'repeats_until')
if noted and is_above(noted, ARGV[2]) then return {'OK', noted} end
at_full_memory(KEYS[2])
redis.call('HSET', KEYS[2], 'repeats_until', ARGV[2])
return {'OK', ARGV[2]}
