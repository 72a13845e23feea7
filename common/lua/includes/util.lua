-- Count entries to which something has happened that should not, and say when: doctor, metrics and status read it.
local function count_up(counters_key, what, number)
  if number == 0 then return end
  local before = tonumber(redis.call('HGET', counters_key, what) or '0') -- not HINCRBY: masters have no right to that
  redis.call('HSET', counters_key, what, string.format('%.0f', before + number), what .. '_s', redis.call('TIME')[1])
end
