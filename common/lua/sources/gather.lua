-- gather: move new entries of source streams, in order, to the end of the work stream; each entry exactly once.
-- KEYS: 1 work stream, 2 shares, 3 gathered (source -> the last id moved), 4 dead, 5 counters, then the sources, then
--       of each the saved positions of its groups
-- ARGV: 1 group, 2 holder, 3 ticket field, 4 longest ticket in bytes, 5 scope (stream or group), 6 most entries in the
--       work stream that its group has not been given, 7 most entries of one source, then the shard of each source
-- Returns: {1 if the work stream was full, else 0, the last id that its group was given, then for each source: outcome,
--          number of entries moved, remark}. Outcomes: OVER (nothing is left), MORE (something may be left), FULL
--          (not looked at: the work stream is full), NOT_MINE (another holder has its shard), GONE (there is no such
--          stream), NOT_A_STREAM, BEFORE (the group has pending entries of the time before the source was gathered),
--          AHEAD (the group is beyond the stream's last id), REFUSED (Redis' words). Remark: "made <id>" when the
--          group was not there and was made to go on behind that id, with the id before which entries may have been
--          trimmed that were never moved, if any; "cut <n>" when n entries had too many fields and became dead letters;
--          "unread <n>" when n entries were cut from the source before they were moved, as far as that is known (each
--          is told once); several, with ", " between them; or "".
-- Why Lua: an entry must be in the work stream exactly if the source's group is past it, whatever happens to us.
--          XREADGROUP NOACK moves the group, XADD follows. Everything that could refuse XADD is found before anything
--          moves: memory (HSETNX needs some), a key of another type, an id that is not the highest. Should it be
--          refused all the same, the group is set back to just below what was not added. A lost reply costs nothing:
--          moved entries are no longer new.
-- Memory: refused when full
--- @include util
--- @include group
--- @include bodies
--- @include letter
--- @include numbers
local work, group, holder, field, longest = KEYS[1], ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local is_scoped, most, quantum = ARGV[5] == 'stream', tonumber(ARGV[6]), tonumber(ARGV[7])
-- More values than MOST_VALUES do not fit on Lua's stack.
local MOST_VALUES, OURS = 7000, {usher_from = true, usher_ticket = true}
redis.call('HSETNX', KEYS[3], '', '')
redis.call('XLEN', KEYS[4])
redis.call('HLEN', KEYS[2])

local function group_of(stream)
  if redis.call('EXISTS', stream) == 0 then return nil end
  for _, reply in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local facts = facts_of(reply)
    if facts['name'] == group then return facts end
  end
end

local function first_id(stream, from, to)
  local _, _, id = each_entry('XRANGE', stream, from, to, 1, function() end)
  return id
end

-- Find the end of the work stream, and how much may be added.
local at_first = room
local ms, seq = end_of(work)
local now, given = now_ms(), (group_of(work) or {})['last-delivered-id'] or '0-0'

local function undelivered()
  local count = seq - tonumber(string.match(given, '(%d+)$'))
  if count < most then return math.max(0, count) end
  -- There may be less of it: trimmed, or the group was made again at 0-0.
  local first = first_id(work, '(' .. given, '+')
  return first and math.max(0, seq - tonumber(string.match(first, '(%d+)$')) + 1) or 0
end
local space, bytes, moved_in_all, chunk = most - undelivered(), 0, 0, 1
room = at_first -- the end of the work stream may be as large: the first source has its turn all the same

