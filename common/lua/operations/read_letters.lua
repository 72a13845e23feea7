-- read_letters: one page of dead letters without tracebacks and the fields of their messages.
-- KEYS: 1 dead, 2 letters
-- ARGV: 1 start ("-", an id or "(<id>"), 2 end, 3 count, 4 "newest" = the newest first, "" = the oldest first, 5 what
--       they have in common, as the members of the index begin ("" = all letters)
-- While the index has not as many letters as there are, all are looked at, 200 in a call.
-- Returns: {1 when there are no more than these or 0, {{id, {name, value, ...: ours but the traceback, the last is
--          usher-fields}}, ...}, the last id looked at or ""}: fewer than asked for where they are large
-- Why Lua: XRANGE alone would send every field of every message, megabytes for a page of a table. The letters of a
--          ticket, a message or a group are read by the index, in one call.
-- Memory: works when full, as nothing is written
--- @numbers count 3
local rows, newest, begin, count = {}, ARGV[4] == 'newest', ARGV[5], tonumber(ARGV[3])
local is_found = begin ~= '' and is_whole(KEYS[1])
local function look(id, flat)
  local named, ends = head_of(flat)
  if begin ~= '' and not is_found then
    local group, _, at, ticket, message = members_of_letter(id, named)
    local has = {g = 'g' .. group .. ' ' .. at, t = ticket, m = message}
    if has[string.sub(begin, 1, 1)] ~= begin .. at then return end
  end
  local head = {}
  for at = 1, ends - 2, 2 do
    if flat[at] ~= 'usher-traceback' then
      head[#head + 1] = flat[at]
      head[#head + 1] = flat[at + 1]
    end
  end
  rows[#rows + 1] = {id, head}
end
if not is_found then
  if begin == 'g' .. OTHERS .. ' ' then return redis.error_reply('TRYAGAIN the index of the letters is mended') end
  if begin ~= '' then count = 200 end
  local command, first, last = 'XRANGE', ARGV[1], ARGV[2]
  if newest then command, first, last = 'XREVRANGE', last, first end
  local is_all, _, reached = each_entry(command, KEYS[1], first, last, count, look)
  return {is_all and 1 or 0, rows, reached or ''}
end
local function bound(text, widest)
  local open, id = string.match(text, '^(%(?)(%d.*)$')
  if not id then return widest end
  return (open == '(' and '(' or '[') .. begin .. sortable(id) .. (string.find(id, '-', 1, true) and '' or widest)
end
local low, high, reached = bound(ARGV[1], ''), bound(ARGV[2], '~'), ''
low, high = low == '' and '[' .. begin or low, high == '~' and '(' .. begin .. '~' or high
local found
if newest then
  found = redis.call('ZREVRANGEBYLEX', letters_key, high, low, 'LIMIT', 0, count)
else
  found = redis.call('ZRANGEBYLEX', letters_key, low, high, 'LIMIT', 0, count)
end
local is_all = #found < count
for _, member in ipairs(found) do
  if reached ~= '' and not has_room() then is_all = false break end
  reached = string.gsub(string.match(member, '%S*$'), '%l', '')
  local flat = body_of(KEYS[1], reached)
  if flat then look(reached, flat) end
end
return {is_all and 1 or 0, rows, reached}
