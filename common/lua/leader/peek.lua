-- peek: look at the entries that come next. This reads nothing from the group: hand_over takes what was seen here.
-- KEYS: 1 stream, 2 leader
-- ARGV: 1 group, 2 epoch, 3 count, 4 ticket field, 5 longest ticket in bytes, 6 longest message in bytes (0: any),
--       7 tenant field, 8 priority field ("": none)
-- Returns: {"FENCED"} or {"OK", last id that the group was given, 1 when there are no more than these or 0, bytes of
--          them all, id, ticket, id, ticket, ...}, fewer than asked for when there are no more or when these are large;
--          a ticket is nil when the entry has no such field, one byte longer than allowed when it is too long, and
--          {ticket, bytes} when the entry is too large, {ticket or nil, 0, tenant, priority} when it has one of these
--          fields. Only these travel: the consumer reads the body.
-- Why Lua: position and entries are of one moment, and the bodies stay here. A lost reply costs nothing. A deposed
--          master that is still blocked in an XREADGROUP of its own would be served entries and strand them; this one
--          can be served what it likes.
-- Memory: refused when full
--- @include leads group bodies ticket_of
--- @numbers count 3 5, large 6
if not leads(KEYS[2], ARGV[2]) then return {'FENCED'} end
local group = group_facts(KEYS[1], ARGV[1])
local position = group['last-delivered-id']
local field, longest, most = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
local reply, n, before = {'OK', position, 0, 0}, 4, room
local is_all, count = each_entry('XRANGE', KEYS[1], '(' .. position, '+', tonumber(ARGV[3]), function(id, fields)
  local ticket, size = ticket_of(fields, field, longest, most, ARGV[7], ARGV[8])
  reply[n + 1], reply[n + 2] = id, ticket
  n = n + 2
  return size
end)
reply[3] = is_all and 1 or 0
reply[4] = before - room - EACH * count
return reply
