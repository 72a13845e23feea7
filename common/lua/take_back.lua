-- take_back: one page of what a dead incarnation still has pending goes to `master`, in id order.
-- KEYS: 1 stream, 2 leader, 3 lease of the incarnation, 4 tickets, 5 dead
-- ARGV: 1 group, 2 epoch, 3 incarnation, 4 count, 5 ticket field, 6 longest ticket in bytes
-- Returns: {"FENCED"}, {"ALIVE"} (its lease still runs; nothing happened), or
--          {"OK", number of entries of the page, {id, ticket, ...}, {ids whose body was gone}}; a page of 0 entries says that its list is empty
-- Why Lua: that the lease has ended, that the entries are its own, and that index and pending list change together, must be true at one moment.
-- Memory: works when full
--- @include leads
--- @include ticket_of
--- @include record
--- @include bury
--- @include at_full_memory
if not leads(KEYS[2], ARGV[2]) then return {'FENCED'} end
if redis.call('EXISTS', KEYS[3]) == 1 then return {'ALIVE'} end
redis.call('XLEN', KEYS[5]) -- what is no stream fails here, before anything has changed
local stream, group, tickets_key, dead_one = KEYS[1], ARGV[1], KEYS[4], ARGV[3]
local field, longest = ARGV[5], tonumber(ARGV[6])
local rows = redis.call('XPENDING', stream, group, '-', '+', ARGV[4], dead_one)
at_full_memory(tickets_key)
local entries, gone, leaving, n = {}, {}, {}, 0
for _, row in ipairs(rows) do
  local id = row[1]
  local fields = body_of(stream, id)
  if fields then
    redis.call('XCLAIM', stream, group, 'master', '0', id, 'JUSTID')
    local ticket = ticket_of(fields, field, longest)
    entries[n + 1], entries[n + 2] = id, ticket
    n = n + 2
    local name = ticket or '\255' .. id -- of a message without a ticket id (common/message.py: unkeyed_ticket)
    leaving[name] = leaving[name] or {}
    leaving[name][id] = true
  else
    bury(KEYS[5], id, '', 'body_gone', '', '0', dead_one, now_ms(), now_ms(), nil)
    redis.call('XACK', stream, group, id)
    gone[#gone + 1] = id
  end
end
for ticket, ids in pairs(leaving) do
  local record = redis.call('HGET', tickets_key, ticket)
  if record then
    local owner, fence, kept = read_record(record)
    if owner == dead_one then write_record(tickets_key, ticket, owner, fence, without(kept, ids)) end
  end
end
return {'OK', #rows, entries, gone}
