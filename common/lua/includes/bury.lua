-- Write a dead letter: what happened under names that begin with "usher-", then the original fields as they were.
-- `fields` is the flat list of the entry, or nil when its body is gone. Bury first and acknowledge then: a script is not rolled back,
-- and a letter that cannot be written must not cost the message.
local function bury(dead_key, id, ticket, reason, error, attempts, owner, first_ms, last_ms, fields)
  if ticket == '\255' .. id then ticket = '' end -- a message without a ticket id (common/message.py: unkeyed_ticket)
  local letter = {
    'usher-id', id, 'usher-ticket', ticket, 'usher-reason', reason, 'usher-error', error, 'usher-attempts', attempts,
    'usher-owner', owner, 'usher-first-ms', first_ms, 'usher-last-ms', last_ms,
  }
  local known = #letter
  if fields then
    -- Beyond 7,000 values the Lua stack ends; the letter then keeps the first fields and says so.
    for at = 1, math.min(#fields, 6000) do letter[known + at] = fields[at] end
    if #fields > 6000 then
      letter[#letter + 1] = 'usher-fields-cut'
      letter[#letter + 1] = tostring((#fields - 6000) / 2)
    end
  end
  redis.call('XDEL', dead_key, '0-0') -- of nothing: a write that needs no memory goes first (see at_full_memory)
  redis.call('XADD', dead_key, '*', unpack(letter))
end

local function body_of(stream, id)
  local found = redis.call('XRANGE', stream, id, id)
  return found[1] and found[1][2]
end

local function now_ms()
  local time = redis.call('TIME')
  return string.format('%.0f', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
end
