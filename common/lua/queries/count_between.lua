-- count_between: one page of counting the entries of a stream between two ids; only numbers travel.
-- KEYS: 1 stream
-- ARGV: 1 id (not counted itself), 2 id (not counted itself), 3 most entries to look at
-- Returns: {number of entries found, id of the last one or the id given}
-- Why Lua: XRANGE alone would send every body.
-- Memory: works when full, as nothing is written
local found = redis.call('XRANGE', KEYS[1], '(' .. ARGV[1], '(' .. ARGV[2], 'COUNT', ARGV[3])
return {#found, #found > 0 and found[#found][1] or ARGV[1]}
