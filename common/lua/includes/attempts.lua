-- The attempts of a message: "starts failures crashes losses" (common/protocol/attempts.py). A plain number, as plain
-- readers write it, means that many starts which all failed; an unreadable value counts as nothing noted.
local GIVEN_UP = 900000000 -- so many failures: an operator has given the message up
local MOST_ERRORS = 50000 -- fields of the noted errors: beyond it no other message gets one
local WITH_TRACEBACK = 10000 -- no more fields of tracebacks and executions come above so many
local MOST_RUNS = 12 -- executions that are kept with a message: its first one, and the last ones
local function read_attempts(value)
  local starts, failures, crashes, losses = string.match(value or '', '^(%d+) (%d+) (%d+) (%d+)$')
  if starts then return tonumber(starts), tonumber(failures), tonumber(crashes), tonumber(losses) end
  local plain = tonumber(string.match(value or '', '^%d+$') or '0')
  return plain, plain, 0, 0
end

local function attempts_value(starts, failures, crashes, losses)
  return string.format('%.0f %.0f %.0f %.0f', starts, failures, crashes, losses)
end

-- Keep executions, a line each (common/protocol/run_log.py), with a message that failed; those of a call that is
-- repeated are there. Return how many fields came.
local function keep_runs(errors_key, id, lines, may_begin)
  local known = redis.call('HGET', errors_key, 'h' .. id) or ''
  if lines == '' or string.sub(known, -#lines) == lines or (known == '' and not may_begin) then return 0 end
  local runs = {}
  for line in string.gmatch(known .. '\n' .. lines, '[^\n]+') do runs[#runs + 1] = line end
  while #runs > MOST_RUNS do table.remove(runs, 2) end
  return redis.call('HSET', errors_key, 'h' .. id, table.concat(runs, '\n'))
end

local function count_failed(failures_key, number)
  local known = redis.pcall('HGET', failures_key, 'failed')
  if number == 0 or type(known) == 'table' then return end
  redis.call('HSET', failures_key, 'failed', string.format('%.0f', (tonumber(known or '0') or 0) + number))
end
