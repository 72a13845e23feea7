-- register: a new incarnation takes a consumer's name and gets its lease.
-- KEYS: 1 consumers, 2 lease of the incarnation that has the name now (any missing key if none has it),
--       3 lease of the new one, 4 changed, by which the leader hears of it, 5 counters: the longest lease that was
--       given is noted (master/membership/registry.py: clamp_leases), 6 inbox of the former one, 7 mark that the new
--       one has not renewed its lease yet, 8 that mark of the former one
-- ARGV: 1 name, 2 the stored registration as the caller believes it ("" = none), 3 the new one, 4 lease in ms (0: the
--       same incarnation tells another health URL), 5 "1" when the caller has proof that the former process is dead
-- Returns: {"REGISTERED"}, {"HELD", ms until the former lease can end}, or {"CHANGED"} (the caller believed wrongly and
--          reads again)
-- Why Lua: compare and set; two processes with one name must not both get it.
--- @numbers large 4
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return {'CHANGED'} end
if ARGV[4] ~= '0' and ARGV[2] ~= '' and ARGV[5] ~= '1' and redis.call('EXISTS', KEYS[2]) == 1 then
  return {'HELD', redis.call('PTTL', KEYS[2])}
end
local longest = redis.call('HGET', KEYS[5], 'lease')
redis.call('XADD', KEYS[4], 'MAXLEN', '~', '10000', '*', 'consumer', ARGV[1]) -- first: fails if it is no stream
if ARGV[4] == '0' then redis.call('HSET', KEYS[1], ARGV[1], ARGV[3]) return {'REGISTERED'} end
if tonumber(ARGV[4]) > tonumber(longest or '0') then redis.call('HSET', KEYS[5], 'lease', ARGV[4]) end
-- Only its registration still tells the janitor of the former one, if the group was lost, and this replaces it. Without
-- a lease, and it never gets another, nothing is added to the inbox and nothing of it may run; what it had is in the
-- pending list, from where it is taken back.
redis.call('DEL', KEYS[2], KEYS[6], KEYS[8])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
-- Whoever has a token can register; only who reaches Redis renews. Until then the leader hands nothing over.
redis.call('SET', KEYS[7], '1', 'PX', ARGV[4])
redis.call('SET', KEYS[3], 'live', 'PX', ARGV[4])
return {'REGISTERED'}
