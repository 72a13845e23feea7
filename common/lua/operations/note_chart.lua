-- note_chart: write points of the charts: a minute, and the longer steps that it is a part of.
-- KEYS: 1 leader, 2 charts
-- ARGV: 1 epoch, then a place and a point, for each
-- Returns: {"FENCED"} or {"OK"}
-- Why Lua: a late call of a deposed master would put an old point in the place of its successor's.
-- Memory: refused when full
--- @include leads
if not leads(KEYS[1], ARGV[1]) then return {'FENCED'} end
for at = 2, #ARGV, 2 do
  redis.call('HSET', KEYS[2], ARGV[at], ARGV[at + 1])
end
return {'OK'}
