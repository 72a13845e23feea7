-- The attempts of a message: "starts failures crashes losses" (common/protocol/attempts.py). A plain number, as former versions wrote it, is that
-- many starts which all failed; what cannot be read is as if nothing were noted.
local function read_attempts(value)
  local starts, failures, crashes, losses = string.match(value or '', '^(%d+) (%d+) (%d+) (%d+)$')
  if starts then return tonumber(starts), tonumber(failures), tonumber(crashes), tonumber(losses) end
  local plain = tonumber(string.match(value or '', '^%d+$') or '0')
  return plain, plain, 0, 0
end

local function attempts_value(starts, failures, crashes, losses)
  return string.format('%.0f %.0f %.0f %.0f', starts, failures, crashes, losses)
end
