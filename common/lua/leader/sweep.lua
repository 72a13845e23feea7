-- sweep: find idle entries that have no living owner, with XAUTOCLAIM, and bring them to `master`.
-- KEYS: 1 stream, 2 leader, 3 dead, 4 tickets, 5 taken, then the leases of the known incarnations,
--       then letters
-- ARGV: 1 group, 2 epoch, 3 least idle time in ms, 4 cursor ("0-0" at first), 5 count, 6 ticket field, 7 longest ticket
--       in bytes, 8 longest message in bytes (0: any), 9 tenant field, 10 priority field ("": none), 11 the highest id
--       to look at ("": any): above it the leader has read entries that must go first, then the known incarnations, in
--       the order of their leases
-- Returns: {"FENCED"} or {"OK", next cursor, {id, ticket (ticket_of), former owner, ...}, {ids whose body was gone}};
--          fewer than asked for where bodies are large. An entry that the index has with a living owner goes back to
--          it.
-- Why Lua: see claim_idle. Entries of a living lease or a reserved name (`halted`, `master`) go back in the same step.
-- Memory: works when full
--- @numbers large 3, count 5 7, large 8
if not leads(KEYS[2], ARGV[2]) then return {'FENCED'} end
redis.call('XLEN', KEYS[3]) -- what is no stream, or no hash, fails here, before anything has changed
redis.call('HLEN', KEYS[4])
local stream, group, highest = KEYS[1], ARGV[1], ARGV[11]
local field, longest, most = ARGV[6], tonumber(ARGV[7]), tonumber(ARGV[8])
local reserved, living, strays, gone = {master = true, halted = true}, {}, {}, {}
for i = 12, #ARGV do
  if redis.call('EXISTS', KEYS[i - 6]) == 1 then living[ARGV[i]] = true end
end
local function is_looked_after(owner) return reserved[owner] or living[owner] end
-- What is above the group's position, the leader is given (again), in its place.
local delivered = group_facts(stream, group)['last-delivered-id']
local function comes_later(id) return is_above(id, delivered) or highest ~= '' and is_above(id, highest) end
-- A living owner ends its own: the index names them.
local function lose(id, owner)
  if living[owner] then return end
  bury(KEYS[3], id, '', 'body_gone', '', '0', owner, now_ms(), now_ms(), nil)
  redis.call('XACK', stream, group, id)
  gone[#gone + 1] = id
end
-- Somebody took it by hand from its owner, who lives, has it, and acknowledges it. Under `master` the leader would
-- hand it over once more.
local function owner_in_index(id, ticket)
  if type(ticket) == 'table' then ticket = ticket[1] end
  local _, owner, _, ids = record_of(KEYS[4], ticket or '')
  return owner and living[owner] and string.find(' ' .. ids .. ' ', ' ' .. id .. ' ', 1, true) and owner
end
local function take_in(id, fields, owner)
  local ticket, n = ticket_of(fields, field, longest, most, ARGV[9], ARGV[10]), #strays
  local living_owner = owner_in_index(id, ticket)
  if living_owner then
    redis.call('XCLAIM', stream, group, living_owner, '0', id, 'JUSTID')
  else
    strays[n + 1], strays[n + 2], strays[n + 3] = id, ticket, owner
  end
end
local count = tonumber(ARGV[5])
local following = claim_idle(
  stream, group, 'master', ARGV[3], ARGV[4], count, is_looked_after, comes_later, take_in, lose)
-- What others have read, above all that was taken, is taken now: no later leader is to be given it again.
local taken = string.match(redis.call('GET', KEYS[5]) or '', '^%d+%-%d+')
local function take(id)
  if taken and is_above(id, taken) and not is_above(id, delivered) then
    taken = id
    redis.call('SET', KEYS[5], taken .. ' ')
  end
end
for at = 1, #strays, 3 do take(strays[at]) end
for _, id in ipairs(gone) do take(id) end
return {'OK', following, strays, gone}
