-- rejoin: after the group was lost and made again, entries that it was given before come as new, under `master`.
--         Entries that an owner still has in processing go back to it: neither index nor inbox changes, because both
--         still name them. An entry below all of its owner's was done before, because a ticket is handed over and
--         acknowledged in order: it is acknowledged again, and not run after later ones. But a record may be older than
--         the stream, if that was deleted and came back with lower ids: then it says nothing about them.
-- KEYS: 1 stream, 2 leader, 3 tickets
-- ARGV: 1 group, 2 epoch, then for each entry: ticket, id
-- Returns: {"FENCED"} or {"OK", {ids that the index does not decide: they stay under `master`}, {ids that were done
--          before}, number of the entries, from the first one, that were looked at}: fewer than given where bodies are
--          large
-- Why Lua: an owner may acknowledge between our look at the index and the claim.
-- Memory: works when full
--- @include leads util bodies records
if not leads(KEYS[2], ARGV[2]) then return {'FENCED'} end
local over, done = {}, {}
local function is_below_all(id, ids)
  for held in string.gmatch(ids, '%S+') do
    if not is_above(held, id) then return false end
  end
  return true
end
local found = {}
local function is_of_this_stream(ids)
  if found[ids] == nil then
    found[ids] = false
    for held in string.gmatch(ids, '%S+') do
      found[ids] = found[ids] or body_of(KEYS[1], held) ~= nil
    end
  end
  return found[ids]
end
local looked = 0
for at = 3, #ARGV, 2 do
  if not has_room() then break end
  looked = looked + 1
  local ticket, id = ARGV[at], ARGV[at + 1]
  local record = redis.call('HGET', KEYS[3], ticket)
  local owner, fence, ids
  if record then owner, fence, ids = read_record(record) end
  local names_it = owner and string.find(' ' .. ids .. ' ', ' ' .. id .. ' ', 1, true)
  -- The other ids of a halted ticket's record are under `master`.
  if owner == 'halted' then names_it = string.match(ids, '^%S+') == id end
  if not owner or is_given_back(owner) then
    over[#over + 1] = id -- the ticket has no owner: all its entries run again in order, under a new fence
  elseif names_it then
    redis.call('XCLAIM', KEYS[1], ARGV[1], owner, '0', id, 'JUSTID')
  elseif is_below_all(id, ids) and is_of_this_stream(ids) then
    redis.call('XACK', KEYS[1], ARGV[1], id)
    done[#done + 1] = id
  else
    over[#over + 1] = id -- late rather than never
  end
end
return {'OK', over, done, looked}
