-- Write a dead letter: what happened under names that begin with "usher-", then the original fields as they were. The last of ours is
-- "usher-fields", the number of original fields that follow: a producer may use our names too.
-- `fields` is the flat list of the entry, or nil when its body is gone. `more` may have: policy (skip, park, tail), fence, error_type,
-- traceback; and cut, true for an entry that is too large: then its first 100 fields are kept, and of each name and value 1,024 bytes.
-- Returns whether the letter has all of the fields.
-- Bury first and acknowledge then: a script is not rolled back, and a letter that cannot be written must not cost the message.
local function bury(dead_key, id, ticket, reason, error, attempts, owner, first_ms, last_ms, fields, more)
  fields, more = fields or {}, more or {}
  if ticket == '\255' .. id then ticket = '' end -- a message without a ticket id (common/protocol/message.py: unkeyed_ticket)
  local letter = {
    'usher-id', id, 'usher-ticket', ticket, 'usher-reason', reason, 'usher-error', error, 'usher-attempts', attempts,
    'usher-owner', owner, 'usher-first-ms', first_ms, 'usher-last-ms', last_ms, 'usher-policy', more.policy or 'skip',
    'usher-fence', more.fence or '0', 'usher-error-type', more.error_type or '', 'usher-traceback', more.traceback or '',
  }
  -- Beyond 7,000 values the Lua stack ends; the letter then keeps the first fields and says so.
  local kept = math.min(#fields, more.cut and 200 or 6000)
  local longest, bytes, shortened = more.cut and 1024 or math.huge, 0, 0
  for at = 1, #fields do
    bytes = bytes + #fields[at]
    if at <= kept and #fields[at] > longest then shortened = shortened + 1 end
  end
  local function say(name, value)
    letter[#letter + 1] = name
    letter[#letter + 1] = tostring(value)
  end
  if kept < #fields then say('usher-fields-cut', (#fields - kept) / 2) end
  if shortened > 0 then say('usher-values-cut', shortened) end
  if kept < #fields or shortened > 0 then say('usher-bytes', bytes) end
  say('usher-fields', kept / 2)
  local head = #letter
  for at = 1, kept do letter[head + at] = shortened > 0 and string.sub(fields[at], 1, 1024) or fields[at] end
  redis.call('XDEL', dead_key, '0-0') -- of nothing: a write that needs no memory goes first (see at_full_memory)
  redis.call('XADD', dead_key, '*', unpack(letter))
  return kept == #fields and shortened == 0
end

local function body_of(stream, id)
  local found = redis.call('XRANGE', stream, id, id)
  return found[1] and found[1][2]
end

local function now_ms()
  local time = redis.call('TIME')
  return string.format('%.0f', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
end
