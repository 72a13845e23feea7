-- Numbers that a caller gives are looked at before anything is written: a loop to 1e18 would hold up the server, which
-- ends no script that has written; and what a command refuses later leaves a half of the call done.
local function whole(value, most)
  local number = type(value) == 'number' and value or tonumber(string.match(value or '', '^%d+$'))
  if number and number >= 0 and number <= most and number % 1 == 0 then return number end
  error(string.format('"%s" is no whole number up to %.0f', string.sub(tostring(value), 1, 40), most))
end