local function just_below(id)
  local high, low = string.match(id, '^(%d+)-(%d+)$')
  local function less_one(digits)
    local head, digit, zeros = string.match(digits, '^(%d-)([1-9])(0*)$')
    return (string.gsub(head .. (tonumber(digit) - 1) .. string.rep('9', #zeros), '^0+(%d)', '%1'))
  end
  if string.match(low, '[1-9]') then return high .. '-' .. less_one(low) end
  return less_one(high) .. '-18446744073709551615'
end

-- Return the entry as it is in the work stream (our two fields first, and none of these names among the producer's) and
-- its size in bytes.
local function gathered(source, id, fields)
  local ticket, size = nil, 0
  for at = 1, #fields, 2 do
    if not ticket and fields[at] == field then ticket = string.sub(fields[at + 1], 1, longest + 1) end
    size = size + #fields[at] + #fields[at + 1]
  end
  local prefix = is_scoped and ticket and ticket ~= '' and source .. '/' or ''
  local entry, n = {'usher_from', id .. ' ' .. #prefix .. ' ' .. source}, 2
  if ticket then entry[3], entry[4], n = 'usher_ticket', prefix .. ticket, 4 end
  for at = 1, #fields, 2 do
    if not OURS[fields[at]] then
      entry[n + 1], entry[n + 2] = fields[at], fields[at + 1]
      n = n + 2
    end
  end
  return entry, size
end

-- Note how far the source is moved; trimmers need it too, should its group be gone for a moment.
local function note(source, groups, id)
  redis.call('HSET', KEYS[3], source, id)
  redis.call('HSET', groups, group, id)
end

-- No entry ever gets the id of a dead letter. XSETID and not XADD with XDEL: nothing is to count as deleted.
local function use_up(id)
  if redis.call('EXISTS', work) == 0 then
    redis.call('XADD', work, 'MAXLEN', 0, id, 'usher_cut', '')
  else
    redis.call('XSETID', work, id)
  end
end

local function add(source, groups, entries)
  local cut = 0
  for at, found in ipairs(entries) do
    local entry, size = gathered(source, found[1], found[2])
    local id = numbered(ms, seq + 1)
    local added
    if #entry > MOST_VALUES then
      added = {}
      local ticket = entry[3] == 'usher_ticket' and entry[4] or ''
      bury(KEYS[4], id, ticket, 'too_many_fields', '', '0', 'master', now, now, entry)
      use_up(id)
      cut = cut + 1
    else
      added = redis.pcall('XADD', work, id, unpack(entry))
    end
    if type(added) == 'table' and added.err then
      redis.call('XGROUP', 'SETID', source, group, just_below(found[1]))
      if at > 1 then note(source, groups, entries[at - 1][1]) end
      return at - 1, cut, added.err
    end
    seq, bytes = seq + 1, bytes + size
    spend(2 * size) -- read and written
  end
  note(source, groups, entries[#entries][1])
  return #entries, cut
end

-- Return true when another stream took the place of this one unseen (RENAME, RESTORE, DEL and XADD in one transaction):
-- it begins no later, and lacks the entry that was moved last. A stream of which just that entry was deleted looks the
-- same; what is left before it then comes again, which is better than never.
local function is_another(source, moved)
  return first_id(source, '-', moved) and not body_of(source, moved)
end

-- The group is not there: the first time, or it was destroyed, or the stream was deleted and came back.
local function make_group(source, groups)
  local start, moved, last = '0-0', redis.call('HGET', KEYS[3], source), last_id(source)
  if moved and not is_above(moved, last) and not is_another(source, moved) then start = moved end
  local made = redis.pcall('XGROUP', 'CREATE', source, group, start)
  if type(made) == 'table' and made.err then return nil, made.err end
  redis.call('HSET', groups, group, start)
  if start ~= moved or start == last then return 'made ' .. start end
  local first = first_id(source, '-', '+')
  if first and not is_above(first, moved) then return 'made ' .. start end
  return 'made ' .. start .. ' ' .. (first or last)
end

local function refusal(words)
  if string.find(words, 'WRONGTYPE', 1, true) then return 'NOT_A_STREAM' end
  return 'REFUSED', words
end

-- Before the first entry is moved: what the group has pending was not given to us.
local function is_of_before(source)
  if redis.call('HEXISTS', KEYS[3], source) == 1 then return false end
  local pending = redis.pcall('XPENDING', source, group)
  return not pending.err and pending[1] > 0
end

-- Return how many entries of the source are gone without having been moved, as far as nobody was told yet.
local function cut_from(source)
  local replies = redis.pcall('XINFO', 'GROUPS', source)
  for _, reply in ipairs(replies.err and {} or replies) do
    local facts = facts_of(reply)
    if facts['name'] == group then return count_cut(KEYS[5], source, facts) end
  end
  return 0
end

local function take(source, groups)
  local saved = redis.pcall('HGET', groups, group) -- what is no hash fails here, before anything has changed
  if type(saved) == 'table' and saved.err then return 'REFUSED', 0, saved.err end
  if is_of_before(source) then return 'BEFORE', 0, '' end
  local gone = cut_from(source)
  local unread = gone > 0 and 'unread ' .. gone or ''
  local moved, told, made, cut_in_all = 0, unread, '', 0
  while true do
    local count = math.min(quantum - moved, space - moved_in_all, chunk)
    if count <= 0 or not has_room() then return 'MORE', moved, told end
    local found = redis.pcall('XREADGROUP', 'GROUP', group, 'gather', 'COUNT', count, 'NOACK', 'STREAMS', source, '>')
    if type(found) == 'table' and found.err then
      if not string.find(found.err, 'NOGROUP', 1, true) or made ~= '' then
        local outcome, words = refusal(found.err)
        return outcome, moved, words or ''
      end
      if redis.call('EXISTS', source) == 0 then
        redis.call('HDEL', KEYS[3], source)
        redis.call('HDEL', groups, group)
        return 'GONE', 0, ''
      end
      local words
      made, words = make_group(source, groups)
      if not made then return 'REFUSED', 0, words end
      told = made
    elseif not found then
      local facts = moved == 0 and made == '' and group_of(source)
      if facts and is_beyond(source, facts) then return 'AHEAD', 0, facts['last-delivered-id'] end
      return 'OVER', moved, told
    else
      local entries = found[1][2]
      local added, cut, words = add(source, groups, entries)
      moved, moved_in_all, cut_in_all = moved + added, moved_in_all + added, cut_in_all + cut
      -- As in each_entry.
      chunk = math.max(1, math.min(4 * chunk, CHUNK, math.floor(room * moved_in_all / (4 * math.max(1, bytes)))))
      if words then return 'REFUSED', moved, words end
      if cut > 0 then told = made .. unread .. (made .. unread ~= '' and ', ' or '') .. 'cut ' .. cut_in_all end
      if #entries < count then return 'OVER', moved, told end
    end
  end
end

local reply, held, count = {0, given}, {}, (#KEYS - 5) / 2
for at = 6, 5 + count do
  local shard = ARGV[at + 2]
  if held[shard] == nil then held[shard] = redis.call('HGET', KEYS[2], 'shard ' .. shard) == holder end
  local outcome, moved, told
  if not held[shard] then
    outcome, moved, told = 'NOT_MINE', 0, ''
  elseif moved_in_all >= space then
    outcome, moved, told, reply[1] = 'FULL', 0, '', 1
  elseif not has_room() then
    outcome, moved, told = 'MORE', 0, ''
  else
    outcome, moved, told = take(KEYS[at], KEYS[at + count])
  end
  local n = #reply
  reply[n + 1], reply[n + 2], reply[n + 3] = outcome, moved, told
end
return reply
