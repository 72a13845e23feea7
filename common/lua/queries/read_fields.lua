-- read_fields: some fields of many entries; only their values travel, and of each its beginning.
-- KEYS: 1 stream
-- ARGV: 1 most bytes of a value, 2 number of fields, 3... fields, then ids
-- Returns: a list for each id, of fewer ids than asked for where bodies are large: for each field {beginning of its
--          value, bytes of the whole value}, or nil where there is no such entry or field
-- Why Lua: XRANGE would send every body.
-- Memory: works when full, as nothing is written
--- @include bodies ticket_of
--- @numbers large 1
local most, fields, found = tonumber(ARGV[1]), whole(ARGV[2], #ARGV - 2), {}
for n = 3 + fields, #ARGV do
  if not has_room() then break end
  local body, values = body_of(KEYS[1], ARGV[n]) or {}, {}
  for at = 1, fields do
    local value = field_value(body, ARGV[2 + at])
    values[at] = value and {string.sub(value, 1, most), #value}
  end
  found[#found + 1] = values
end
return found
