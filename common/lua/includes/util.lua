-- Call `step(from, to)` over 1..n in pieces: unpack() puts every value on Lua's C stack, which ends at about 8,000.
local function in_chunks(n, step)
  for from = 1, n, 4000 do step(from, math.min(from + 3999, n)) end
end

-- Count entries to which something has happened that should not, and say when: doctor, metrics and status read it.
local function count_up(counters_key, what, number)
  if number == 0 then return end
  local before = tonumber(redis.call('HGET', counters_key, what) or '0') -- not HINCRBY: masters have no right to that
  redis.call('HSET', counters_key, what, string.format('%.0f', before + number), what .. '_s', redis.call('TIME')[1])
end

-- Compare two ids as numbers. 64 bits do not fit into Lua's numbers, but of two numbers without leading zeros the
-- longer one is higher. Patterns begin with ^ and have one way to fit: else 20,000 digits of a stranger's take minutes.
local function is_above(id, other)
  local high, after = string.match(id, '^(%d+)%-?(%d*)')
  local low, behind = string.match(other, '^(%d+)%-?(%d*)')
  if high == low then high, low = after, behind end
  if #high ~= #low then return #high > #low end
  return high > low
end
