-- count_between: one page of counting the entries of a stream above an id, up to another; only numbers travel.
-- KEYS: 1 stream
-- ARGV: 1 id (not counted itself), 2 end, as XRANGE takes it, 3 most entries to look at
-- Returns: {number of entries found: fewer than asked for where they are large, id of the last one or the id given, 1
--          when there are no more or 0}
-- Why Lua: XRANGE alone would send every body. Redis before 7.0 has no lag in XINFO GROUPS.
-- Memory: works when full, as nothing is written
--- @include bodies
--- @numbers count 3
local is_all, n, last = each_entry('XRANGE', KEYS[1], '(' .. ARGV[1], ARGV[2], tonumber(ARGV[3]), function() end)
return {n, last or ARGV[1], is_all and 1 or 0}
