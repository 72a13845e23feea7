-- stream_charge: a plain reader notes failed attempts of entries of its own, so that they survive its process.
-- KEYS: 1 stream, 2 attempts
-- ARGV: 1 group, 2 reader, then for each: id, attempts that failed so far
-- Returns: ids that were not pending for this reader (nothing was noted of them)
-- Why Lua: only the reader that has an entry may charge it; and a finished entry must not leave a number behind.
-- Memory: works when full
--- @include at_full_memory
at_full_memory(KEYS[2])
local others = {}
for at = 3, #ARGV, 2 do
  local id = ARGV[at]
  if #redis.call('XPENDING', KEYS[1], ARGV[1], id, id, 1, ARGV[2]) == 1 then
    redis.call('HSET', KEYS[2], id, ARGV[at + 1])
  else
    others[#others + 1] = id
  end
end
return others
