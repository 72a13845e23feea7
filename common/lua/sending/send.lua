-- send: add messages to the ticket stream; one whose uid was sent before, within the window, is not added again. With a
--       limit, none is added where more of a ticket would wait.
-- KEYS: 1 stream, 2 the sign of limits (behind), or the stream again if that is not asked, 3 taken (of the group that
--       is waited for), then for each message the key of its uid, or the stream again for one without a uid, and with a
--       limit the key of its ticket's waiting
-- ARGV: 1 window in ms, 2 limit (0: none), 3 the group, 4 ms for which waiting is kept; then for each message: the
--       number of its names and values, and these in turn
-- Returns: {for each message {id of its entry, 1 if it was there before this call (or earlier in it), else 0}, ...},
--          {names and values of the sign}; or, where there is no room, {number of the message}, {how many
--          wait, 1 if a master reads the stream as that group, else 0}
-- Why Lua: a uid that is noted without its entry would lose the message, and an entry without its uid would come
--          twice; two producers that count first and add later are over the limit together.
-- Memory: refused when full
--- @numbers large 1, large 2, large 4
local stream, limit, step = KEYS[1], tonumber(ARGV[2]), tonumber(ARGV[2]) > 0 and 2 or 1
local known, rooms, over, at = {}, {}, {}, 5
for _ = 4, #KEYS, step do at = at + 1 + whole(ARGV[at], math.min(#ARGV - at, 7000)) end
at = 5
local sign = KEYS[2] ~= stream and redis.call('HGETALL', KEYS[2]) or {}
-- What was given to the group above `taken` may be in nobody's list yet.
local taken = step == 2 and string.match(redis.call('GET', KEYS[3]) or '', '^%S+')
local function waits(id)
  return not taken or is_above(id, taken) or #redis.call('XPENDING', stream, ARGV[3], id, id, 1) > 0
end
for n = 4, #KEYS, step do
  -- A key that is no string, or no list, fails here, before anything has changed.
  local is_known = known[KEYS[n]] ~= nil
  if KEYS[n] ~= stream and not is_known then
    known[KEYS[n]] = redis.call('GET', KEYS[n])
    is_known = known[KEYS[n]]
  end
  local key = step == 2 and not is_known and KEYS[n + 1]
  if key then
    -- Of a ticket they end in their order, so those that are over come first. They leave behind the first XADD, which
    -- alone asks for memory.
    rooms[key], over[key] = (rooms[key] or limit) - 1, over[key] or 0
    local size = redis.call('LLEN', key)
    while size - over[key] > rooms[key] do
      local head = redis.call('LINDEX', key, over[key])
      if not head or waits(head) then return {{(n - 2) / 2}, {size - over[key], taken and 1 or 0}} end
      over[key] = over[key] + 1
    end
  end
end
local reply = {}
for n = 4, #KEYS, step do
  local size = tonumber(ARGV[at])
  local id = known[KEYS[n]]
  if id then
    reply[#reply + 1] = {id, 1}
  else
    id = redis.call('XADD', stream, '*', unpack(ARGV, at + 1, at + size))
    if KEYS[n] ~= stream then
      redis.call('SET', KEYS[n], id, 'PX', ARGV[1])
      known[KEYS[n]] = id
    end
    if step == 2 then
      redis.call('LTRIM', KEYS[n + 1], over[KEYS[n + 1]], -1)
      over[KEYS[n + 1]] = 0
      redis.call('RPUSH', KEYS[n + 1], id)
      redis.call('PEXPIRE', KEYS[n + 1], ARGV[4])
    end
    reply[#reply + 1] = {id, 0}
  end
  at = at + size + 1
end
return {reply, sign}
