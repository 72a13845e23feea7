-- find_entries: one page of looking through a stream, or through the entries pending for a name; bodies stay in Redis.
-- KEYS: 1 stream
-- ARGV: 1 XRANGE or XREVRANGE, 2 and 3 its two ends, 4 most entries to look at, 5 field ("": none is found, all are
--       counted), 6 value, 7 "" or "part": those whose first field of that name has the value in it, and their values
--       come instead of ids; 8 group (none or "" looks at the stream), 9 the name in the group ("" = all)
-- Returns: {number looked at: fewer than asked for where entries are large, id of the last one or "", {ids of those
--          with that value}, 1 when there are no more or 0}
-- Why Lua: XRANGE alone would send every body, of thousands, to find or to count the few that are meant.
-- Memory: works when full, as nothing is written
--- @numbers count 4
local field, wanted, found = ARGV[5], ARGV[6], {}
local function look(id, fields)
  local value = field ~= '' and field_value(fields, field)
  local is_part = ARGV[7] == 'part' and value and string.find(value, wanted, 1, true)
  if is_part or value == wanted then found[#found + 1] = is_part and value or id end
end
if (ARGV[8] or '') == '' then
  local is_all, n, last = each_entry(ARGV[1], KEYS[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), look)
  return {n, last or '', found, is_all and 1 or 0}
end
local command = {'XPENDING', KEYS[1], ARGV[8], ARGV[2], ARGV[3], ARGV[4]}
if ARGV[9] ~= '' then command[7] = ARGV[9] end
local rows = redis.call(unpack(command))
for n, row in ipairs(rows) do
  local fields = body_of(KEYS[1], row[1])
  if fields then look(row[1], fields) end
  if not has_room() and n < #rows then return {n, row[1], found, 0} end
end
local last = rows[#rows]
return {#rows, last and last[1] or '', found, #rows < tonumber(ARGV[4]) and 1 or 0}
