-- Compare two ids as numbers. 64 bits do not fit into Lua's numbers, but of two numbers without leading zeros the
-- longer one is higher. Patterns begin with ^ and have one way to fit: else 20,000 digits of a stranger's take minutes.
local function is_above(id, other)
  local high, after = string.match(id, '^(%d+)%-?(%d*)')
  local low, behind = string.match(other, '^(%d+)%-?(%d*)')
  if high == low then high, low = after, behind end
  if #high ~= #low then return #high > #low end
  return high > low
end
