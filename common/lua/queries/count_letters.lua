-- count_letters: the dead letters by what they have in common, as the index has them: nothing is scanned.
-- KEYS: 1 dead, 2 letters
-- ARGV: times in ms, each later than the one before
-- Returns: {number of letters, of those that are in the index, {group, reason, error, policy, place and handler as
--          lines, number, number from the first time to the second, and so on, the last without an end}, ...}
-- Why Lua: all numbers are of one moment.
-- Memory: works when full, as nothing is written
local function fill(row, begin, first, last, number) -- halved until there are none, or it is one
  if number == 0 or first == last then
    for at = first, last do row[3 + at] = number end
    return
  end
  local middle = math.floor((first + last) / 2)
  local before = count_letters('[' .. begin .. sortable(ARGV[first]), '(' .. begin .. sortable(ARGV[middle + 1]))
  fill(row, begin, first, middle, before)
  fill(row, begin, middle + 1, last, number - before)
end
local reply = {redis.call('XLEN', KEYS[1]), count_letters('[m', '(n')}
for _, member in ipairs(redis.pcall('ZRANGEBYLEX', letters_key, '[d', '(e')) do
  local group, told = string.match(member, '^d(%w+) (.*)$')
  local begin, row = 'g' .. group .. ' ', {group, told, of_group(group)}
  if ARGV[1] then fill(row, begin, 1, #ARGV, count_letters('[' .. begin .. sortable(ARGV[1]), '(' .. begin .. '~')) end
  reply[#reply + 1] = row
end
return reply
