-- A reply of XINFO, names and values by turns, as a table.
local function facts_of(reply)
  local facts = {}
  for at = 1, #reply, 2 do facts[reply[at]] = reply[at + 1] end
  return facts
end
