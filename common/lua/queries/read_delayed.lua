-- read_delayed: a page of the delayed messages that are in order, the earliest first; of each the beginning.
-- KEYS: 1 delayed, 2 due
-- ARGV: 1 "" or the time of the message behind which the page begins, 2 its member of `due`, 3 most messages to look
--       at, 4 most fields of each, 5 most bytes of a name or value, 6 ticket field, 7 ticket ("": all), 8 "1": tickets
--       are called STREAM/ID, then members of `due`: these alone are read
-- Returns: {1 when there are no more or 0, the last one that was looked at: its time and its member, or "" and "", {for
--          each message {member, its time, stream or "", ticket or "", bytes, fields, the first names and values}}}.
--          Fewer than asked for where they are large.
-- Why Lua: bodies stay in Redis, and places shift while others are sent.
-- Memory: works when full, as nothing is written
--- @numbers count 3 4 5
local most, longest, rows = tonumber(ARGV[3]), tonumber(ARGV[5]), {}
local CHUNK_OF_PLACES, LONGEST_TICKET = 100, 256

local function look(member, time)
  local fields = body_of(KEYS[1], member)
  if not fields then return end -- deleted by hand
  local ticket = string.sub(field_value(fields, ARGV[6]) or '', 1, LONGEST_TICKET + 1)
  local stream = string.sub(field_value(fields, 'stream') or '', 1, 2 * LONGEST_TICKET)
  if ARGV[8] == '1' and ticket ~= '' then ticket = stream .. '/' .. ticket end
  if ARGV[7] ~= '' and ticket ~= ARGV[7] then return end
  local first = {}
  for at = 1, math.min(#fields, 2 * tonumber(ARGV[4])) do first[at] = string.sub(fields[at], 1, longest) end
  rows[#rows + 1] = {member, time, stream, ticket, size_of(fields), #fields / 2, first}
end

if #ARGV > 8 then
  for at = 9, #ARGV do
    if not has_room() then return {0, '', ARGV[at - 1], rows} end
    local time = redis.call('ZSCORE', KEYS[2], ARGV[at])
    if time then look(ARGV[at], time) end
  end
  return {1, '', '', rows}
end

-- The first place behind that message; where it is gone, or has another time, that of the first one of its time.
local place, after = 0, tonumber(ARGV[1])
if after then
  local is_there = tonumber(redis.call('ZSCORE', KEYS[2], ARGV[2]) or '-1') == after
  place = is_there and redis.call('ZRANK', KEYS[2], ARGV[2]) or redis.call('ZCOUNT', KEYS[2], '-inf', '(' .. ARGV[1])
end
local looked, time, member = 0, '', ''
while looked < most and (looked == 0 or has_room()) do
  local wanted = math.min(CHUNK_OF_PLACES, most - looked)
  local some = redis.call('ZRANGE', KEYS[2], place, place + wanted - 1, 'WITHSCORES')
  for at = 1, #some, 2 do
    if looked > 0 and not has_room() then return {0, time, member, rows} end
    if tonumber(some[at + 1]) ~= after or some[at] > ARGV[2] then
      member, time, looked = some[at], some[at + 1], looked + 1
      look(member, time)
    end
  end
  if #some < 2 * wanted then return {1, time, member, rows} end
  place = place + wanted
end
return {0, time, member, rows}
