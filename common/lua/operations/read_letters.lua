-- read_letters: one page of dead letters without tracebacks and the fields of their messages.
-- KEYS: 1 dead
-- ARGV: 1 start ("-", an id or "(<id>"), 2 end, 3 count, 4 "newest" = the newest first, "" = the oldest first
-- Returns: {{id, {name, value, ...: ours but the traceback, the last is usher-fields}}, ...}
-- Why Lua: XRANGE alone would send every field of every message, megabytes for a page of a table.
-- Memory: works when full, as nothing is written
local reply = {}
local found
if ARGV[4] == 'newest' then
  found = redis.call('XREVRANGE', KEYS[1], ARGV[2], ARGV[1], 'COUNT', ARGV[3])
else
  found = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[2], 'COUNT', ARGV[3])
end
for n, letter in ipairs(found) do
  local flat, head = letter[2], {}
  for at = 1, #flat - 1, 2 do
    if flat[at] ~= 'usher-traceback' then
      head[#head + 1] = flat[at]
      head[#head + 1] = flat[at + 1]
    end
    if flat[at] == 'usher-fields' then break end
  end
  reply[n] = {letter[1], head}
end
return reply
