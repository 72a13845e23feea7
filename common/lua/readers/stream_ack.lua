-- stream_ack: a plain reader (common/readers/loop.py) is done with entries of its own; on request they leave
--             the stream as well.
-- KEYS: 1 stream, 2 attempts, 3 checkpoints, 4 groups of the stream
-- ARGV: 1 group, 2 reader, 3 "1" to remove the entries, else "", then ids
-- Returns: for each id 1 (done by this call) or 0 (not pending for this reader: done before, or another reader has it)
-- Why Lua: XACK does not check the owner, and an entry that is removed but not acknowledged would haunt the pending
--          list. An entry is removed only while no other group reads the stream (reads_alone).
-- Memory: works when full
--- @include reads_alone at_full_memory
local stream, group, reader = KEYS[1], ARGV[1], ARGV[2]
at_full_memory(KEYS[2])
local removes = ARGV[3] == '1' and reads_alone(stream, group, KEYS[4], KEYS[3])
local reply = {}
for at = 4, #ARGV do
  local id = ARGV[at]
  if #redis.call('XPENDING', stream, group, id, id, 1, reader) == 1 then
    redis.call('XACK', stream, group, id)
    if removes then redis.call('XDEL', stream, id) end
    redis.call('HDEL', KEYS[2], id)
    reply[#reply + 1] = 1
  else
    reply[#reply + 1] = 0
  end
end
return reply
