-- Call `step(from, to)` over 1..n in pieces: unpack() puts every value on Lua's C stack, which ends at about 8,000.
local function in_chunks(n, step)
  for from = 1, n, 4000 do step(from, math.min(from + 3999, n)) end
end
