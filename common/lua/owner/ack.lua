-- ack: an owner's finished messages leave the pending list, and their attempts are forgotten; the run log gets their
--      record, and callers their answers, or parts of them while handlers run.
-- KEYS: 1 stream, 2 lease of the incarnation under which the entries were fetched, 3 attempts, 4 runs, 5 errors, 6 and
--       further ones: a reply stream for each answer
-- ARGV: 1 group, 2 run-log record ("" = none), 3 length of the run log, 4 "1": this call is sent again, else "", then
--       the finished ids, then for each answer: id ("": a part), call, fence, attempt and number of a part, kind, value
-- Returns: "LOST" (no lease; nothing happened), "OK": none of them is pending any more, or why an answer was not
--          written: else it is as OK
-- Why Lua: XACK does not check the owner; a late call would acknowledge another owner's delivery. While the lease
--          lives its entries cannot have been taken back, so one look at it covers the batch.
-- Memory: works when full
--- @numbers large 3
if redis.call('EXISTS', KEYS[2]) == 0 then return 'LOST' end
local untold, ended, last = nil, 0, #ARGV - 5 * (#KEYS - 5)
for at = 6, #KEYS do -- who called hears of it from the call that ended the message: once, and from no former owner
  local id, call, part, kind, value = unpack(ARGV, last + 5 * at - 29, last + 5 * at - 25)
  local is_over = id ~= '' and redis.call('XACK', KEYS[1], ARGV[1], id) == 1
  if is_over then untold = answer(KEYS[at], call, kind, value) or untold end
  if id == '' then untold = answer(KEYS[at], call, 'part', part, kind, value) or untold end
  ended = ended + (is_over and 1 or 0)
end
if last < 5 then return untold or 'OK' end
ended = ended + redis.call('XACK', KEYS[1], ARGV[1], unpack(ARGV, 5, last)) -- needs no memory, and goes first
if redis.call('EXISTS', KEYS[3]) == 1 then
  local forgotten = redis.pcall('HDEL', KEYS[3], unpack(ARGV, 5, last)) -- what is no hash must not hold it up
  for at = 5, type(forgotten) == 'number' and forgotten > 0 and last or 0 do
    redis.pcall('HDEL', KEYS[5], ARGV[at], 't' .. ARGV[at], 'h' .. ARGV[at])
  end
end
-- Of a call that is sent again, because its reply was lost, nothing may be left to be done: its record is there.
if ARGV[2] ~= '' and (ended > 0 or ARGV[4] == '') then note_run(KEYS[4], ARGV[3], ARGV[2]) end
return untold or 'OK'
