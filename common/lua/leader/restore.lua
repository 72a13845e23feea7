-- restore: entries that the leader, or the index, knows as unfinished, and that nobody has pending any more, are
--          pending again: somebody acknowledged them by hand, or deleted the name that had them from the group.
-- KEYS: 1 stream, 2 leader, 3 tickets, 4 counters
-- ARGV: 1 group, 2 epoch, then for each ticket: ticket, ids that memory has under `master`, separated by spaces
-- Returns: {"FENCED"} or {"OK", {ids that were claimed again}}; an entry without a body is left to who has its ticket
-- Why Lua: the index and the pending list are of one moment: what the index names and nobody has pending was ended by
--          nobody of ours, because all our scripts change both. Index, fences and inboxes stay as they are: the owner
--          has the entry, and runs it.
-- Memory: works when full
--- @include leads util group records at_full_memory
if not leads(KEYS[2], ARGV[2]) then return {'FENCED'} end
local stream, group, restored = KEYS[1], ARGV[1], {}
at_full_memory(KEYS[4])

local function ensure(id, name)
  if nobody_has(stream, group, id) and claim_again(stream, group, name, id) then
    restored[#restored + 1] = id
  end
end

for at = 3, #ARGV, 2 do
  local record = redis.call('HGET', KEYS[3], ARGV[at])
  local owner, _, ids
  if record then owner, _, ids = read_record(record) end
  if owner then
    local name = is_given_back(owner) and 'master' or owner
    for id in string.gmatch(ids, '%S+') do
      ensure(id, name)
      if owner == 'halted' then name = 'master' end -- only its first id waits for an operator
    end
  end
  for id in string.gmatch(ARGV[at + 1], '%S+') do ensure(id, 'master') end
end
count_up(KEYS[4], 'restored', #restored)
return {'OK', restored}
