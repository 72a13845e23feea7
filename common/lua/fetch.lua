-- fetch: read new entries of the ticket stream into the pending list, under `master`.
-- KEYS: 1 stream, 2 leader
-- ARGV: 1 group, 2 epoch, 3 count, 4 ticket field, 5 longest ticket in bytes, 6 longest message in bytes (0: any)
-- Returns: {"FENCED"} or {"OK", id, ticket, id, ticket, ...}, fewer than asked for when there are no more or when these are large; a ticket
--          is nil when the entry has no such field, one byte longer than allowed when it is too long, and {ticket, bytes} when the entry is
--          too large. Only id and ticket travel: the consumer reads the body.
-- Why Lua: a deposed master that is still blocked in an XREADGROUP of its own would be served entries and strand them. No BLOCK is
--          possible in a script; the doorbell waits with a plain XREAD. A lost reply costs nothing: the entries are pending under `master`.
-- Memory: refused when full
--- @include leads
--- @include ticket_of
if not leads(KEYS[2], ARGV[2]) then return {'FENCED'} end
local reply = {'OK'}
local field, longest, most, n = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]), 1
-- Entries may be large, and Redis stands still meanwhile: a few show how large they are, and a call ends with about ENOUGH bytes.
local ENOUGH, left, bytes, chunk = 8 * 1024 * 1024, tonumber(ARGV[3]), 0, 8
repeat
  chunk = math.min(chunk, left)
  local found = redis.call('XREADGROUP', 'GROUP', ARGV[1], 'master', 'COUNT', chunk, 'STREAMS', KEYS[1], '>')
  local entries = found and found[1][2] or {}
  for _, entry in ipairs(entries) do
    local ticket, size = ticket_of(entry[2], field, longest, most)
    reply[n + 1], reply[n + 2] = entry[1], ticket
    n, bytes = n + 2, bytes + size
  end
  left = left - #entries
  local is_all = #entries < chunk
  chunk = math.max(1, math.floor((ENOUGH - bytes) / math.max(1, 2 * bytes / math.max(1, n - 1))))
until is_all or left <= 0 or bytes >= ENOUGH
return reply
