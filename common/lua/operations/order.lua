-- order: an operator's order about the first unfinished message of a ticket: retry (it starts at once; where its ticket
--        is halted, the caller has found no letter of it, and nothing else lets it go on), give_up (whoever has the
--        ticket next, or has it now and does not run the message, makes a dead letter of it), cancel (what runs of it
--        is ended), interrupt (it is told, and cancelled after so many seconds) or clear (what waits of its ticket
--        becomes dead letters).
-- KEYS: 1 stream, 2 tickets, 3 attempts, 4 changed, 5 actions, 6 lease of the owner, 7 inbox of the owner; without an
--       owner there are no 6 and 7
-- ARGV: 1 group, 2 retry | give_up | cancel | interrupt [seconds] | clear, 3 ticket, 4 the head of its record as the
--       caller read it ("" = no record), 5 the message's id, 6 length of the action log, 7 the failures that use up
--       every number of attempts; then names and values for the action log
-- Returns: "ASKED" (it stands in the owner's inbox), "DONE" (nobody has the ticket: what was to be done is done),
--          "MOVED" (the record is another by now, begins with another message, or waits for an operator), "GONE" (the
--          message is not pending where the record says) or "LOST" (the owner has no lease any more). The last three
--          change nothing.
-- Why Lua: the order, its line in the action log and the check of who has the ticket are one step. An XADD alone would
--          make the inbox of a dead incarnation anew. Repeating the call repeats the order: to give up twice, or to be
--          due now twice, is the same as once.
-- Memory: works when full
--- @numbers count 6, large 7
local what, ticket, id = ARGV[2], ARGV[3], ARGV[5]
redis.call('XLEN', KEYS[4]) -- what is no stream, or no hash, fails here, before anything has changed
redis.call('XLEN', KEYS[5])
redis.call('HLEN', KEYS[3])
local record, owner, fence, ids = record_of(KEYS[2], ticket)
if record and not owner or (owner and owner .. ' ' .. fence or '') ~= ARGV[4] then return 'MOVED' end
local has_owner, is_halted = KEYS[6] ~= nil, owner == 'halted' and what == 'retry'
local is_given_back = owner == 'returned' or owner and due_ms_of(owner)
if owner and not (has_owner or is_given_back or is_halted) then return 'MOVED' end
local whose = (has_owner or is_halted) and owner or 'master'
local function is_pending(one)
  return #redis.call('XPENDING', KEYS[1], ARGV[1], one, one, 1, whose) == 1
end
local is_named = not ids
for _, one in ipairs(split_ids(ids or '')) do
  is_named = is_named or one == id
  if is_above(id, one) and is_pending(one) then return 'MOVED' end
end
if not is_named then return 'MOVED' end
if not is_pending(id) then return 'GONE' end
if has_owner and redis.call('EXISTS', KEYS[6]) == 0 then return 'LOST' end

at_full_memory(KEYS[3])
if what == 'give_up' then
  local starts, _, crashes, losses = read_attempts(redis.call('HGET', KEYS[3], id))
  redis.call('HSET', KEYS[3], id, attempts_value(starts, ARGV[7], crashes, losses))
end
if has_owner then
  redis.call('XADD', KEYS[7], '*', 'order', what, 'ticket', ticket, 'id', id)
elseif owner and due_ms_of(owner) or is_halted then
  if is_halted then redis.call('XCLAIM', KEYS[1], ARGV[1], 'master', '0', id, 'JUSTID') end
  write_record(KEYS[2], ticket, 'returned', fence, ids)
  tell_leader(KEYS[4], ticket)
end
local outcome = has_owner and 'ASKED' or 'DONE'
redis.call('XADD', KEYS[5], 'MAXLEN', '~', ARGV[6], '*', 'outcome', string.lower(outcome), unpack(ARGV, 8))
return outcome
