-- find_entries: one page of looking for a ticket's entries in a stream, newest first; bodies stay in Redis.
-- KEYS: 1 stream
-- ARGV: 1 field, 2 ticket, 3 from ("+" or "(<id>"), 4 most entries to look at
-- Returns: {number looked at: fewer than asked for where entries are large, id of the last one or "", {ids of the
--          ticket's entries}, 1 when there are no more or 0}
-- Why Lua: XRANGE alone would send every body to find the few that are meant.
-- Memory: works when full, as nothing is written
--- @include bodies ticket_of
--- @numbers count 4
local found = {}
local is_all, n, last = each_entry('XREVRANGE', KEYS[1], ARGV[3], '-', tonumber(ARGV[4]), function(id, fields)
  local ticket, size = ticket_of(fields, ARGV[1], #ARGV[2], 0)
  if ticket == ARGV[2] then found[#found + 1] = id end
  return size
end)
return {n, last or '', found, is_all and 1 or 0}
