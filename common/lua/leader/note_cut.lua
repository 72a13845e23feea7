-- note_cut: count entries that are gone, and that no leader has handed over.
-- KEYS: 1 stream, 2 leader, 3 counters
-- ARGV: 1 group, 2 epoch, 3 number of entries that were added after id 4 ("": that are known to be gone) up to id 5, of
--       which 6 were read here
-- Returns: {"FENCED"} or {"OK", number of those that are counted now}
-- Why Lua: an entry of these that is still there was read by others, and one that was counted before (count_cut) must
--          not be counted again. Of more than 5,000 that are there, the others are told as one.
-- Memory: works when full
--- @numbers large 3 6
if not leads(KEYS[2], ARGV[2]) then return {'FENCED'} end
local cut, at, field = tonumber(ARGV[3]), ARGV[4], 'cut_at ' .. KEYS[1]
local position, number, of_all = string.match(redis.call('HGET', KEYS[3], field) or '', '^(%S+) (%d+) (%d+)$')
if at ~= '' then
  local is_all, left = each_entry('XRANGE', KEYS[1], '(' .. at, ARGV[5], 5000, function() end)
  cut = is_all and cut - math.max(left, tonumber(ARGV[6])) or 1
  if position == at then cut = cut - tonumber(number) end
  position, number = ARGV[5], 0
end
if cut <= 0 then return {'OK', 0} end
at_full_memory(KEYS[3])
count_up(KEYS[3], 'unread_cut', cut)
local noted = string.format('%s %.0f %.0f', position or ARGV[5], number or 0, (tonumber(of_all) or 0) + cut)
redis.call('HSET', KEYS[3], field, noted)
return {'OK', cut}
