-- deregister: an incarnation with nothing left to do leaves: its lease, inbox, group consumer and registration go.
-- KEYS: 1 stream, 2 lease, 3 inbox, 4 consumers, 5 changed, by which the leader hears of it
-- ARGV: 1 group, 2 incarnation, 3 consumer name, 4 its stored registration
-- Returns: "OK", "LOST" (no lease: the leader recovers it) or "PENDING" (it still has entries; nothing happened)
-- Why Lua: XGROUP DELCONSUMER deletes pending entries too, so "nothing left" must be true at the moment of the
--          deletion.
-- Memory: works when full
if redis.call('EXISTS', KEYS[2]) == 0 then return 'LOST' end
if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2]) > 0 then return 'PENDING' end
redis.call('DEL', KEYS[2], KEYS[3]) -- a write that needs no memory goes first: XGROUP is refused when memory is full
redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
if redis.call('HGET', KEYS[4], ARGV[3]) == ARGV[4] then redis.call('HDEL', KEYS[4], ARGV[3]) end
redis.pcall('XADD', KEYS[5], 'MAXLEN', '~', '10000', '*', 'consumer', ARGV[2]) -- not told, it is seen a little later
return 'OK'
