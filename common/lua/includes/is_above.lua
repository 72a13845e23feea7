-- Ids are compared as numbers; 64 bits do not fit into Lua's, but of two without leading zeros the longer one is higher.
local function is_above(id, other)
  local high, low = string.match(id, '^%d+'), string.match(other, '^%d+')
  if high == low then high, low = string.match(id, '%d+$'), string.match(other, '%d+$') end
  if #high ~= #low then return #high > #low end
  return high > low
end
