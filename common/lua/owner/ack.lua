-- ack: an owner's finished messages leave the pending list, and their attempts are forgotten; the run log gets their
--      record, and callers their answers.
-- KEYS: 1 stream, 2 lease of the incarnation under which the entries were fetched, 3 attempts, 4 runs, 5 errors, 6 and
--       further ones: a reply stream for each answer
-- ARGV: 1 group, 2 run-log record ("" = none), 3 length of the run log, 4 "1": this call is sent again, else "", then
--       the finished ids, then for each answer: id, call, kind, result
-- Returns: "LOST" (no lease; nothing happened), "OK": none of them is pending any more, or why an answer was not
--          written: else it is as OK
-- Why Lua: XACK does not check the owner; a late call would acknowledge another owner's delivery. While the lease
--          lives its entries cannot have been taken back, so one look at it covers the batch.
-- Memory: works when full
--- @include run_log answer
--- @numbers large 3
if redis.call('EXISTS', KEYS[2]) == 0 then return 'LOST' end
local untold, of_calls, given = nil, 0, #ARGV - 4 * (#KEYS - 5)
for at = 6, #KEYS do -- who called hears of it from the call that ended the message: once, and from no former owner
  local id, call, kind, value = unpack(ARGV, given + 1 + 4 * (at - 6), given + 4 * (at - 5))
  if redis.call('XACK', KEYS[1], ARGV[1], id) == 1 then
    of_calls = of_calls + 1
    untold = answer(KEYS[at], call, kind, value) or untold
  end
end
local ended = of_calls + redis.call('XACK', KEYS[1], ARGV[1], unpack(ARGV, 5, given)) -- needs no memory, and goes first
if redis.call('EXISTS', KEYS[3]) == 1 then
  local forgotten = redis.pcall('HDEL', KEYS[3], unpack(ARGV, 5, given)) -- what is no hash must not hold it up
  for at = 5, type(forgotten) == 'number' and forgotten > 0 and given or 0 do
    redis.pcall('HDEL', KEYS[5], ARGV[at], 't' .. ARGV[at], 'h' .. ARGV[at])
  end
end
-- Of a call that is sent again, because its reply was lost, nothing may be left to be done: its record is there.
if ARGV[2] ~= '' and (ended > 0 or ARGV[4] == '') then note_run(KEYS[4], ARGV[3], ARGV[2]) end
return untold or 'OK'
