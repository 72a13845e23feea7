-- count_above: one page of counting the entries of a stream above an id; only numbers travel.
-- KEYS: 1 stream
-- ARGV: 1 id (not counted itself), 2 most entries to look at
-- Returns: {number of entries found, id of the last one or the id given}
-- Why Lua: Redis before 7.0 has no lag in XINFO GROUPS, and XRANGE alone would send every body.
-- Memory: works when full, as nothing is written
local found = redis.call('XRANGE', KEYS[1], '(' .. ARGV[1], '+', 'COUNT', ARGV[2])
return {#found, #found > 0 and found[#found][1] or ARGV[1]}
