-- send_delayed: add delayed messages that are due to their streams, in this order. Each is added once,
--               however often it is asked for.
-- KEYS: 1 delayed, 2 due, 3 leader, then the streams
-- ARGV: 1 epoch, 2 ms after which one that cannot be sent now is due again, then for each: its member of `due`, and
--       which of the streams (1, 2, ...) it is for, or 0: for none that is gathered
-- Returns: {"FENCED"} or {"OK", then for each: its new id, "" if it is not there any more, or not due any more (an
--          operator has moved it), or {why it was not sent}}
-- Why Lua: the entry is in its stream exactly if it no longer waits, so that a lost reply, a second leader or a crash
--          neither lose nor double it.
-- Memory: refused when full
--- @numbers large 2
if not leads(KEYS[3], ARGV[1]) then return {'FENCED'} end
for at = 4, #ARGV, 2 do whole(ARGV[at], #KEYS - 3) end
local MOST_VALUES = 7000 -- more do not fit on Lua's stack
-- Adds nothing: a key that is no sorted set, and full memory, fail here, before anything has changed.
redis.call('ZADD', KEYS[2], 'XX', 0, '')

local now = tonumber(now_ms())
local function send(member, stream)
  local due = redis.call('ZSCORE', KEYS[2], member)
  if not due or tonumber(due) > now then return '' end
  local entry = redis.call('XRANGE', KEYS[1], member, member)[1]
  if not entry then return '' end
  if not stream then return {'its field stream names none that is taken in'} end
  if #entry[2] > MOST_VALUES then return {'it has more than ' .. MOST_VALUES / 2 .. ' fields'} end
  local id = redis.pcall('XADD', stream, '*', unpack(entry[2]))
  if type(id) == 'table' then return {id.err} end
  redis.call('XDEL', KEYS[1], member)
  redis.call('ZREM', KEYS[2], member)
  return id
end

local reply = {'OK'}
for at = 3, #ARGV, 2 do
  local number = tonumber(ARGV[at + 1])
  local told = send(ARGV[at], number > 0 and KEYS[3 + number])
  if type(told) == 'table' then
    redis.call('ZADD', KEYS[2], string.format('%.0f', now + tonumber(ARGV[2])), ARGV[at])
  end
  reply[#reply + 1] = told
end
return reply
