-- free_tickets: tickets of a dead incarnation whose pending list is empty lose their records; the end of its recovery.
-- KEYS: 1 stream, 2 leader, 3 lease of the incarnation, 4 tickets
-- ARGV: 1 group, 2 epoch, 3 incarnation, then tickets
-- Returns: {"FENCED"}, {"ALIVE"}, {"PENDING"} (its list is not empty), or {"OK", {tickets that another owner or word
--          has}, {id, ticket, ...: entries of freed records that are under `master`}}
-- Why Lua: a record may only go while the pending list shows that nothing stands behind it. An entry that it names may
--          be under `master` without the leader having seen it (an operator's XCLAIM); it must be known before anything
--          later of the ticket is planned. What is pending for nobody is over.
-- Memory: works when full
--- @include leads records
if not leads(KEYS[2], ARGV[2]) then return {'FENCED'} end
if redis.call('EXISTS', KEYS[3]) == 1 then return {'ALIVE'} end
if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[3]) > 0 then return {'PENDING'} end
local others, parked = {}, {}
for at = 4, #ARGV do
  local ticket = ARGV[at]
  local record = redis.call('HGET', KEYS[4], ticket)
  if record then
    local owner, _, ids = read_record(record)
    if owner == ARGV[3] then
      for id in string.gmatch(ids, '%S+') do
        if #redis.call('XPENDING', KEYS[1], ARGV[1], id, id, 1, 'master') == 1 then
          parked[#parked + 1] = id
          parked[#parked + 1] = ticket
        end
      end
      redis.call('HDEL', KEYS[4], ticket)
    else
      others[#others + 1] = ticket
    end
  end
end
return {'OK', others, parked}
