-- emit: a batch of outbox rows becomes entries of the stream, all of them or none. Without entries it only checks that
--       we still lead.
-- KEYS: 1 stream, 2 leader (of the streamers)
-- ARGV: 1 epoch, 2 number of fields, then the names of the fields, then for each entry its values in that order
-- Returns: "FENCED" or the id of the last entry (nil: there was none)
-- Why Lua: a streamer that lost its lease must add nothing, and another one's batch must not come between these
--          entries.
-- Memory: refused when full
if not leads(KEYS[2], ARGV[1]) then return 'FENCED' end
local count, entry, last = whole(ARGV[2], math.min(#ARGV - 2, 3500)), {}, false
if count == 0 or (#ARGV - 2) % count > 0 then error('these are no values of ' .. count .. ' fields each') end
-- Changes nothing, and a replica refuses it.
if #ARGV == 2 + count then redis.call('PEXPIRE', KEYS[2], math.max(1, redis.call('PTTL', KEYS[2]))) end
for field = 1, count do entry[2 * field - 1] = ARGV[2 + field] end
for at = 3 + count, #ARGV, count do
  for field = 1, count do entry[2 * field] = ARGV[at + field - 1] end
  last = redis.call('XADD', KEYS[1], '*', unpack(entry))
end
return last
