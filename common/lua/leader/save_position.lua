-- save_position: note the group's position outside of the group, for the day it is lost; also for trimmers of any
--                group.
-- KEYS: 1 stream, 2 leader, 3 position, 4 groups of the stream
-- ARGV: 1 group, 2 epoch
-- Returns: {"FENCED"} or {"OK", last delivered id, oldest pending id or ""}
-- Why Lua: both ids must be of one moment: a floor above an entry that is still pending would lose that entry.
-- Memory: works when full
--- @include leads
--- @include util
--- @include at_full_memory
if not leads(KEYS[2], ARGV[2]) then return {'FENCED'} end
local oldest = redis.call('XPENDING', KEYS[1], ARGV[1])[2] or ''
local delivered
for _, facts in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local group = {}
  for at = 1, #facts, 2 do group[facts[at]] = facts[at + 1] end
  if group['name'] == ARGV[1] then delivered = group['last-delivered-id'] end
end
at_full_memory(KEYS[3])
redis.call('HSET', KEYS[3], 'delivered', delivered, 'oldest_pending', oldest)
redis.call('HSET', KEYS[4], ARGV[1], (oldest ~= '' and is_above(delivered, oldest)) and oldest or delivered)
return {'OK', delivered, oldest}
