-- charge: note the attempts of messages whose handler has failed, is about to be killed with its process, or is about
--         to be started where nobody would learn that it ran.
-- KEYS: 1 stream, 2 lease, 3 attempts, 4 runs, 5 errors, 6 failures
-- ARGV: 1 group, 2 incarnation, 3 run-log record ("" = none), 4 length of the run log, 5 number of its executions that
--       failed, then for each message: id, its attempts (common/protocol/attempts.py), its last error and the end of
--       the traceback (common/protocol/last_error.py; "" = the known ones stay), its executions to be kept
-- Returns: "LOST" or "OK": the attempts of those that are pending for this incarnation are noted; the record goes with
--          a change only. A message that an operator has given up since its owner read its attempts stays so.
-- Why Lua: only the owner may charge; after its lease the next owner counts. The attempts of an entry that is no
--          longer pending would stay for ever.
--          Errors are kept within bounds: of very many messages without tracebacks, then none.
-- Memory: works when full
--- @numbers large 4, count 5
if redis.call('EXISTS', KEYS[2]) == 0 then return 'LOST' end
redis.call('HLEN', KEYS[3]) -- what is no hash fails here
local kept = redis.call('HLEN', KEYS[5])
at_full_memory(KEYS[3])

local function note_error(id, error, traceback)
  local known = redis.call('HGET', KEYS[5], id)
  if kept >= MOST_ERRORS and not known then return end
  local first = string.match(known or '', '"alike":0,("since_ms":[1-9]%d*})$') -- the first failure stays the first
  if first and string.find(error, '"alike":0,', 1, true) then error = string.gsub(error, '"since_ms":%d+}$', first) end
  if kept >= WITH_TRACEBACK then traceback = '' end
  kept = kept + redis.call('HSET', KEYS[5], id, error)
  if traceback ~= '' then
    kept = kept + redis.call('HSET', KEYS[5], 't' .. id, traceback)
  else
    redis.call('HDEL', KEYS[5], 't' .. id)
  end
end

local has_changed = false
for at = 6, #ARGV, 5 do
  local id, value = ARGV[at], ARGV[at + 1]
  local rows = redis.pcall('XPENDING', KEYS[1], ARGV[1], id, id, 1, ARGV[2])
  if not rows.err and #rows == 1 then -- an error: the group is gone for the moment, and with it the count
    local known = redis.call('HGET', KEYS[3], id)
    local _, failures = read_attempts(known)
    if failures >= GIVEN_UP then
      local starts, told, crashes, losses = read_attempts(value)
      value = attempts_value(starts, math.max(failures, told), crashes, losses)
    end
    if known ~= value then
      redis.call('HSET', KEYS[3], id, value)
      has_changed = true
    end
    if ARGV[at + 2] ~= '' then note_error(id, ARGV[at + 2], ARGV[at + 3]) end
    kept = kept + keep_runs(KEYS[5], id, ARGV[at + 4], kept < WITH_TRACEBACK)
  end
end
if has_changed then count_failed(KEYS[6], tonumber(ARGV[5])) end
if ARGV[3] ~= '' and has_changed then note_run(KEYS[4], ARGV[4], ARGV[3]) end
return 'OK'
