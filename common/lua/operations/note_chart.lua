-- note_chart: write a point of the charts, that of a minute.
-- KEYS: 1 leader, 2 charts
-- ARGV: 1 epoch, 2 the point's place, 3 the point
-- Returns: {"FENCED"} or {"OK"}
-- Why Lua: a late call of a deposed master would put an old point in the place of its successor's.
-- Memory: refused when full
if not leads(KEYS[1], ARGV[1]) then return {'FENCED'} end
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
return {'OK'}
