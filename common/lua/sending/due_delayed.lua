-- due_delayed: put delayed messages in the order of their times, and name those that are due. It sends nothing.
-- KEYS: 1 delayed, 2 due, 3 due_until, 4 leader, 5 dead, 6 letters
-- ARGV: 1 epoch, 2 most entries, 3 ticket field
-- Returns: {"FENCED"} or {"OK", the last id of `delayed` that is in `due`, ms until the next one is due ("0" also when
--          there is more to put in order; "-1": none waits), {id, why, ... of those whose due_ms is no time: they are
--          dead letters now; why is "" for those that somebody deleted before they were due}, then of each that is due,
--          the earliest first: its member of `due`, and its field `stream` or ""}. Fewer than asked for when these are
--          large, and none while there is more to put in order: it may be due earlier.
-- Why Lua: entry and place in `due`, or its letter, are of one moment, and so is the time: Redis' clock, under any
--          leader. A lost reply costs nothing but a log line.
-- Memory: refused when full
--- @numbers count 2
if not leads(KEYS[4], ARGV[1]) then return {'FENCED'} end
-- A page has more entries than even many busy producers add until the next look: none is named before all are in
-- order.
local most, PAGE = tonumber(ARGV[2]), 1000
local stream = redis.call('EXISTS', KEYS[1]) == 1 and facts_of(redis.call('XINFO', 'STREAM', KEYS[1])) or {}
local ends_at, first = stream['last-generated-id'] or '0-0', stream['first-entry'] and stream['first-entry'][1]
local known = redis.call('GET', KEYS[3]) or '0-0'

-- Padded, so that messages that are due at the same time, which Redis sorts as text, are in the order of their ids.
-- XRANGE and XDEL accept the padded form.
local function member_of(id)
  local ms, sequence = string.match(id, '^(%d+)-(%d+)$')
  return string.rep('0', 20 - #ms) .. ms .. '-' .. string.rep('0', 20 - #sequence) .. sequence
end

-- The stream was deleted by hand, and perhaps begun anew, or an old one was brought back, or `due` was deleted: the
-- entries of the stream are not in `due`. The missing ones are its first ones.
local function is_unknown() -- asked only where the first condition leaves it open
  return first and not is_above(first, known) and not redis.call('ZSCORE', KEYS[2], member_of(first))
end
if is_above(known, ends_at) or is_unknown() then
  redis.call('DEL', KEYS[2], KEYS[3])
  known = '0-0'
end


-- Return the time at which a message is due: up to 15 digits of ms (until the year 33658), and perhaps a fraction, as
-- of Python's time.time() * 1000. For any other value return false, and why it is none: nobody knows when it is due, so
-- it is neither sent now nor kept for ever. 10 digits are this century in seconds, and in ms the first months of 1970.
local now = now_ms()
local function due_ms(fields)
  local value = field_value(fields, 'due_ms') or ''
  local ms = #value <= 64 and string.match(value, '^(%d+)%.?%d*$')
  if ms and #ms <= 15 and #ms ~= 10 then return ms end
  local why = ms and #ms == 10 and 'which is a time in seconds' or 'which is no time'
  return false, 'due_ms is "' .. string.sub(value, 1, 64) .. '", ' .. why .. ': give milliseconds since the epoch'
end

redis.call('XLEN', KEYS[5]) -- what is no stream fails here, before anything has changed
local unreadable = {}
local function reject(id, fields, why)
  local ticket = string.sub(field_value(fields, ARGV[3]) or '', 1, 256)
  bury(KEYS[5], id, ticket, 'unreadable_due_ms', why, '0', 'master', now, now, fields)
  redis.call('XDEL', KEYS[1], id)
  unreadable[#unreadable + 1] = id
  unreadable[#unreadable + 1] = why
end

if known ~= ends_at then
  local is_all, _, last = each_entry('XRANGE', KEYS[1], '(' .. known, '+', PAGE, function(id, fields)
    local due, why = due_ms(fields)
    if due then
      redis.call('ZADD', KEYS[2], due, member_of(id))
    else
      reject(id, fields, why)
      spend(size_of(fields)) -- written too
    end
  end)
  -- Up to the end also if the last entries were deleted: else the stream's end would be reported again and again.
  known = is_all and ends_at or last
end
if redis.call('GET', KEYS[3]) ~= known and ends_at ~= '0-0' then redis.call('SET', KEYS[3], known) end

if known ~= ends_at then return {'OK', known, '0', unreadable} end

local reply = {'OK', known, '-1', unreadable}
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, most)) do
  if not has_room() then break end -- asked again at once: these are due
  local fields = body_of(KEYS[1], member)
  if not fields then
    redis.call('ZREM', KEYS[2], member) -- deleted by hand
    unreadable[#unreadable + 1] = member
    unreadable[#unreadable + 1] = ''
  else
    reply[#reply + 1] = member
    reply[#reply + 1] = field_value(fields, 'stream') or ''
  end
end
local first = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
if first[2] then reply[3] = string.format('%.0f', math.max(0, tonumber(first[2]) - tonumber(now))) end
return reply
