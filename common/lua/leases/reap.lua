-- reap: forget a dead incarnation once nothing is pending for it.
-- KEYS: 1 stream, 2 leader, 3 lease, 4 inbox, 5 consumers, 6 noted (of the incarnation): it stays when the last page's
--       reply was lost,
--       7 mark that it has not renewed yet: a clock that was set back would keep it for as long
-- ARGV: 1 group, 2 epoch, 3 incarnation, 4 consumer name, 5 its stored registration ("" = it has none any more)
-- Returns: "OK", "FENCED", "ALIVE" or "PENDING"
-- Why Lua: XGROUP DELCONSUMER deletes the consumer's pending entries too, and they would never be delivered again:
--          "empty" must be true at the moment of the deletion. The registration goes only if no successor has written
--          its own.
-- Memory: works when full
--- @include leads
if not leads(KEYS[2], ARGV[2]) then return 'FENCED' end
if redis.call('EXISTS', KEYS[3]) == 1 then return 'ALIVE' end
if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[3]) > 0 then return 'PENDING' end
-- A write that needs no memory goes first: XGROUP is refused when memory is full.
redis.call('DEL', KEYS[4], KEYS[6], KEYS[7])
redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[3])
if ARGV[5] ~= '' and redis.call('HGET', KEYS[5], ARGV[4]) == ARGV[5] then redis.call('HDEL', KEYS[5], ARGV[4]) end
return 'OK'
