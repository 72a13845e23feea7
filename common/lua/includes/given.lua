-- Numbers that a caller gives are looked at before anything is written: a loop to 1e18 would hold up the server, which
-- ends no script that has written; and what a command refuses later leaves a half of the call done.
local function whole(value, most)
  local number = type(value) == 'number' and value or tonumber(string.match(value or '', '^%d+$'))
  if number and number >= 0 and number <= most and number % 1 == 0 then return number end
  error(string.format('"%s" is no whole number up to %.0f', string.sub(tostring(value), 1, 40), most))
end

-- Check the sizes of the parts of `n` things: they are the bounds of loops too.
local function check_sizes(sizes, n)
  local of_all = 0
  for at = 1, #sizes do of_all = of_all + (sizes[at] >= 1 and sizes[at] or whole(sizes[at], 0)) end
  if of_all ~= n then error('there are ' .. n .. ' ids, and not ' .. of_all) end
end
