-- read_letters: one page of dead letters without tracebacks and the fields of their messages.
-- KEYS: 1 dead
-- ARGV: 1 start ("-", an id or "(<id>"), 2 end, 3 count, 4 "newest" = the newest first, "" = the oldest first
-- Returns: {1 when there are no more than these or 0, {{id, {name, value, ...: ours but the traceback, the last is
--          usher-fields}}, ...}}: fewer than asked for where they are large
-- Why Lua: XRANGE alone would send every field of every message, megabytes for a page of a table.
-- Memory: works when full, as nothing is written
--- @include bodies
--- @numbers count 3
local rows = {}
local function head_of(id, flat)
  local head = {}
  for at = 1, #flat - 1, 2 do
    if flat[at] ~= 'usher-traceback' then
      head[#head + 1] = flat[at]
      head[#head + 1] = flat[at + 1]
    end
    if flat[at] == 'usher-fields' then break end
  end
  rows[#rows + 1] = {id, head}
end
local command, first, last = 'XRANGE', ARGV[1], ARGV[2]
if ARGV[4] == 'newest' then command, first, last = 'XREVRANGE', last, first end
local is_all = each_entry(command, KEYS[1], first, last, tonumber(ARGV[3]), head_of)
return {is_all and 1 or 0, rows}
