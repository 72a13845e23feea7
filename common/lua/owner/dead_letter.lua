-- dead_letter: an owner gives up on a message; its ticket goes on (skip) or halts (halt).
-- KEYS: 1 stream, 2 lease, 3 tickets, 4 dead, 5 attempts, 6 changed, 7 errors, 8 letters
-- ARGV: 1 group, 2 incarnation, 3 ticket, 4 id, 5 reason, 6 error, 7 attempts, 8 first start in ms, 9 last start in ms,
--       10 fence, 11 error type, 12 traceback ("" = that of the noted error), 13 policy: skip | halt,
--       14 file and line of the error, 15 the error as it stays noted while the ticket is halted ("" = the known one),
--       16 the handler
-- Returns: "OK", "HALTED", "RETURNED" (to halt, but there was nothing to wait for: what the owner held of the ticket
--          is under `master`), "LOST" (no lease), "STALE" (another owner has the ticket) or "GONE" (it is not in
--          processing any more). Unless the policy is skip, nothing of the ticket under this fence is the caller's
--          after any of them.
-- Why Lua: letter, XACK and index are one step: a crash in between would lose the message or keep it in two places. A
--          halted message stays pending, under `halted`: its id is its place in the ticket's order. The ticket's later
--          entries of its owner go to `master` in the same step, and the index says `halted <fence> <id> <those ids>`.
-- Memory: works when full
if redis.call('EXISTS', KEYS[2]) == 0 then return 'LOST' end
local stream, group, me, ticket, id, policy = KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[13]
local record, owner, fence, ids = record_of(KEYS[3], ticket)
if not record then return 'GONE' end
if policy ~= 'skip' and owner == 'halted' and fence == ARGV[10] and string.match(ids, '^%S+') == id then
  return 'HALTED' -- the call is repeated
end
if owner ~= me or (policy ~= 'skip' and fence ~= ARGV[10]) then return 'STALE' end
local left = without(ids, {[id] = true})
local is_there = left ~= ids
  and (#redis.call('XPENDING', stream, group, id, id, 1, me) == 1 or was_dropped(stream, group, KEYS[4], id))
if policy == 'skip' and not is_there then return 'GONE' end
if policy ~= 'skip' then -- what is of another type fails here, before anything has changed
  redis.call('HLEN', KEYS[5])
  redis.call('XLEN', KEYS[6])
  redis.call('XPENDING', KEYS[1], ARGV[1]) -- so does a missing group: later, each try would write one more letter
end
at_full_memory(KEYS[3])

local function noted(field) -- what is no hash must not hold a message up
  local value = redis.pcall('HGET', KEYS[7], field .. id)
  return type(value) == 'string' and value or ''
end
local fields = is_there and body_of(stream, id)
if not fields and policy ~= 'skip' then policy = 'return' end
if is_there then
  local kept_as = policy == 'halt' and policy or 'skip'
  local traceback = ARGV[12] ~= '' and ARGV[12] or noted('t')
  local more = {policy = kept_as, fence = fence, error_type = ARGV[11], traceback = traceback, at = ARGV[14]}
  more.handler, more.history = ARGV[16], noted('h')
  local reason = fields and ARGV[5] or 'body_gone'
  -- Processes come and go: the first failure was that of a start before ours. (An outage may have begun before it.)
  local since = string.match(noted(''), '"alike":0,"since_ms":([1-9]%d*)}$')
  local first = since and (ARGV[8] == '0' and since or math.min(since, ARGV[8])) or ARGV[8]
  bury(KEYS[4], id, ticket, reason, ARGV[6], ARGV[7], me, first, ARGV[9], fields or nil, more)
  if policy == 'halt' then
    redis.call('XCLAIM', stream, group, 'halted', '0', id, 'FORCE', 'JUSTID')
  else
    redis.call('XACK', stream, group, id)
  end
  redis.call('HDEL', KEYS[5], id)
  redis.pcall('HDEL', KEYS[7], 't' .. id, 'h' .. id)
  local kept = redis.pcall('HLEN', KEYS[7])
  if policy ~= 'halt' then
    redis.pcall('HDEL', KEYS[7], id)
  elseif ARGV[15] ~= '' and type(kept) == 'number' and kept < MOST_ERRORS then
    redis.call('HSET', KEYS[7], id, ARGV[15])
  end
end
if policy == 'skip' then return 'OK' end

-- What is not pending any more is over; the record names what is under `master` then, and nothing else.
left = claim_all(stream, group, left)
if policy == 'halt' then
  redis.call('HSET', KEYS[3], ticket, 'halted ' .. fence .. ' ' .. (left == '' and id or id .. ' ' .. left))
else
  write_record(KEYS[3], ticket, 'returned', fence, left)
end
tell_leader(KEYS[6], ticket)
return policy == 'halt' and 'HALTED' or 'RETURNED'
