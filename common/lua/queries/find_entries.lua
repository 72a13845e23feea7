-- find_entries: one page of looking for a ticket's entries in a stream, newest first; bodies stay in Redis.
-- KEYS: 1 stream
-- ARGV: 1 field, 2 ticket, 3 from ("+" or "(<id>"), 4 most entries to look at
-- Returns: {number looked at, id of the last one or "", {ids of the ticket's entries}}
-- Why Lua: XRANGE alone would send every body to find the few that are meant.
-- Memory: works when full, as nothing is written
--- @include ticket_of
local rows = redis.call('XREVRANGE', KEYS[1], ARGV[3], '-', 'COUNT', ARGV[4])
local found = {}
for _, row in ipairs(rows) do
  if ticket_of(row[2], ARGV[1], #ARGV[2], 0) == ARGV[2] then found[#found + 1] = row[1] end
end
return {#rows, #rows > 0 and rows[#rows][1] or '', found}
