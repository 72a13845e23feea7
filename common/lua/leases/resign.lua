-- resign: give the leader lease up at a clean stop, so that a standby need not wait for its end.
-- KEYS: 1 leader, 2 changed, by which standbys hear of it (none, where nobody reads one)
-- ARGV: 1 epoch
-- Returns: "OK" or "FENCED"
-- Why Lua: compare and delete; a late call must not delete a successor's lease.
if not leads(KEYS[1], ARGV[1]) then return 'FENCED' end
redis.call('DEL', KEYS[1])
if KEYS[2] then tell(KEYS[2], 'leader', '') end
return 'OK'
