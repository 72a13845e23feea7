-- The attempts of a message: "starts failures crashes losses" (common/protocol/attempts.py). A plain number, as plain
-- readers write it, means that many starts which all failed; an unreadable value counts as nothing noted.
local GIVEN_UP = 900000000 -- so many failures: an operator has given the message up
local MOST_ERRORS = 50000 -- fields of the noted errors: beyond it no other message gets one
local function read_attempts(value)
  local starts, failures, crashes, losses = string.match(value or '', '^(%d+) (%d+) (%d+) (%d+)$')
  if starts then return tonumber(starts), tonumber(failures), tonumber(crashes), tonumber(losses) end
  local plain = tonumber(string.match(value or '', '^%d+$') or '0')
  return plain, plain, 0, 0
end

local function attempts_value(starts, failures, crashes, losses)
  return string.format('%.0f %.0f %.0f %.0f', starts, failures, crashes, losses)
end
