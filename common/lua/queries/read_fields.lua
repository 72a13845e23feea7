-- read_fields: some fields of many entries; only their values travel, and of each its beginning.
-- KEYS: 1 stream
-- ARGV: 1 most bytes of a value, 2 "1": a name with dots is no path, 3 number of fields, 4... fields, then ids
-- Returns: a list for each id, of fewer ids than asked for where bodies are large: for each field {beginning of its
--          value, bytes of the whole value}, or nil where there is no such entry or field
-- Why Lua: XRANGE would send every body.
-- Memory: works when full, as nothing is written
--- @numbers large 1
local most, fields, found = tonumber(ARGV[1]), whole(ARGV[3], #ARGV - 3), {}
local value_of = ARGV[2] == '1' and first_value or field_value
for n = 4 + fields, #ARGV do
  if not has_room() then break end
  local body, values = body_of(KEYS[1], ARGV[n]) or {}, {}
  for at = 1, fields do
    local value = value_of(body, ARGV[3 + at])
    values[at] = value and {string.sub(value, 1, most), #value} or false
  end
  found[#found + 1] = values
end
return found
