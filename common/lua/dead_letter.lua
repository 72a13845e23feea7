-- dead_letter: an owner gives up on a message.
-- KEYS: 1 stream, 2 lease, 3 tickets, 4 dead, 5 attempts
-- ARGV: 1 group, 2 incarnation, 3 ticket, 4 id, 5 reason, 6 error, 7 attempts, 8 first start in ms, 9 last start in ms
-- Returns: "OK", "LOST" (no lease), "STALE" (another owner has the ticket) or "GONE" (it is not in processing any more)
-- Why Lua: letter, XACK and index are one step: a crash in between would lose the message or keep it in two places.
-- Memory: works when full
--- @include record
--- @include bury
--- @include at_full_memory
if redis.call('EXISTS', KEYS[2]) == 0 then return 'LOST' end
local record = redis.call('HGET', KEYS[3], ARGV[3])
if not record then return 'GONE' end
local owner, fence, ids = read_record(record)
if owner ~= ARGV[2] then return 'STALE' end
local left = without(ids, {[ARGV[4]] = true})
if left == ids then return 'GONE' end
at_full_memory(KEYS[3])
local fields = body_of(KEYS[1], ARGV[4])
bury(KEYS[4], ARGV[4], ARGV[3], fields and ARGV[5] or 'body_gone', ARGV[6], ARGV[7], ARGV[2], ARGV[8], ARGV[9], fields)
redis.call('XACK', KEYS[1], ARGV[1], ARGV[4])
write_record(KEYS[3], ARGV[3], owner, fence, left)
redis.call('HDEL', KEYS[5], ARGV[4])
return 'OK'
