-- ack: an owner's finished messages leave the pending list and the index; the run log gets their record.
-- KEYS: 1 stream, 2 lease of the incarnation under which the entries were fetched, 3 tickets, 4 attempts, 5 runs
-- ARGV: 1 group, 2 incarnation, 3 run-log record ("" = none), 4 length of the run log, then for each ticket:
--       ticket, its finished ids in id order, separated by spaces
-- Returns: {"LOST"} (no lease: all is stale, nothing happened) or {"OK", then for each ticket: "OK", "STALE" (another owner has it), or a
--          list of "OK" / "GONE" per id}
-- Why Lua: XACK asks nobody's name; anybody's late call would acknowledge somebody else's delivery. While the lease lives its entries
--          cannot have been taken back, so one look at it covers the batch.
-- Memory: works when full
--- @include record
--- @include in_chunks
--- @include at_full_memory
if redis.call('EXISTS', KEYS[2]) == 0 then return {'LOST'} end
at_full_memory(KEYS[3])
local stream, group, tickets_key, me = KEYS[1], ARGV[1], KEYS[3], ARGV[2]
local names = {}
for at = 5, #ARGV, 2 do names[#names + 1] = ARGV[at] end
local records = {}
in_chunks(#names, function(from, to)
  local found = redis.call('HMGET', tickets_key, unpack(names, from, to))
  for i = 1, #found do records[from + i - 1] = found[i] end
end)
local reply, done, changed, freed = {'OK'}, {}, {}, {}
for n = 1, #names do
  local finished, record = ARGV[4 + 2 * n], records[n]
  local owner, fence, ids
  if record then owner, fence, ids = read_record(record) end
  if record and owner ~= me then -- a record that nobody can read is not ours either
    reply[n + 1] = 'STALE'
  elseif owner and string.sub(ids .. ' ', 1, #finished + 1) == finished .. ' ' then
    -- The usual case: what is finished is what was handed over first.
    for id in string.gmatch(finished, '%S+') do done[#done + 1] = id end
    if #ids == #finished then
      freed[#freed + 1] = names[n]
    else
      changed[#changed + 1] = names[n]
      changed[#changed + 1] = owner .. ' ' .. fence .. ' ' .. string.sub(ids, #finished + 2)
    end
    reply[n + 1] = 'OK'
  else
    local held, going, answer = {}, {}, {}
    for id in string.gmatch(ids or '', '%S+') do held[id] = true end
    for id in string.gmatch(finished, '%S+') do
      answer[#answer + 1] = held[id] and 'OK' or 'GONE'
      if held[id] then
        done[#done + 1] = id
        going[id] = true
      end
    end
    if next(going) then
      local left = without(ids, going)
      if left == '' then
        freed[#freed + 1] = names[n]
      else
        changed[#changed + 1] = names[n]
        changed[#changed + 1] = owner .. ' ' .. fence .. ' ' .. left
      end
    end
    reply[n + 1] = answer
  end
end
in_chunks(#done, function(from, to) redis.call('XACK', stream, group, unpack(done, from, to)) end)
in_chunks(#freed, function(from, to) redis.call('HDEL', tickets_key, unpack(freed, from, to)) end)
in_chunks(#changed, function(from, to) redis.call('HSET', tickets_key, unpack(changed, from, to)) end)
if #done > 0 and redis.call('EXISTS', KEYS[4]) == 1 then
  in_chunks(#done, function(from, to) redis.call('HDEL', KEYS[4], unpack(done, from, to)) end)
end
if ARGV[3] ~= '' and #done > 0 then redis.call('XADD', KEYS[5], 'MAXLEN', '~', ARGV[4], '*', 'batch', ARGV[3]) end
return reply
