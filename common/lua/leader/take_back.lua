-- take_back: one page of what is pending for a dead incarnation goes to `master`, in id order. The first unacknowledged
--            entry of each ticket may have been running: that counts as a loss, unless its journal says otherwise. Or
--            one page of what is pending under `master`: a new epoch starts from it.
-- KEYS: 1 stream, 2 leader, 3 lease of the incarnation, 4 dead, 5 attempts, 6 noted and 7 inbox (of the incarnation),
--       8 letters
-- ARGV: 1 group, 2 epoch, 3 incarnation, or master, 4 start ("-" or "(<id>"), 5 count, 6 ticket field, 7 longest ticket
--       in bytes, 8 longest message in bytes (0: any), 9 tenant field, 10 priority field ("": none)
-- Returns: {"FENCED"}, {"ALIVE"} (its lease still runs; nothing happened), or {"OK", number of entries of the page,
--          last id of the page or "", {id, ticket (ticket_of), ...}, {ids whose body was gone}}; a page is shorter than
--          asked for where bodies are large, and one of 0 entries means that its list is empty (and that its inbox is
--          gone: without a lease nothing can be added to it any more)
-- Why Lua: that the lease has ended and that the entries are its own must be true at one moment; so must a loss and its
--          entry, or a page that comes twice would count it twice. Of one whose body is gone the letter is written in
--          the same step.
-- Memory: works when full
--- @numbers count 5 7, large 8
if not leads(KEYS[2], ARGV[2]) then return {'FENCED'} end
if redis.call('EXISTS', KEYS[3]) == 1 then return {'ALIVE'} end
redis.call('XLEN', KEYS[4]) -- what is no stream, or no hash, fails here, before anything has changed
local stream, group, name, is_parked = KEYS[1], ARGV[1], ARGV[3], ARGV[3] == 'master'
local is_told = is_parked or redis.call('HGET', KEYS[6], '')
local field, longest, most, last = ARGV[6], tonumber(ARGV[7]), tonumber(ARGV[8]), ''
local rows = redis.call('XPENDING', stream, group, ARGV[4], '+', ARGV[5], name)
if not is_parked then
  redis.call('HLEN', KEYS[5])
  at_full_memory(KEYS[5])
end
local entries, gone, n, size = {}, {}, 0, 0
local function count_loss(id, ticket) -- of each ticket its first entry; nobody runs what has none
  if type(ticket) == 'table' then ticket = ticket[1] end
  if (ticket or '') == '' or redis.call('HSETNX', KEYS[6], ticket, '1') == 0 then return end
  local starts, failures, crashes, losses = read_attempts(redis.call('HGET', KEYS[5], id))
  redis.call('HSET', KEYS[5], id, attempts_value(starts, failures, crashes, losses + 1))
end
for _, row in ipairs(rows) do
  if not has_room() then break end
  local id = row[1]
  size, last = size + 1, id
  local fields = body_of(stream, id)
  if fields then
    if not is_parked then redis.call('XCLAIM', stream, group, 'master', '0', id, 'JUSTID') end
    local ticket = ticket_of(fields, field, longest, most, ARGV[9], ARGV[10])
    entries[n + 1], entries[n + 2] = id, ticket
    n = n + 2
    if not is_told then count_loss(id, ticket) end
  else
    bury(KEYS[4], id, '', 'body_gone', '', '0', name, now_ms(), now_ms(), nil)
    redis.call('XACK', stream, group, id)
    redis.pcall('HDEL', KEYS[5], id)
    gone[#gone + 1] = id
  end
end
if size == 0 then
  -- Not left to reap: if the group is lost before that, and a successor has its registration, the inbox would be
  -- forgotten.
  redis.call('DEL', KEYS[6], KEYS[7])
elseif not is_told then
  redis.call('PEXPIRE', KEYS[6], 3600000)
end
return {'OK', size, last, entries, gone}
