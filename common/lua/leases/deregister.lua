-- deregister: an incarnation with nothing left to do leaves, or the leader forgets a dead one: its lease, inbox, group
--             consumer and registration go.
-- KEYS: 1 stream, 2 lease, 3 inbox, 4 consumers, 5 changed, by which the leader hears of it; of a dead one leader, 6
--       noted: it stays when the last page's reply was lost, and 7 mark that it has not renewed yet: a clock that was
--       set back would keep it for as long
-- ARGV: 1 group, 2 incarnation, 3 consumer name, 4 its stored registration ("" = it has none any more), of a dead one 5
--       epoch
-- Returns: "OK", "FENCED", "ALIVE" (its lease still runs), "LOST" (no lease: the leader recovers it) or "PENDING" (it
--          still has entries). All but OK change nothing.
-- Why Lua: XGROUP DELCONSUMER deletes pending entries too, and they would never be delivered again: "nothing left" must
--          be true at the moment of the deletion. The registration goes only if no successor has written its own.
-- Memory: works when full
local epoch, is_alive = ARGV[5], redis.call('EXISTS', KEYS[2]) == 1
if epoch and not leads(KEYS[5], epoch) then return 'FENCED' end
if epoch and is_alive then return 'ALIVE' end
if not (epoch or is_alive) then return 'LOST' end
if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2]) > 0 then return 'PENDING' end
-- A write that needs no memory goes first: XGROUP is refused when memory is full.
redis.call('DEL', KEYS[2], KEYS[3], unpack(KEYS, 6))
redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
if ARGV[4] ~= '' and redis.call('HGET', KEYS[4], ARGV[3]) == ARGV[4] then redis.call('HDEL', KEYS[4], ARGV[3]) end
if not epoch then tell(KEYS[5], 'consumer', ARGV[2]) end
return 'OK'
