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
  return type(number) == 'number' and number or -1
end

-- Whether the index has as many letters as there are: else somebody changed either by hand, and it may not be asked.
local function is_whole(dead_key) return count_letters('[m', '(n') == redis.call('XLEN', dead_key) end

local function of_group(group) return count_letters('[g' .. group .. ' ', '(g' .. group .. ' ~') end

-- Return what letters are counted by. Long numbers, as of ids, are none: an error of each message would be a group.
-- The words for what raised nothing: common/protocol/attempts.py, last_error.py.
local UNRAISED = {
  'its process ended while its handler ran',
  'it ran past its deadline (deadline_s, or USHER_HANDLER_SECONDS)',
}
local function told_of(head)
  local name, error = head['usher-error-type'] or '', head['usher-error'] or ''
  for _, words in ipairs(name == '' and UNRAISED or {}) do
    if string.sub(error, 1, #words) == words then name = words end
  end
  local parts = {head['usher-reason'], name, head['usher-policy'], head['usher-at'], head['usher-handler']}
  for at = 1, 5 do
    parts[at] = string.gsub(string.sub(parts[at] or '', 1, 200), '%c', ' ')
    if at <= 2 then parts[at] = string.gsub(parts[at], '%d%d%d%d+', '#') end
  end
  return table.concat(parts, '\n')
end

-- Return what is ours of the fields of a letter, and where the others begin.
local function head_of(flat)
  local head, at = {}, 1
  while at < #flat do
    local name = flat[at]
    head[name] = head[name] or flat[at + 1]
    at = at + 2
    if name == 'usher-fields' then break end
  end
  return head, at
end

local function members_of_letter(id, head)
  local at, told = sortable(id), told_of(head)
  local group = string.sub(redis.sha1hex(told), 1, 12)
  local ticket = members_of('t', head['usher-ticket'] or '') .. at
  return group, told, at, ticket, members_of('m', head['usher-id'] or '') .. at
end
