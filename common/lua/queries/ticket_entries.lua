-- ticket_entries: find the entries of one ticket in a stretch of the stream, or among the entries pending for a name.
--                 Changes nothing.
-- KEYS: 1 stream
-- ARGV: 1 ticket field, 2 ticket, 3 start (as XRANGE has it), 4 most entries looked at, 5 group ("" looks at the
--       stream), 6 the name in the group
-- Returns: {last id looked at, or "" at the end, {ids of the ticket}}
-- Why Lua: an operator's question about one ticket must not bring the bodies of thousands of others over the wire.
local stream, field, ticket, count = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[4])
local function is_of_ticket(fields)
  for at = 1, #fields, 2 do
    if fields[at] == field then return fields[at + 1] == ticket end
  end
  return false
end
local found, last, looked = {}, '', 0
if ARGV[5] == '' then
  local rows = redis.call('XRANGE', stream, ARGV[3], '+', 'COUNT', count)
  for _, row in ipairs(rows) do
    if is_of_ticket(row[2]) then found[#found + 1] = row[1] end
  end
  looked = #rows
  if looked > 0 then last = rows[looked][1] end
else
  local rows = redis.call('XPENDING', stream, ARGV[5], ARGV[3], '+', count, ARGV[6])
  for _, row in ipairs(rows) do
    local entry = redis.call('XRANGE', stream, row[1], row[1])[1]
    if entry and is_of_ticket(entry[2]) then found[#found + 1] = row[1] end
  end
  looked = #rows
  if looked > 0 then last = rows[looked][1] end
end
return {looked < count and '' or last, found}
