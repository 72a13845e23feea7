-- rejoin: after the group was lost and made again, entries that owners still have in processing come back as new, under `master`.
--         They go back to their owners: neither index nor inbox changes, because both still name them.
-- KEYS: 1 stream, 2 leader, 3 tickets
-- ARGV: 1 group, 2 epoch, then for each entry: ticket, id
-- Returns: {"FENCED"} or {"OK", {ids that nobody has in processing any more}}
-- Why Lua: an owner may acknowledge between our look at the index and the claim.
-- Memory: works when full
--- @include leads
--- @include record
if not leads(KEYS[2], ARGV[2]) then return {'FENCED'} end
local over = {}
for at = 3, #ARGV, 2 do
  local ticket, id = ARGV[at], ARGV[at + 1]
  local record = redis.call('HGET', KEYS[3], ticket)
  local owner, fence, ids
  if record then owner, fence, ids = read_record(record) end
  local names_it = owner and string.find(' ' .. ids .. ' ', ' ' .. id .. ' ', 1, true)
  if owner == 'halted' then names_it = string.match(ids, '^%S+') == id end -- the others of its record are under `master`
  if names_it and owner ~= 'returned' and owner ~= 'tail' then
    redis.call('XCLAIM', KEYS[1], ARGV[1], owner, '0', id, 'JUSTID')
  else
    over[#over + 1] = id
  end
end
return {'OK', over}
