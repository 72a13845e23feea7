local function now_ms()
  local time = redis.call('TIME')
  return string.format('%.0f', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
end

-- Issue the next epoch, fence or generation: it grows by at least one and never falls behind the clock, so that a
-- Redis that lost its tail (power loss, failover) does not issue a number twice: max(last + 1, milliseconds * 1024),
-- below 2^53 until the year 2248. Printed with %.0f: tostring() would round it to 14 digits.
local function next_number(counters_key, name)
  local last = tonumber(redis.call('HGET', counters_key, name) or '0')
  local from_clock = tonumber(now_ms()) * 1024
  local number = string.format('%.0f', math.max(last + 1, from_clock))
  redis.call('HSET', counters_key, name, number)
  return number
end

-- The ids of a work stream: their second part is a number that grows by one with each entry, so that the number of
-- undelivered entries is known at once. Every script that adds to a work stream numbers so (gather, redrive).

-- Return the time and the number after which the next entry is added: now, unless the last entry is from a later time.
local function end_of(stream)
  local last, now = last_id(stream), now_ms()
  local ms, number = string.match(last, '^(%d+)'), tonumber(string.match(last, '(%d+)$'))
  if is_above(now .. '-0', ms .. '-0') then ms = now end
  if number >= 9007199254740000 then ms, number = string.format('%.0f', tonumber(ms) + 1), 0 end -- by another program
  return ms, number
end

local function numbered(ms, number)
  return ms .. '-' .. string.format('%.0f', number)
end
