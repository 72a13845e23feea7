-- save_position: note the group's position outside of the group, for the day it is lost; also for trimmers of any
--                group. And look whether anything is amiss: entries cut unread, or taken out of the pending list.
-- KEYS: 1 stream, 2 leader, 3 position, 4 groups of the stream, 5 counters, 6 taken
-- ARGV: 1 group, 2 epoch, 3 how many messages another consumer could take now, as the leader knows
-- Returns: {"FENCED"} or {"OK", last id that was taken, oldest pending id or "", number of entries that were cut before
--          the group was given them (each is counted once)}
-- Why Lua: both ids must be of one moment: a floor above an entry that is still pending would lose that entry.
-- Memory: works when full
--- @numbers large 3
if not leads(KEYS[2], ARGV[2]) then return {'FENCED'} end
local summary, facts = redis.call('XPENDING', KEYS[1], ARGV[1]), group_facts(KEYS[1], ARGV[1])
local oldest, taken, cut = summary[2] or '', string.match(redis.call('GET', KEYS[6]) or '', '^%d+%-%d+'), 0
-- What was read and not taken is in nobody's list: only the leader's memory has it, and a trimmer must not cut it.
local delivered = facts['last-delivered-id']
if taken and is_above(delivered, taken) then delivered = taken end
at_full_memory(KEYS[3])
redis.call('HSET', KEYS[3], 'delivered', delivered, 'oldest_pending', oldest, 'takeable', ARGV[3])
redis.call('HSET', KEYS[4], ARGV[1], (oldest ~= '' and is_above(delivered, oldest)) and oldest or delivered)
cut = count_cut(KEYS[5], KEYS[1], facts)
return {'OK', delivered, oldest, cut}
