-- read_parked: one page of the entries pending under `master`, in id order; a new epoch starts from it.
-- KEYS: 1 stream, 2 leader, 3 dead, 4 letters
-- ARGV: 1 group, 2 epoch, 3 start ("-" or "(<id>"), 4 count, 5 ticket field, 6 longest ticket in bytes, 7 longest
--       message in bytes (0: any), 8 tenant field, 9 priority field ("": none)
-- Returns: {"FENCED"} or {"OK", last id of the page or "", {id, ticket (ticket_of), ...}, {ids whose body was gone}}; a
--          page is shorter than asked for where bodies are large
-- Why Lua: the page and the bodies must be of one moment, and an entry whose body is gone becomes a dead letter in the
--          same step.
-- Memory: works when full
--- @include leads bodies ticket_of index answer letter
--- @numbers count 4 6, large 7
if not leads(KEYS[2], ARGV[2]) then return {'FENCED'} end
local rows = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], '+', ARGV[4], 'master')
local field, longest, most, last = ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7]), ''
local entries, gone, n = {}, {}, 0
for _, row in ipairs(rows) do
  if not has_room() then break end
  local id = row[1]
  local fields = body_of(KEYS[1], id)
  if fields then
    entries[n + 1], entries[n + 2] = id, ticket_of(fields, field, longest, most, ARGV[8], ARGV[9])
    n = n + 2
  else
    bury(KEYS[3], id, '', 'body_gone', '', '0', 'master', now_ms(), now_ms(), nil)
    redis.call('XACK', KEYS[1], ARGV[1], id)
    gone[#gone + 1] = id
  end
  last = id
end
return {'OK', last, entries, gone}
