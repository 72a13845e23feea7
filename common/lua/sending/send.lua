-- send: add messages to the ticket stream; one whose uid was sent before, within the window, is not added again.
-- KEYS: 1 stream, 2 the sign of limits (behind), or the stream again if that is not asked, then for each message the
--       key of its uid, or the stream again for one without a uid
-- ARGV: 1 window in ms, then for each message: the number of its names and values, and these in turn
-- Returns: {for each message {id of its entry, 1 if it was there before this call (or earlier in it), else 0}, ...},
--          {names and values of the sign}
-- Why Lua: a uid that is noted without its entry would lose the message, and an entry without its uid would come
--          twice.
-- Memory: refused when full
--- @numbers large 1
local known, at = {}, 2
for _ = 3, #KEYS do at = at + 1 + whole(ARGV[at], math.min(#ARGV - at, 7000)) end
at = 2
local sign = KEYS[2] ~= KEYS[1] and redis.call('HGETALL', KEYS[2]) or {}
for n = 3, #KEYS do
  -- A key that is no string fails here, before anything has changed.
  if KEYS[n] ~= KEYS[1] then known[KEYS[n]] = redis.call('GET', KEYS[n]) end
end
local reply = {}
for n = 3, #KEYS do
  local size = tonumber(ARGV[at])
  local id = known[KEYS[n]]
  if id then
    reply[#reply + 1] = {id, 1}
  else
    id = redis.call('XADD', KEYS[1], '*', unpack(ARGV, at + 1, at + size))
    if KEYS[n] ~= KEYS[1] then
      redis.call('SET', KEYS[n], id, 'PX', ARGV[1])
      known[KEYS[n]] = id
    end
    reply[#reply + 1] = {id, 0}
  end
  at = at + size + 1
end
return {reply, sign}
