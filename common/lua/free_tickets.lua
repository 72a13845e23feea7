-- free_tickets: tickets of a dead incarnation whose pending list is empty lose their records; the end of its recovery.
-- KEYS: 1 stream, 2 leader, 3 lease of the incarnation, 4 tickets
-- ARGV: 1 group, 2 epoch, 3 incarnation, then tickets
-- Returns: {"FENCED"}, {"ALIVE"}, {"PENDING"} (its list is not empty), or {"OK", {tickets that another owner or word has}}
-- Why Lua: a record may only go while the pending list shows that nothing stands behind it.
-- Memory: works when full
--- @include leads
--- @include record
if not leads(KEYS[2], ARGV[2]) then return {'FENCED'} end
if redis.call('EXISTS', KEYS[3]) == 1 then return {'ALIVE'} end
if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[3]) > 0 then return {'PENDING'} end
local others = {}
for at = 4, #ARGV do
  local record = redis.call('HGET', KEYS[4], ARGV[at])
  if record then
    if read_record(record) == ARGV[3] then
      redis.call('HDEL', KEYS[4], ARGV[at])
    else
      others[#others + 1] = ARGV[at]
    end
  end
end
return {'OK', others}
