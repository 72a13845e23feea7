-- find_runs: one page of looking for a text in the run log, newest first, or oldest first; only records that have it
--            travel.
-- KEYS: 1 runs
-- ARGV: 1 text (a ticket or an id as JSON), 2 from ("+" or "(<id>"; oldest first also "<id>"), 3 most records to look
--       at, 4 XRANGE: oldest first; none: newest first
-- Returns: {number looked at: fewer than asked for where records are large, id of the last one or "", {records}, 1 when
--          there are no more or 0}
-- Why Lua: a record holds up to a thousand executions, and few are of the ticket that is meant.
-- Memory: works when full, as nothing is written
--- @include bodies
--- @numbers count 3
local found, command, ends = {}, ARGV[4] or 'XREVRANGE', ARGV[4] and '+' or '-'
local is_all, n, last = each_entry(command, KEYS[1], ARGV[2], ends, tonumber(ARGV[3]), function(_, fields)
  for at = 1, #fields, 2 do
    local record = fields[at + 1]
    if fields[at] == 'batch' and string.find(record, ARGV[1], 1, true) then found[#found + 1] = record end
  end
end)
return {n, last or '', found, is_all and 1 or 0}
