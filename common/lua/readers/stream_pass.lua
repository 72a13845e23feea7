-- stream_pass: a plain reader touches entries of its own (they are not idle), or gives them back (they are idle at
--              once, for all readers).
-- KEYS: 1 stream
-- ARGV: 1 group, 2 reader, 3 who has them afterwards, 4 idle time in ms, then ids
-- Returns: ids that were not pending for this reader
-- Why Lua: XCLAIM takes an entry from any owner: what another reader has taken over must stay there. JUSTID: no
--          delivery.
-- Memory: works when full
--- @numbers large 4
local others = {}
for at = 5, #ARGV do
  local id = ARGV[at]
  if #redis.call('XPENDING', KEYS[1], ARGV[1], id, id, 1, ARGV[2]) == 1 then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[3], '0', id, 'IDLE', ARGV[4], 'JUSTID')
  else
    others[#others + 1] = id
  end
end
return others
