-- The ticket of an entry: the first field of that name, cut to `longest` + 1 bytes so that a megabyte of id never travels; false when
-- there is none. `fields` is the flat list of names and values.
local function ticket_of(fields, field, longest)
  for at = 1, #fields, 2 do
    if fields[at] == field then return string.sub(fields[at + 1], 1, longest + 1) end
  end
  return false
end
