-- renew: a living incarnation extends its lease and touches what it has pending, a thousand entries at a time.
-- KEYS: 1 lease, 2 stream, and for the first time 3 its mark that it has not renewed yet, 4 changed, by which the
--       leader hears that it has now
-- ARGV: 1 group, 2 incarnation, 3 lease in ms, 4 where to begin: "-", or what the call before returned, 5 ms that the
--       lease has left
-- Returns: {state, number of entries touched, where to go on, "" at the end}; state: live | draining | revoked | LOST
--          (there is no lease; nothing happened). A revoked lease keeps what it has left.
-- Why Lua: lease and entries are renewed together. It is every third renewal (lease.py), so an entry of a living
--          incarnation is idle for one lease at most, and the sweep cannot meet it. Not more at once: for 50,000
--          entries Redis did nothing else for 0.2 s. JUSTID: any other form would raise the delivery count. GETEX and
--          XCLAIM work when memory is full.
-- Memory: works when full
--- @numbers large 3 5
local state = redis.call('GETEX', KEYS[1], 'PX', ARGV[3])
if not state then return {'LOST', 0, ''} end
if state == 'revoked' then redis.call('PEXPIRE', KEYS[1], ARGV[5]) return {state, 0, ''} end
if KEYS[3] and redis.call('DEL', KEYS[3]) == 1 then
  tell(KEYS[4], 'consumer', ARGV[2])
end
local rows = redis.pcall('XPENDING', KEYS[2], ARGV[1], ARGV[4], '+', 1000, ARGV[2])
-- An error means that the group is missing, which is the leader's business; the lease is extended all the same.
if rows.err or #rows == 0 then return {state, 0, ''} end
local command = {'XCLAIM', KEYS[2], ARGV[1], ARGV[2], '0'}
for i = 1, #rows do command[#command + 1] = rows[i][1] end
command[#command + 1] = 'JUSTID'
redis.call(unpack(command))
return {state, #rows, #rows == 1000 and '(' .. rows[#rows][1] or ''}
