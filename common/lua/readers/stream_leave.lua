-- stream_leave: names of plain readers that have nothing pending leave the group.
-- KEYS: 1 stream
-- ARGV: 1 group, then names
-- Returns: number of names that left
-- Why Lua: XGROUP DELCONSUMER deletes pending entries too, so "nothing pending" must be true at the moment of the
--          deletion.
-- Memory: works when full
local left = 0
-- Deletes nothing: a write that needs no memory goes first, because XGROUP is refused when memory is full.
redis.call('XDEL', KEYS[1], '0-0')
for at = 2, #ARGV do
  if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[at]) == 0 then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[at])
    left = left + 1
  end
end
return left
