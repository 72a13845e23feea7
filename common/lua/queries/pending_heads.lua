-- pending_heads: the oldest entries that are pending for one name of the group, or for all, with their tickets.
-- KEYS: 1 stream
-- ARGV: 1 group, 2 name in the group ("" = all), 3 most entries, 4 ticket field, 5 longest ticket in bytes,
--       6 their first id ("-")
-- Returns: {1 when there are no more than were looked at or 0, {id, ticket, ...}}: fewer than asked for where bodies
--          are large; entries without a ticket or a body are left out; {1, {}} when the group is gone
-- Why Lua: the bodies stay in Redis; only the tickets travel.
-- Memory: works when full, as nothing is written
--- @include bodies ticket_of
--- @numbers count 3 5
local command = {'XPENDING', KEYS[1], ARGV[1], ARGV[6] or '-', '+', ARGV[3]}
if ARGV[2] ~= '' then command[7] = ARGV[2] end
local rows = redis.pcall(unpack(command))
if rows['err'] then return {1, {}} end
local found = {}
for _, row in ipairs(rows) do
  if not has_room() then return {0, found} end
  local fields = body_of(KEYS[1], row[1])
  local ticket = fields and ticket_of(fields, ARGV[4], tonumber(ARGV[5]), 0)
  if ticket then
    found[#found + 1] = row[1]
    found[#found + 1] = ticket
  end
end
return {#rows < tonumber(ARGV[3]) and 1 or 0, found}
