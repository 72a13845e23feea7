-- Return the ticket of an entry: the first field of that name, cut to `longest` + 1 bytes so that a megabyte of id
-- never travels; false when there is none. `fields` is the flat list of names and values. For an entry of more than
-- `most` bytes (0: no limit), names and values together, return a list: {ticket or "", bytes}. The second value is the
-- size in bytes. `tenant` and `priority` name two more fields (nil or "": none): an entry with one of them is returned
-- as a list, too: {ticket or false, 0, value of the former or "", of the latter or ""}, each cut to MARK bytes.
local MARK = 600
local function ticket_of(fields, field, longest, most, tenant, priority)
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
  if (tenant or '') ~= '' or (priority or '') ~= '' then
    local marks = {}
    for at = 1, #fields, 2 do
      local name = fields[at]
      if name ~= '' and not marks[name] and (name == tenant or name == priority) then
        marks[name] = string.sub(fields[at + 1], 1, MARK)
      end
    end
    if next(marks) then return {ticket, 0, marks[tenant] or '', marks[priority] or ''}, bytes end
  end
  return ticket, bytes
end
