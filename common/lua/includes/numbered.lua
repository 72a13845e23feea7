-- The ids of a work stream: their second part is a number that only grows, by one with each entry, so that it is known at once how many are
-- undelivered. Whoever adds to it adds so (gather, redrive). Needs now_ms (bury), is_above and facts_of.
local function last_id(stream)
  if redis.call('EXISTS', stream) == 0 then return '0-0' end
  return facts_of(redis.call('XINFO', 'STREAM', stream))['last-generated-id']
end

-- The time and the number behind which the next entry is added: now, unless the last one is of later.
local function end_of(stream)
  local last, now = last_id(stream), now_ms()
  local ms, number = string.match(last, '^(%d+)'), tonumber(string.match(last, '(%d+)$'))
  if is_above(now .. '-0', ms .. '-0') then ms = now end
  if number >= 9007199254740000 then ms, number = string.format('%.0f', tonumber(ms) + 1), 0 end -- somebody else added that
  return ms, number
end

local function numbered(ms, number)
  return ms .. '-' .. string.format('%.0f', number)
end
