-- give_back: an owner returns tickets of which nothing runs, and nothing waits to be acknowledged: in a drain, because
--            the leader recalls them, or because their first message is to wait.
-- KEYS: 1 stream, 2 lease, 3 tickets, 4 dead, 5 changed, 6 attempts, 7 letters
-- ARGV: 1 group, 2 incarnation, then for each ticket: ticket, fence, ids of it that the caller knows, separated by
--       spaces ("on": a ticket that was given back under this fence, and waits, is to wait no longer), ms for which it
--       is to wait ("" = it may go on at once)
-- Returns: {"LOST"} (no lease; nothing happened) or {"OK", then for each ticket: "GIVEN", or "GONE" (no record, or
--          another owner or fence: nothing of it under this fence is the caller's, perhaps by this very call)}: for
--          fewer tickets than given where bodies left no room for more
-- Why Lua: entries and index change together. Each ticket is marked `returned` with its ids, or `waits@<ms>`, by Redis'
--          clock: it is handed over no earlier, unless an operator has given its first message up meanwhile. The note
--          in `changed` keeps a leader that does not know of it yet from beginning with a later entry. Of what the
--          record names, the pending ones are not over; the mark names these and nothing else, in id order: Redis >= 7
--          drops an entry whose body is gone when it is claimed (here, or by renew or sweep before). A call that comes
--          twice, or late, must not give back what was handed to the caller again, under a later fence.
-- Memory: works when full
if redis.call('EXISTS', KEYS[2]) == 0 then return {'LOST'} end
local stream, group, me, tickets_key = KEYS[1], ARGV[1], ARGV[2], KEYS[3]
for at = 6, #ARGV, 4 do whole(ARGV[at] == '' and 0 or ARGV[at], 1e15) end
redis.call('XLEN', KEYS[5]) -- what is no stream fails here, before anything has changed; so does a missing group
redis.call('XPENDING', stream, group)
redis.call('HLEN', KEYS[6])
at_full_memory(tickets_key)

local function word_of(after, ids)
  local _, failures = read_attempts(redis.call('HGET', KEYS[6], string.match(ids, '^%S*')))
  if after == '' or failures >= GIVEN_UP then return 'returned' end
  return string.format('waits@%.0f', tonumber(now_ms()) + tonumber(after))
end

local reply = {'OK'}
for at = 3, #ARGV, 4 do
  if at > 3 and not has_room() then break end
  local ticket, named, after = ARGV[at], ARGV[at + 2], ARGV[at + 3]
  local _, owner, fence, held = record_of(tickets_key, ticket)
  if named == 'on' then
    local waits = owner and due_ms_of(owner) and fence == ARGV[at + 1]
    if waits then
      write_record(tickets_key, ticket, 'returned', fence, held)
      tell_leader(KEYS[5], ticket)
    end
    reply[#reply + 1] = waits and 'GIVEN' or 'GONE'
  elseif owner ~= me or fence ~= ARGV[at + 1] then
    reply[#reply + 1] = 'GONE'
  else
    local ids, over = claim_all(stream, group, held)
    for _, id in ipairs(split_ids(named)) do -- of those that the caller knows, none is over
      if over[id] and not body_of(stream, id) then
        bury(KEYS[4], id, ticket, 'body_gone', '', '0', me, now_ms(), now_ms(), nil)
      end
    end
    write_record(tickets_key, ticket, word_of(after, ids), fence, ids)
    tell_leader(KEYS[5], ticket)
    reply[#reply + 1] = 'GIVEN'
  end
end
return reply
