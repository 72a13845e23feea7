-- free_tickets: tickets of a dead incarnation whose pending list is empty lose their records; the end of its recovery.
-- KEYS: 1 stream, 2 leader, 3 lease of the incarnation, 4 tickets, 5 dead, 6 counters
-- ARGV: 1 group, 2 epoch, 3 incarnation, then tickets
-- Returns: {"FENCED"}, {"ALIVE"}, {"PENDING"} (its list is not empty), or
--          {"OK", {tickets that another owner or word has}, {id, ticket, ...: entries of freed records that are under
--          `master`}, number of the tickets, from the first one, that were looked at: fewer than given where bodies
--          were read, and are large, {ids of those that were claimed again: nobody had them pending, and nobody of ours
--          had ended them}}
-- Why Lua: a record may only go while the pending list shows that nothing stands behind it. An entry that it still
--          names may be under `master` without the leader having seen it (an operator's XCLAIM); it must be known
--          before anything later of the ticket is planned. Or it is not pending and has no body: Redis >= 7 drops such
--          an entry at a claim (renew, sweep), and relies on its owner; the owner is dead, so its letter is written
--          here, unless take_back or sweep has just written it.
-- Memory: works when full
--- @include leads util group records bodies letter at_full_memory
if not leads(KEYS[2], ARGV[2]) then return {'FENCED'} end
if redis.call('EXISTS', KEYS[3]) == 1 then return {'ALIVE'} end
if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[3]) > 0 then return {'PENDING'} end
local stream, group, others, parked, restored = KEYS[1], ARGV[1], {}, {}, {}
at_full_memory(KEYS[4])
local function is_under_master(id, ticket)
  if #redis.call('XPENDING', stream, group, id, id, 1, 'master') == 1 then return true end
  if not nobody_has(stream, group, id) then return false end
  if claim_again(stream, group, 'master', id) then
    restored[#restored + 1] = id
    return true
  end
  if not body_of(stream, id) and not has_letter(KEYS[5], id) then
    bury(KEYS[5], id, ticket, 'body_gone', '', '0', ARGV[3], now_ms(), now_ms(), nil)
  end
  return false
end
local looked = 0
for at = 4, #ARGV do
  if not has_room() then break end
  looked = looked + 1
  local ticket = ARGV[at]
  local record = redis.call('HGET', KEYS[4], ticket)
  if record then
    local owner, _, ids = read_record(record)
    if owner == ARGV[3] then
      for id in string.gmatch(ids, '%S+') do
        if is_under_master(id, ticket) then
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
count_up(KEYS[6], 'restored', #restored)
return {'OK', others, parked, looked, restored}
