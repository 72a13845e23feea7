-- find_runs: one page of looking for a text in the run log, newest first; only records that have it travel.
-- KEYS: 1 runs
-- ARGV: 1 text (a ticket as JSON), 2 from ("+" or "(<id>"), 3 most records to look at
-- Returns: {number looked at, id of the last one or "", {records}}
-- Why Lua: a record holds up to a thousand executions, and few are of the ticket that is meant.
-- Memory: works when full, as nothing is written
local rows = redis.call('XREVRANGE', KEYS[1], ARGV[2], '-', 'COUNT', ARGV[3])
local found = {}
for _, row in ipairs(rows) do
  for at = 1, #row[2], 2 do
    local record = row[2][at + 1]
    if row[2][at] == 'batch' and string.find(record, ARGV[1], 1, true) then found[#found + 1] = record end
  end
end
return {#rows, #rows > 0 and rows[#rows][1] or '', found}
