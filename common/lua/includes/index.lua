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
