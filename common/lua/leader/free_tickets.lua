-- free_tickets: tickets of a dead incarnation whose pending list is empty lose their records; the end of its recovery.
-- KEYS: 1 stream, 2 leader, 3 lease of the incarnation, 4 tickets, 5 dead, 6 letters
-- ARGV: 1 group, 2 epoch, 3 incarnation, then for each ticket: ticket, and what of it the leader knows as unfinished,
--       separated by spaces
-- Returns: {"FENCED"}, {"ALIVE"}, {"PENDING"} (its list is not empty), or {"OK", {tickets that another owner or word
--          has}, {id, ticket, ...: entries of freed records that are under `master`}, number of the tickets, from the
--          first one, that were looked at: fewer than given where bodies were read, and are large}
-- Why Lua: a record may only go while the pending list shows that nothing stands behind it. An entry that it names may
--          be under `master` without the leader having seen it (an operator's XCLAIM); it must be known before anything
--          later of the ticket is planned. What is pending for nobody is over; what nobody has reported, and has no
--          body, Redis >= 7 has dropped at a claim (renew, sweep) while its owner lived: its letter is written here.
-- Memory: works when full
if not leads(KEYS[2], ARGV[2]) then return {'FENCED'} end
if redis.call('EXISTS', KEYS[3]) == 1 then return {'ALIVE'} end
local stream, group, others, parked = KEYS[1], ARGV[1], {}, {}
if #redis.call('XPENDING', stream, group, '-', '+', 1, ARGV[3]) > 0 then return {'PENDING'} end
at_full_memory(KEYS[4])
local function free(ticket, ids, unfinished)
  for _, id in ipairs(split_ids(ids)) do
    if #redis.call('XPENDING', stream, group, id, id, 1, 'master') == 1 then
      parked[#parked + 1] = id
      parked[#parked + 1] = ticket
    end
  end
  for _, id in ipairs(split_ids(unfinished)) do
    if nobody_has(stream, group, id) and not body_of(stream, id) and not has_letter(KEYS[5], id) then
      bury(KEYS[5], id, ticket, 'body_gone', '', '0', ARGV[3], now_ms(), now_ms(), nil)
    end
  end
  redis.call('HDEL', KEYS[4], ticket)
end
local looked = 0
for at = 4, #ARGV, 2 do
  if not has_room() then break end
  looked = looked + 1
  local record = redis.call('HGET', KEYS[4], ARGV[at])
  local owner, _, ids
  if record then owner, _, ids = read_record(record) end
  if owner == ARGV[3] then
    free(ARGV[at], ids, ARGV[at + 1])
  elseif record then
    others[#others + 1] = ARGV[at]
  end
end
return {'OK', others, parked, looked}
