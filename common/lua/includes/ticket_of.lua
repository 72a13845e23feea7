-- Return the ticket of an entry: the first field of that name, cut to `longest` + 1 bytes so that a megabyte of id
-- never travels; false when there is none. `fields` is the flat list of names and values. For an entry of more than
-- `most` bytes (0: no limit), names and values together, return a list: {ticket or "", bytes}. The second value is the
-- size in bytes.
local function ticket_of(fields, field, longest, most)
  local ticket = false
  for at = 1, #fields, 2 do
    if fields[at] == field then
      ticket = string.sub(fields[at + 1], 1, longest + 1)
      break
    end
  end
  local bytes = 0
  for at = 1, #fields do bytes = bytes + #fields[at] end
  if most > 0 and bytes > most then return {ticket or '', bytes}, bytes end
  return ticket, bytes
end
