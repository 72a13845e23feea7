-- read_field: one field of many entries; only its values travel.
-- KEYS: 1 stream
-- ARGV: 1 field, 2... ids
-- Returns: a list with the field's first value for each id, nil where there is no such entry or field, or bodies before
--          it left no room
-- Why Lua: XRANGE would send every body.
-- Memory: works when full, as nothing is written
--- @include bodies
local values = {}
for n = 2, #ARGV do
  local fields, value = has_room() and body_of(KEYS[1], ARGV[n]) or {}, false
  for at = 1, #fields, 2 do
    if fields[at] == ARGV[1] then value = fields[at + 1] break end
  end
  values[n - 1] = value
end
return values
