-- ticket_entries: find the entries with a value in a field, such as those of one ticket, in a stretch of the stream, or
--                 among the entries pending for a name. Changes nothing.
-- KEYS: 1 stream
-- ARGV: 1 field, 2 value, 3 start (as XRANGE has it), 4 most entries looked at, 5 group ("" looks at the stream), 6 the
--       name in the group ("" = all)
-- Returns: {last id looked at, or "" at the end, {ids with that value}, number looked at}
-- Why Lua: an operator's question about one ticket must not bring the bodies of thousands of others over the wire.
--- @include bodies ticket_of
--- @numbers count 4
local stream, field, value, count = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[4])
local found = {}
local function look(id, fields)
  if field_value(fields, field) == value then found[#found + 1] = id end
end
if ARGV[5] == '' then
  local is_all, n, last = each_entry('XRANGE', stream, ARGV[3], '+', count, look)
  return {is_all and '' or last, found, n}
end
local command = {'XPENDING', stream, ARGV[5], ARGV[3], '+', count}
if ARGV[6] ~= '' then command[7] = ARGV[6] end
local rows = redis.call(unpack(command))
for n, row in ipairs(rows) do
  local fields = body_of(stream, row[1])
  if fields then look(row[1], fields) end
  if not has_room() and n < #rows then return {row[1], found, n} end
end
return {#rows == count and rows[count][1] or '', found, #rows}
