-- guard: the commands of a handler's effect, once per uid, refused under an old fence.
-- KEYS: 1 fence of the ticket, 2 uids of the ticket, 3 and on: keys of the commands
-- ARGV: 1 fence ("": the message has no ticket, so it is compared with none), 2 uid, 3 ms for which fence and uid are
--       kept, 4 most uids kept,
--       5 and on: each command: number of its words, words
-- Returns: {"APPLIED", replies...} | {"DUPLICATE"} | {"STALE", the higher fence} | {"REFUSED", number of the command,
--          error} | {"PARTLY", number, error}
-- Why Lua: fence, uid and effect in one step. A script that fails is not undone: when the first command is refused
--          nothing has happened and nothing is kept; when a later one is, the uid is kept as partly applied, and no
--          repeat adds to the half.
-- Memory: refused when full (OOM), a repeat too: DUPLICATE and PARTLY write the fence
--- @numbers large 3 4
local fence, uid, checked = ARGV[1], ARGV[2], 5
while checked <= #ARGV do checked = checked + 1 + whole(ARGV[checked], #ARGV - checked) end
-- Compare decimals without leading zeros as text; as numbers they would be rounded.
local function above(a, b) return #a > #b or (#a == #b and a > b) end
local seen = fence ~= '' and redis.call('GET', KEYS[1])
local function take_fence() if fence ~= '' then redis.call('SET', KEYS[1], fence, 'PX', ARGV[3]) end end
if seen and above(seen, fence) then return {'STALE', seen} end
local is_done = redis.call('ZSCORE', KEYS[2], 'done:' .. uid)
if is_done or redis.call('ZSCORE', KEYS[2], 'half:' .. uid) then
  take_fence() -- the owner of a repeat has the ticket too: a zombie of before is refused from now on
  if is_done then return {'DUPLICATE'} end
  return {'PARTLY', '0', 'by an earlier try'}
end
-- Before the effect: a user that may not run this command must not get the effect either.
local newest = redis.call('ZREVRANGE', KEYS[2], 0, 0, 'WITHSCORES')[2]
local told, at, number = {'APPLIED'}, 5, 0
local mark = 'done:'
while at <= #ARGV do
  local words = {}
  for i = at + 1, at + tonumber(ARGV[at]) do words[#words + 1] = ARGV[i] end
  at, number = at + #words + 1, number + 1
  local reply = redis.pcall(unpack(words))
  if type(reply) == 'table' and reply.err then
    if number == 1 then return {'REFUSED', '1', reply.err} end
    told, mark = {'PARTLY', tostring(number), reply.err}, 'half:'
    break
  end
  told[#told + 1] = reply
end
local now = tonumber(now_ms())
take_fence()
-- Above all others, also when the clock went back (a failover) or stands still: else this very uid could be the first
-- that is one too many.
redis.call('ZADD', KEYS[2], string.format('%.0f', math.max(now, newest and tonumber(newest) + 1 or 0)), mark .. uid)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('(%.0f', now - tonumber(ARGV[3])))
redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -1 - tonumber(ARGV[4]))
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return told
