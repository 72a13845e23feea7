-- peek: look at the entries that come next. This reads nothing from the group: hand_over takes what was seen here.
-- KEYS: 1 stream, 2 leader
-- ARGV: 1 group, 2 epoch, 3 count, 4 ticket field, 5 longest ticket in bytes, 6 longest message in bytes (0: any)
-- Returns: {"FENCED"} or {"OK", last id that the group was given, 1 when there are no more than these or 0, bytes of
--          them all, id, ticket, id, ticket, ...}, fewer than asked for when there are no more or when these are large;
--          a ticket is nil when the entry has no such field, one byte longer than allowed when it is too long, and
--          {ticket, bytes} when the entry is too large. Only id and ticket travel: the consumer reads the body.
-- Why Lua: position and entries are of one moment, and the bodies stay here. A lost reply costs nothing. A deposed
--          master that is still blocked in an XREADGROUP of its own would be served entries and strand them; this one
--          can be served what it likes.
-- Memory: refused when full
--- @include leads
--- @include group
--- @include ticket_of
if not leads(KEYS[2], ARGV[2]) then return {'FENCED'} end
local group = group_facts(KEYS[1], ARGV[1])
local position = group['last-delivered-id']
local reply, n, last, is_all = {'OK', position, 0, 0}, 4, position, false
local HIGHEST = '18446744073709551615-18446744073709551615' -- above it XRANGE finds no id to begin with
local field, longest, most = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
-- Entries may be large, and Redis stands still meanwhile: a few show how large they are, and a call ends with about
-- ENOUGH bytes.
local ENOUGH, left, bytes, chunk = 8 * 1024 * 1024, tonumber(ARGV[3]), 0, 8
repeat
  chunk = math.min(chunk, left)
  local entries = last == HIGHEST and {} or redis.call('XRANGE', KEYS[1], '(' .. last, '+', 'COUNT', chunk)
  for _, entry in ipairs(entries) do
    local ticket, size = ticket_of(entry[2], field, longest, most)
    reply[n + 1], reply[n + 2] = entry[1], ticket
    n, bytes = n + 2, bytes + size
  end
  left, last, is_all = left - #entries, n > 4 and reply[n - 1] or last, #entries < chunk
  chunk = math.max(1, math.floor((ENOUGH - bytes) / math.max(1, 2 * bytes / math.max(1, n - 4))))
until is_all or left <= 0 or bytes >= ENOUGH
reply[3] = is_all and 1 or 0
reply[4] = bytes
return reply
