-- ack: an owner's finished messages leave the pending list and the index, and their attempts are forgotten; the run log
--      gets their record.
-- KEYS: 1 stream, 2 lease of the incarnation under which the entries were fetched, 3 tickets, 4 attempts, 5 runs,
--       6 errors
-- ARGV: 1 group, 2 incarnation, 3 run-log record ("" = none), 4 length of the run log, 5 the finished ids of all
--       tickets, of each in id order, 6 the number of them of each ticket (both JSON: one long argument costs less than
--       many), then the tickets
-- Returns: {"LOST"} (no lease: all is stale, nothing happened) or {"OK", then of each ticket of which not all was done
--          now: its number among the tickets, and "STALE" (another owner has it) or a list of "OK" / "GONE" per id}
--          The record has the outcome "stale" where another owner has the ticket; without it, that message would be
--          known to be done.
-- Why Lua: XACK does not check the owner; a late call would acknowledge another owner's delivery. While the lease
--          lives its entries cannot have been taken back, so one look at it covers the batch.
-- Memory: works when full
--- @include util records run_log at_full_memory
--- @numbers large 4
if redis.call('EXISTS', KEYS[2]) == 0 then return {'LOST'} end
local stream, group, tickets_key, args = KEYS[1], ARGV[1], KEYS[3], ARGV
local concat, find, match, sub = table.concat, string.find, string.match, string.sub
local finished, sizes = cjson.decode(ARGV[5]), cjson.decode(ARGV[6])
check_sizes(sizes, #finished)
at_full_memory(KEYS[3])
local records = records_of(tickets_key, args, 7, #sizes)
local reply, done, changed, freed = {'OK'}, {}, {}, {}
local n, last, named = 0, 0, {} -- of what is done; of `finished`, the last id of the ticket
-- `theirs`: how many of the refused ids the other owner holds; those we have never acknowledged.
local refused, theirs = {}, 0
-- The pattern of a record of ours. An unreadable record is not ours either.
local OURS = '^' .. string.gsub(ARGV[2], '%W', '%%%0') .. ' %d+ (.*)$'

-- Note what becomes of the ticket's record when only the ids `left` remain of it.
local function shorten(ticket, record, ids, left)
  if left == '' then
    freed[#freed + 1] = ticket
  else
    changed[#changed + 1] = ticket
    changed[#changed + 1] = sub(record, 1, #record - #ids) .. left
  end
end

-- The record is in the order in which the handlers ended. Its numbers are longer than cjson writes them, so only a
-- column is added.
local function with_refusals(run_record)
  local outcomes = {}
  for at, id in ipairs(cjson.decode(run_record).ids) do outcomes[at] = refused[id] and 'stale' or 'done' end
  return sub(run_record, 1, -2) .. ',"outcomes":' .. cjson.encode(outcomes) .. '}'
end

for i = 1, #sizes do
  local ticket, record, first = args[6 + i], records[i], last + 1
  if named[ticket] then error('a ticket is named twice: its record would be looked through each time') end
  named[ticket] = true
  last = last + sizes[i]
  local line = first == last and finished[first] or concat(finished, ' ', first, last)
  local ids = record and match(record, OURS)
  if record and not ids then
    reply[#reply + 1] = i
    reply[#reply + 1] = 'STALE'
    local others = ' ' .. (match(record, '^%S+ %d+ (.*)$') or '') .. ' '
    for k = first, last do
      refused[finished[k]] = true
      if find(others, ' ' .. finished[k] .. ' ', 1, true) then theirs = theirs + 1 end
    end
  elseif ids and (ids == line or sub(ids, 1, #line + 1) == line .. ' ') then
    -- The usual case: what is finished is what was handed over first.
    for k = first, last do
      n = n + 1
      done[n] = finished[k]
    end
    shorten(ticket, record, ids, sub(ids, #line + 2))
  else
    local held, going, answer = {}, {}, {}
    for id in string.gmatch(ids or '', '%S+') do held[id] = true end
    for k = first, last do
      local id = finished[k]
      answer[#answer + 1] = held[id] and 'OK' or 'GONE'
      if held[id] then
        n = n + 1
        done[n] = id
        going[id] = true
      end
    end
    if next(going) then shorten(ticket, record, ids, without(ids, going)) end
    reply[#reply + 1] = i
    reply[#reply + 1] = answer
  end
end
in_chunks(n, function(from, to) redis.call('XACK', stream, group, unpack(done, from, to)) end)
in_chunks(#freed, function(from, to) redis.call('HDEL', tickets_key, unpack(freed, from, to)) end)
in_chunks(#changed, function(from, to) redis.call('HSET', tickets_key, unpack(changed, from, to)) end)
if n > 0 and redis.call('EXISTS', KEYS[4]) == 1 then
  local forgotten = 0
  in_chunks(n, function(from, to)
    forgotten = forgotten + redis.call('HDEL', KEYS[4], unpack(done, from, to))
  end)
  for at = 1, forgotten > 0 and n or 0 do redis.call('HDEL', KEYS[6], done[at], 't' .. done[at]) end
end
-- A batch that comes again, because our reply was lost, has nothing that is done now: its entries are GONE, or of a
-- ticket that another owner has by now for later entries. Its record is there.
if ARGV[3] ~= '' and (n > 0 or (theirs > 0 and theirs == #finished)) then
  note_run(KEYS[5], ARGV[4], next(refused) and with_refusals(ARGV[3]) or ARGV[3])
end
return reply
