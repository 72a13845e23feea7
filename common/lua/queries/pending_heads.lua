-- pending_heads: the oldest entries that are pending for one name of the group, or for all, with their tickets.
-- KEYS: 1 stream
-- ARGV: 1 group, 2 name in the group ("" = all), 3 most entries, 4 ticket field, 5 longest ticket in bytes
-- Returns: {id, ticket, ...}; entries without a ticket or a body are left out; {} when the group is gone
-- Why Lua: the bodies stay in Redis; only the tickets travel.
-- Memory: works when full, as nothing is written
--- @include ticket_of
local command = {'XPENDING', KEYS[1], ARGV[1], '-', '+', ARGV[3]}
if ARGV[2] ~= '' then command[7] = ARGV[2] end
local rows = redis.pcall(unpack(command))
if rows['err'] then return {} end
local found = {}
for _, row in ipairs(rows) do
  local entry = redis.call('XRANGE', KEYS[1], row[1], row[1])[1]
  local ticket = entry and entry[2] and ticket_of(entry[2], ARGV[4], tonumber(ARGV[5]), 0)
  if ticket then
    found[#found + 1] = row[1]
    found[#found + 1] = ticket
  end
end
return found
