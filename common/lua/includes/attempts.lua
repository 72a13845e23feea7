-- The attempts of a message: "starts failures crashes losses" (common/protocol/attempts.py). An unreadable value counts
-- as nothing noted.
local GIVEN_UP = 900000000 -- so many failures: an operator has given the message up
local MOST_ERRORS = 50000 -- fields of the noted errors: beyond it no other message gets one
local function read_attempts(value)
  local starts, failures, crashes, losses = string.match(value or '', '^(%d+) (%d+) (%d+) (%d+)$')
  return tonumber(starts or 0), tonumber(failures or 0), tonumber(crashes or 0), tonumber(losses or 0)
end

local function attempts_value(starts, failures, crashes, losses)
  return string.format('%.0f %.0f %.0f %.0f', starts, failures, crashes, losses)
end
