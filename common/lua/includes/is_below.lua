-- Is stream id a below stream id b? Both halves are 64 bit wide: too wide for Lua's numbers, so digits are compared.
local function is_below(a, b)
  local function digits_below(x, y)
    x, y = string.gsub(x, '^0+', ''), string.gsub(y, '^0+', '')
    if #x ~= #y then return #x < #y end
    return x < y
  end
  local a_ms, a_seq = string.match(a, '^(%d+)%-?(%d*)$')
  local b_ms, b_seq = string.match(b, '^(%d+)%-?(%d*)$')
  if digits_below(a_ms, b_ms) then return true end
  if digits_below(b_ms, a_ms) then return false end
  return digits_below(a_seq, b_seq)
end
