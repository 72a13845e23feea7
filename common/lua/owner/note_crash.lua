-- note_crash: a successor that holds its predecessor's name lock notes what the predecessor's journal says, before any
--             of its messages runs again.
-- KEYS: 1 stream, 2 attempts, 3 runs, 4 noted (of the predecessor), 5 errors, 6 failures
-- ARGV: 1 group, 2 predecessor, 3 run-log record ("" = none), 4 length of the run log, 5 ms for which `noted` may stay,
--       then for each message: id, starts, failures, crashes, losses, the execution that was cut off
-- Returns: {"OK", {ids whose attempts are noted}}
-- Why Lua: only what is still pending is noted, so that no field stays for ever; and a start is counted once, however
--          often it is reported: a number of starts that is not above the known one says nothing new.
-- Memory: works when full
--- @numbers large 4 5
local stream, group, attempts_key, noted_key = KEYS[1], ARGV[1], KEYS[2], KEYS[4]
for at = 6, #ARGV do whole((at - 6) % 6 % 5 == 0 and 0 or ARGV[at], 1e15) end -- all but ids and executions
redis.call('HLEN', attempts_key) -- what is no hash fails here, before anything has changed
redis.call('HLEN', noted_key)
local kept = redis.pcall('HLEN', KEYS[5])
at_full_memory(attempts_key)
local noted = {}
for at = 6, #ARGV, 6 do
  local id = ARGV[at]
  local rows = redis.pcall('XPENDING', stream, group, id, id, 1)
  if not rows.err and #rows == 1 then
    local starts, failures, crashes, losses = read_attempts(redis.call('HGET', attempts_key, id))
    local told, told_failures, told_crashes = tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
    if told > starts then
      failures = math.max(failures, told_failures)
      crashes, losses = math.max(crashes, told_crashes), math.max(losses, tonumber(ARGV[at + 4]))
      redis.call('HSET', attempts_key, id, attempts_value(told, failures, crashes, losses))
      kept = type(kept) ~= 'number' and kept or kept + keep_runs(KEYS[5], id, ARGV[at + 5], kept < WITH_TRACEBACK)
      noted[#noted + 1] = id
    end
  end
end
local left = redis.pcall('XPENDING', stream, group, '-', '+', 1, ARGV[2])
if not left.err and #left == 1 then -- take_back will come for them: it need not guess what was lost
  redis.call('HSET', noted_key, '', '1')
  redis.call('PEXPIRE', noted_key, ARGV[5])
end
count_failed(KEYS[6], #noted)
if ARGV[3] ~= '' then note_run(KEYS[3], ARGV[4], ARGV[3]) end
return {'OK', noted}
