local function index_letter(id, head)
  local group, told, at, ticket, message = members_of_letter(id, head)
  if not redis.pcall('ZSCORE', letters_key, 'd' .. group .. ' ' .. told) then
    if count_letters('[d', '(e') >= MOST_GROUPS then group, told = OTHERS, '' end
    redis.pcall('ZADD', letters_key, 0, 'd' .. group .. ' ' .. told)
  end
  redis.pcall('ZADD', letters_key, 0, ticket, 0, message, 0, 'g' .. group .. ' ' .. at)
end

-- Delete a letter, and what the index has of it, and the one that recount_letters makes.
local function remove_letter(dead_key, id, head, recounted_key)
  redis.call('XDEL', dead_key, id)
  local group, told, at, ticket, message = members_of_letter(id, head)
  for _ = 1, 2 do
    letters_key, recounted_key = recounted_key, letters_key
    redis.pcall('ZREM', letters_key, ticket, message, 'g' .. group .. ' ' .. at, 'g' .. OTHERS .. ' ' .. at)
    if of_group(group) == 0 then redis.pcall('ZREM', letters_key, 'd' .. group .. ' ' .. told) end
    if of_group(OTHERS) == 0 then redis.pcall('ZREM', letters_key, 'd' .. OTHERS .. ' ') end
  end
end

-- Write a dead letter: what happened, under names that begin with "usher-", then the original fields unchanged. The
-- last of our names is "usher-fields", the number of original fields that follow: a producer may use our names too.
-- `fields` is the flat list of the entry, or nil when its body is gone. `more` may have: policy (skip, halt),
-- fence, error_type, traceback, at (file and line), handler, history (common/protocol/last_error.py); and cut, true for
-- an entry that is too large: the letter then keeps its first 100 fields, and of each name and value 1,024 bytes.
-- Returns true when the letter has all of the fields.
-- Bury first, then acknowledge: Redis does not roll a script back, and a letter that cannot be written must not cost
-- the message.
local function bury(dead_key, id, ticket, reason, error, attempts, owner, first_ms, last_ms, fields, more)
  fields, more = fields or {}, more or {}
  local letter = {
    'usher-id', id, 'usher-ticket', ticket, 'usher-reason', reason, 'usher-error', error, 'usher-attempts', attempts,
    'usher-owner', owner, 'usher-first-ms', first_ms, 'usher-last-ms', last_ms, 'usher-policy', more.policy or 'skip',
    'usher-fence', more.fence or '0', 'usher-error-type', more.error_type or '',
    'usher-traceback', more.traceback or '',
  }
  -- The Lua stack ends at about 7,000 values; the letter then keeps the first fields and says so.
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
  for _, name in ipairs({'at', 'handler', 'history'}) do
    if (more[name] or '') ~= '' then say('usher-' .. name, more[name]) end
  end
  say('usher-fields', kept / 2)
  local head = #letter
  for at = 1, kept do letter[head + at] = shortened > 0 and string.sub(fields[at], 1, 1024) or fields[at] end
  redis.call('XDEL', dead_key, '0-0') -- deletes nothing: a write that needs no memory goes first (see at_full_memory)
  index_letter(redis.call('XADD', dead_key, '*', unpack(letter)), (head_of(letter)))
  for at = 1, #fields, 2 do -- the caller of the message hears of it (common/protocol/message.py, reply_address)
    local to, call = string.match(fields[at] == 'usher_reply' and fields[at + 1] or '', '^(.+:replies:%x+) (%d+)$')
    if call and #call < 16 then answer(to, call, 'failed', reason, 'error', error, 'id', id) end
  end
  return kept == #fields and shortened == 0
end

-- Return whether there is a letter of this entry, or among the newest ones where the index cannot tell.
local newest_of
local function has_letter(dead_key, id)
  local begin = members_of('m', id)
  if is_whole(dead_key) then return count_letters('[' .. begin, '(' .. begin .. '~') > 0 end
  if not newest_of then
    newest_of = {}
    each_entry('XREVRANGE', dead_key, '+', '-', 200, function(_, letter) newest_of[letter[2]] = true end)
  end
  return newest_of[id]
end

-- Return whether Redis >= 7 has dropped an entry at a claim, because its body is gone, and no letter tells of it.
local function was_dropped(stream, group, dead_key, id)
  local row = redis.call('XPENDING', stream, group, id, id, 1)[1]
  local is_pending = row and row[2] ~= '' -- "": given back without an owner (XNACK, from Redis 8.8 on)
  return not (is_pending or body_of(stream, id) or has_letter(dead_key, id))
end

-- Return where the message of a letter is: "halted" (pending under `halted`, or its ticket's record says so: the ticket
-- waits for it), "elsewhere" (under `halted`, while the record names another owner: no script may touch it now), or
-- "out" (in no list). With "halted" come the fence and the other ids of the record.
local function place_of(stream, group, tickets_key, head)
  -- An entry that was added to the dead letters by hand is no message of a ticket, and must not stop the others.
  if not head['usher-ticket'] or not string.match(head['usher-id'] or '', '^%d+%-%d+$') then return 'out' end
  if head['usher-reason'] == 'unreadable_due_ms' then return 'out' end -- its id is one of the delayed messages
  local record, owner, fence, ids = record_of(tickets_key, head['usher-ticket'])
  local id = head['usher-id']
  if owner == 'halted' and string.match(ids, '^%S+') == id then return 'halted', fence, without(ids, {[id] = true}) end
  if head['usher-policy'] ~= 'halt' then return 'out' end -- and the group, which may be gone, is not asked
  if #redis.call('XPENDING', stream, group, id, id, 1, 'halted') == 0 then return 'out' end
  if record then return 'elsewhere' end
  return 'halted', string.match(head['usher-fence'] or '', '^%d+$') or '0', ''
end
