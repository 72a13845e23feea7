-- The next epoch, fence or generation: grows by at least one and never falls behind the clock, so that a Redis that lost its tail
-- (power loss, failover) does not issue a number twice: max(last + 1, milliseconds * 1024), below 2^53 until the year 2248.
-- Printed with %.0f: tostring() would round it to 14 digits.
local function next_number(counters_key, name)
  local last = tonumber(redis.call('HGET', counters_key, name) or '0')
  local time = redis.call('TIME')
  local from_clock = (tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)) * 1024
  local number = string.format('%.0f', math.max(last + 1, from_clock))
  redis.call('HSET', counters_key, name, number)
  return number
end
