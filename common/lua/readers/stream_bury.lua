-- stream_bury: a plain reader gives up on entries of its own: they become dead letters and leave group and stream.
-- KEYS: 1 stream, 2 dead, 3 attempts, 4 checkpoints, 5 groups of the stream, 6 letters
-- ARGV: 1 group, 2 reader, 3 "1" to remove the entries, else "", then for each: id, reason, error, attempts, first
--       start in ms, last start in ms
-- Returns: for each id, from the first one, 1 (a letter was written) or 0 (not pending for this reader): fewer than
--          given where bodies are large
-- Why Lua: letter, XACK and XDEL are one step: a crash in between would lose the message or keep it in two places. As
--          in stream_ack an entry is removed only while no other group reads the stream (reads_alone); and only if
--          its letter has all of it: else its fields would be lost, and it could not be redriven.
-- Memory: works when full
--- @include bodies index answer letter reads_alone at_full_memory
local stream, group, reader = KEYS[1], ARGV[1], ARGV[2]
redis.call('XLEN', KEYS[2]) -- what is no stream fails here, before anything has changed
at_full_memory(KEYS[3])
local removes = ARGV[3] == '1' and reads_alone(stream, group, KEYS[5], KEYS[4])
local reply = {}
for at = 4, #ARGV, 6 do
  if not has_room() then break end
  local id = ARGV[at]
  if #redis.call('XPENDING', stream, group, id, id, 1, reader) == 1 then
    local fields = body_of(stream, id)
    local reason = fields and ARGV[at + 1] or 'body_gone'
    local error, attempts, first_ms, last_ms = unpack(ARGV, at + 2, at + 5)
    local has_all = bury(KEYS[2], id, '', reason, error, attempts, reader, first_ms, last_ms, fields)
    spend(fields and size_of(fields) or 0) -- written too
    redis.call('XACK', stream, group, id)
    if removes and has_all then redis.call('XDEL', stream, id) end
    redis.call('HDEL', KEYS[3], id)
    reply[#reply + 1] = 1
  else
    reply[#reply + 1] = 0
  end
end
return reply
