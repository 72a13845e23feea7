-- fetch: read new entries of the ticket stream into the pending list, under `master`.
-- KEYS: 1 stream, 2 leader
-- ARGV: 1 group, 2 epoch, 3 count, 4 ticket field, 5 longest ticket in bytes, 6 longest message in bytes (0: any)
-- Returns: {"FENCED"} or {"OK", id, ticket, id, ticket, ...}; a ticket is nil when the entry has no such field, and one byte longer
--          than allowed when it is too long, and {ticket, bytes} when the entry is too large. Only id and ticket travel: the consumer reads the body.
-- Why Lua: a deposed master that is still blocked in an XREADGROUP of its own would be served entries and strand them. No BLOCK is
--          possible in a script; the doorbell waits with a plain XREAD. A lost reply costs nothing: the entries are pending under `master`.
-- Memory: refused when full
--- @include leads
--- @include ticket_of
if not leads(KEYS[2], ARGV[2]) then return {'FENCED'} end
local found = redis.call('XREADGROUP', 'GROUP', ARGV[1], 'master', 'COUNT', ARGV[3], 'STREAMS', KEYS[1], '>')
local reply = {'OK'}
if not found then return reply end
local field, longest, most, n = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]), 1
for _, entry in ipairs(found[1][2]) do
  reply[n + 1] = entry[1]
  reply[n + 2] = ticket_of(entry[2], field, longest, most)
  n = n + 2
end
return reply
