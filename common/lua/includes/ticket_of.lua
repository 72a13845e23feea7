-- Return the value of an entry's field: the first one of that name. Without one, a name with dots is a path: what is
-- in the JSON object in the field before its first dot, a text or a whole number below 2^53, which is exact here. Else,
-- and for JSON of more than LONGEST_JSON bytes, which would hold Redis up, false. `fields` is the flat list of names
-- and values. The same rule in Python: common/protocol/message.py, ticket_value.
local LONGEST_JSON, EXACT = 65536, 2 ^ 53
local function first_value(fields, name)
  for at = 1, #fields, 2 do
    if fields[at] == name then return fields[at + 1] end
  end
end
local function field_value(fields, name)
  local own = first_value(fields, name)
  if own then return own end
  local root, path = string.match(name, '^([^.]+)%.(.+)$')
  local json = root and first_value(fields, root)
  if not json or #json > LONGEST_JSON then return false end
  local is_json, value = pcall(cjson.decode, json)
  for key in string.gmatch(path, '[^.]+') do value = is_json and type(value) == 'table' and value[key] end
  if type(value) == 'number' and value % 1 == 0 and math.abs(value) < EXACT then
    return value == 0 and '0' or string.format('%.0f', value)
  end
  return type(value) == 'string' and value
end
-- Return the ticket of an entry (field_value), cut to `longest` + 1 bytes so that a megabyte of id never travels; false
-- when there is none. `fields` is the flat list of names and values. For an entry of more than
-- `most` bytes (0: no limit), names and values together, return a list: {ticket or "", bytes}. The second value is the
-- size in bytes. `tenant` and `priority` name two more fields (nil or "": none): an entry with one of them is returned
-- as a list, too: {ticket or false, 0, value of the former or "", of the latter or ""}, each cut to MARK bytes.
local MARK = 600
local function ticket_of(fields, field, longest, most, tenant, priority)
  local ticket = field_value(fields, field)
  if ticket then ticket = string.sub(ticket, 1, longest + 1) end
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
