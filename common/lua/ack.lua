-- ack: an owner's finished messages leave the pending list and the index; the run log gets their record.
-- KEYS: 1 stream, 2 lease of the incarnation under which the entries were fetched, 3 tickets, 4 attempts, 5 runs
-- ARGV: 1 group, 2 incarnation, 3 run-log record ("" = none), 4 length of the run log, 5 number of tickets, then the tickets, then for each
--       of them its finished ids in id order, separated by spaces
-- Returns: {"LOST"} (no lease: all is stale, nothing happened) or {"OK", then of each ticket of which not all was done now: its number among
--          the tickets, and "STALE" (another owner has it) or a list of "OK" / "GONE" per id}
-- Why Lua: XACK asks nobody's name; anybody's late call would acknowledge somebody else's delivery. While the lease lives its entries
--          cannot have been taken back, so one look at it covers the batch.
-- Memory: works when full
--- @include record
--- @include in_chunks
--- @include records_of
--- @include at_full_memory
if redis.call('EXISTS', KEYS[2]) == 0 then return {'LOST'} end
at_full_memory(KEYS[3])
local stream, group, tickets_key, args, count = KEYS[1], ARGV[1], KEYS[3], ARGV, tonumber(ARGV[5])
local find, match, sub = string.find, string.match, string.sub
local records = records_of(tickets_key, args, 6, count)
local reply, done, changed, freed = {'OK'}, {}, {}, {}
local n = 0 -- of what is done
-- A record of ours. One that nobody can read is not ours either.
local OURS = '^' .. string.gsub(ARGV[2], '%W', '%%%0') .. ' %d+ (.*)$'

local function keep(ticket, record, ids, left)
  if left == '' then
    freed[#freed + 1] = ticket
  else
    changed[#changed + 1] = ticket
    changed[#changed + 1] = sub(record, 1, #record - #ids) .. left
  end
end

for i = 1, count do
  local ticket, finished, record = args[5 + i], args[5 + count + i], records[i]
  local ids = record and match(record, OURS)
  if record and not ids then
    reply[#reply + 1] = i
    reply[#reply + 1] = 'STALE'
  elseif ids and (ids == finished or sub(ids, 1, #finished + 1) == finished .. ' ') then
    -- The usual case: what is finished is what was handed over first.
    if find(finished, ' ', 1, true) then
      for id in string.gmatch(finished, '%S+') do
        n = n + 1
        done[n] = id
      end
    else
      n = n + 1
      done[n] = finished
    end
    keep(ticket, record, ids, sub(ids, #finished + 2))
  else
    local held, going, answer = {}, {}, {}
    for id in string.gmatch(ids or '', '%S+') do held[id] = true end
    for id in string.gmatch(finished, '%S+') do
      answer[#answer + 1] = held[id] and 'OK' or 'GONE'
      if held[id] then
        n = n + 1
        done[n] = id
        going[id] = true
      end
    end
    if next(going) then keep(ticket, record, ids, without(ids, going)) end
    reply[#reply + 1] = i
    reply[#reply + 1] = answer
  end
end
in_chunks(n, function(from, to) redis.call('XACK', stream, group, unpack(done, from, to)) end)
in_chunks(#freed, function(from, to) redis.call('HDEL', tickets_key, unpack(freed, from, to)) end)
in_chunks(#changed, function(from, to) redis.call('HSET', tickets_key, unpack(changed, from, to)) end)
if n > 0 and redis.call('EXISTS', KEYS[4]) == 1 then
  in_chunks(n, function(from, to) redis.call('HDEL', KEYS[4], unpack(done, from, to)) end)
end
if ARGV[3] ~= '' and n > 0 then redis.call('XADD', KEYS[5], 'MAXLEN', '~', ARGV[4], '*', 'batch', ARGV[3]) end
return reply
