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
-- Why Lua: XAUTOCLAIM takes an entry from any owner. The owners are read before, and entries of a living lease or a
--          reserved name (`halted`, `master`) go back in the same step. XAUTOCLAIM scans 10 x COUNT entries per call:
--          without the cursor, entries beyond that are never found. Where all of these have an owner it claims none:
--          a million parked entries would be as many lines in the append-only file at each pass, and their
--          waiting time would be lost.
-- Memory: works when full
--- @include leads util ids group bodies ticket_of records index answer letter
--- @numbers large 3, count 5 7, large 8
if not leads(KEYS[2], ARGV[2]) then return {'FENCED'} end
redis.call('XLEN', KEYS[3]) -- what is no stream, or no hash, fails here, before anything has changed
redis.call('HLEN', KEYS[4])
local stream, group = KEYS[1], ARGV[1]
local count, field, longest, most = tonumber(ARGV[5]), ARGV[6], tonumber(ARGV[7]), tonumber(ARGV[8])
local reserved, living = {master = true, halted = true}, {}
for i = 12, #ARGV do
  if redis.call('EXISTS', KEYS[i - 6]) == 1 then living[ARGV[i]] = true end
end
local rows, owners, idle_ms, strays, gone = {}, {}, {}, {}, {}
local function look()
  rows = redis.call('XPENDING', stream, group, ARGV[4], '+', 10 * count)
  for _, row in ipairs(rows) do owners[row[1]], idle_ms[row[1]] = row[2], row[3] end
end
local function is_looked_after(owner) return reserved[owner] or living[owner] end
-- What is above the group's position, the leader is given (again), in its place.
local delivered = group_facts(stream, group)['last-delivered-id']
local function comes_later(id) return is_above(id, delivered) or ARGV[11] ~= '' and is_above(id, ARGV[11]) end
-- Somebody took it by hand from its owner, who lives, has it, and acknowledges it. Under `master` the leader would
-- hand it over once more.
local function owner_in_index(id, ticket)
  if type(ticket) == 'table' then ticket = ticket[1] end
  local record = ticket and redis.call('HGET', KEYS[4], ticket)
  local owner, _, ids
  if record then owner, _, ids = read_record(record) end
  return owner and living[owner] and string.find(' ' .. ids .. ' ', ' ' .. id .. ' ', 1, true) and owner
end
local function body_is_gone(id)
  bury(KEYS[3], id, '', 'body_gone', '', '0', owners[id] or '', now_ms(), now_ms(), nil)
  redis.call('XACK', stream, group, id)
  gone[#gone + 1] = id
end
look()
-- An idle time of 0 ms also marks an entry that was delivered at a time still to come, because the clock was set back:
-- it would not be found for as long as the step. Touched, it counts as idle from now on. An entry that Redis >= 7 does
-- not claim it has dropped, because its body is gone.
for _, row in ipairs(rows) do
  local id, owner, idle = unpack(row)
  local is_stray = idle == 0 and not is_looked_after(owner)
  if is_stray and #redis.call('XCLAIM', stream, group, owner, '0', id, 'JUSTID') == 0 then body_is_gone(id) end
end
if #gone > 0 then look() end -- XAUTOCLAIM reaches as many entries further now: whose are these?
local least_ms = '9007199254740992'
for _, row in ipairs(rows) do
  local is_idle = row[3] >= tonumber(ARGV[3])
  if is_idle and not (is_looked_after(row[2]) or comes_later(row[1])) then least_ms = ARGV[3] end
end
local found = redis.call('XAUTOCLAIM', stream, group, 'master', least_ms, ARGV[4], 'COUNT', count, 'JUSTID')
local following
for _, id in ipairs(found[2]) do
  local owner = owners[id] or ''
  if is_looked_after(owner) then
    if owner ~= 'master' then redis.call('XCLAIM', stream, group, owner, '0', id, 'JUSTID') end
  elseif owner ~= '' and (comes_later(id) or not has_room()) then -- the next call begins here
    redis.call('XCLAIM', stream, group, owner, '0', id, 'IDLE', idle_ms[id], 'JUSTID')
    following = following or id
  else
    local fields = body_of(stream, id)
    if fields then
      local ticket, n = ticket_of(fields, field, longest, most, ARGV[9], ARGV[10]), #strays
      local living_owner = owner_in_index(id, ticket)
      if living_owner then
        redis.call('XCLAIM', stream, group, living_owner, '0', id, 'JUSTID')
      else
        strays[n + 1], strays[n + 2], strays[n + 3] = id, ticket, owner
      end
    else
      body_is_gone(id) -- before 7.0 the entry stays in the pending list
    end
  end
end
-- From 7.0 on Redis has dropped these, also those of a living owner and fresh ones. A living owner ends its own: the
-- index names them.
for _, id in ipairs(found[3] or {}) do
  if not living[owners[id] or ''] then body_is_gone(id) end
end
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
return {'OK', following or found[1], strays, gone}
