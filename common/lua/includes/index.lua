-- The index of the dead letters, last of the keys: a sorted set of members with score 0, so that it counts and finds
-- ranges of them without a scan. Of a letter there are "t<bytes>:<ticket> <at>", "m<bytes>:<message id> <at>" and
-- "g<group> <at>", and once for a group "d<group> <reason, error, policy, place, handler>", a line each. <at> is the
-- letter's id, which sorts as text with a letter of the alphabet for each number of digits. Written with pcall: what is
-- no sorted set must not hold a message up; recount_letters finds out.
local letters_key, MOST_GROUPS, OTHERS = table.remove(KEYS), 200, 'others'

local function sortable(id)
  local ms, number = string.match(id, '^(%d+)%-?(%d*)$')
  local at = string.char(96 + #ms) .. ms
  return number == '' and at or at .. '-' .. string.char(96 + #number) .. number
end

local function members_of(kind, value) return kind .. #value .. ':' .. value .. ' ' end

local function count_letters(from, to)
  local number = redis.pcall('ZLEXCOUNT', letters_key, from, to)
  return type(number) == 'number' and number or 0
end

local function of_group(group) return count_letters('[g' .. group .. ' ', '(g' .. group .. ' ~') end

-- Return what letters are counted by. Long numbers, as of ids, are none: an error of each message would be a group.
-- The words for what raised nothing: common/protocol/attempts.py, last_error.py.
local UNRAISED = {'its process ended while its handler ran', 'it ran past USHER_HANDLER_SECONDS'}
local function told_of(head)
  local name, error = head['usher-error-type'] or '', head['usher-error'] or ''
  for _, words in ipairs(name == '' and UNRAISED or {}) do
    if string.sub(error, 1, #words) == words then name = words end
  end
  local parts = {head['usher-reason'], name, head['usher-policy'], head['usher-at'], head['usher-handler']}
  for at = 1, 5 do
    local text = string.gsub(string.sub(parts[at] or '', 1, 200), '%c', ' ')
    parts[at] = at <= 2 and string.gsub(text, '%d%d%d%d+', '#') or text
  end
  return table.concat(parts, '\n')
end

local function members_of_letter(id, head)
  local at, told = sortable(id), told_of(head)
  local group = string.sub(redis.sha1hex(told), 1, 12)
  local ticket = members_of('t', head['usher-ticket'] or '') .. at
  return group, told, at, ticket, members_of('m', head['usher-id'] or '') .. at
end

local function index_letter(id, head)
  local group, told, at, ticket, message = members_of_letter(id, head)
  local known = redis.pcall('ZSCORE', letters_key, 'd' .. group .. ' ' .. told)
  if not known and count_letters('[d', '(e') >= MOST_GROUPS then group, told = OTHERS, '' end
  local named = 'd' .. group .. ' ' .. told
  redis.pcall('ZADD', letters_key, 0, ticket, 0, message, 0, 'g' .. group .. ' ' .. at, 0, named)
end

-- Delete a letter, and what the index has of it.
local function remove_letter(dead_key, id, head)
  redis.call('XDEL', dead_key, id)
  local group, told, at, ticket, message = members_of_letter(id, head)
  local own, other = 'g' .. group .. ' ' .. at, 'g' .. OTHERS .. ' ' .. at
  redis.pcall('ZREM', letters_key, ticket, message, own, other)
  if of_group(group) == 0 then redis.pcall('ZREM', letters_key, 'd' .. group .. ' ' .. told) end
  if of_group(OTHERS) == 0 then redis.pcall('ZREM', letters_key, 'd' .. OTHERS .. ' ') end
end
