-- hold_lead: extend the leader lease.
-- KEYS: 1 leader
-- ARGV: 1 epoch, 2 lease in ms
-- Returns: "OK" or "FENCED"
-- Why Lua: the key must still hold our epoch at the moment it is extended. PEXPIRE, unlike SET, works when memory is
--          full.
-- Memory: works when full
--- @include leads
--- @numbers large 2
if not leads(KEYS[1], ARGV[1]) then return 'FENCED' end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 'OK'
