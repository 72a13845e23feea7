-- count_letters: the dead letters by what they have in common, as the index has them: nothing is scanned.
-- KEYS: 1 dead, 2 letters
-- ARGV: times in ms, each later than the one before
-- Returns: {number of letters, of those that are in the index, {group, reason, error, policy, place and handler as
--          lines, number, number from the first time to the second, and so on, the last without an end}, ...}
-- Why Lua: all numbers are of one moment.
-- Memory: works when full, as nothing is written
--- @include index
local reply = {redis.call('XLEN', KEYS[1]), count_letters('[m', '(n')}
for _, member in ipairs(redis.pcall('ZRANGEBYLEX', letters_key, '[d', '(e')) do
  local group, told = string.match(member, '^d(%w+) (.*)$')
  local begin, row = 'g' .. group .. ' ', {group, told, of_group(group)}
  local left = ARGV[1] and count_letters('[' .. begin .. sortable(ARGV[1]), '(' .. begin .. '~')
  for at, ms in ipairs(ARGV) do
    local to = ARGV[at + 1] and begin .. sortable(ARGV[at + 1]) or begin .. '~'
    row[#row + 1] = left > 0 and count_letters('[' .. begin .. sortable(ms), '(' .. to) or 0
    left = left - row[#row]
  end
  reply[#reply + 1] = row
end
return reply
