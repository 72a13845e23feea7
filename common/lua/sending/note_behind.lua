-- note_behind: tell producers who of this group has too much waiting; nobody, without names.
-- KEYS: 1 sign (behind), 2 leader
-- ARGV: 1 epoch, 2 ms for which it lasts, 3 group, then names ("<group>" or "<group>/<tenant>") and how many wait
-- Returns: "OK" or "FENCED"
-- Why Lua: what other groups say stays, and a sign never lasts without an end.
-- Memory: refused when full
--- @numbers large 2
if not leads(KEYS[2], ARGV[1]) then return 'FENCED' end
local group, now = ARGV[3], {}
for at = 4, #ARGV, 2 do now[ARGV[at]] = whole(ARGV[at + 1], 1e15) end
local told = redis.call('HGETALL', KEYS[1])
for at = 1, #told, 2 do
  local name = told[at]
  local is_ours = name == group or string.sub(name, 1, #group + 1) == group .. '/'
  if is_ours and not now[name] then redis.call('HDEL', KEYS[1], name) end
end
if #ARGV > 3 then
  redis.call('HSET', KEYS[1], unpack(ARGV, 4))
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 'OK'
