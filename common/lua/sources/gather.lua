-- gather: move new entries of source streams, in order, to the end of the work stream; each entry exactly once, whoever
--         asks and however often.
-- KEYS: 1 work stream, 2 gathered (source -> the last id moved), 3 dead, 4 counters, then the sources, then of each the
--       saved positions of its groups, then letters
-- ARGV: 1 group, 2 ticket field, 3 longest ticket in bytes, 4 most entries in the work stream that its group has not
--       been given, 5 most entries of one source
-- Returns: {1 if the work stream was full, else 0, the last id that its group was given, then for each source: outcome,
--          number of entries moved, remark}. Outcomes: OVER (nothing is left), MORE (something may be left), FULL
--          (not looked at: the work stream is full), GONE (there is no such stream), NOT_A_STREAM, BEFORE (the group
--          has pending entries of the time before the source was gathered), AHEAD (the group is beyond the stream's
--          last id), REFUSED (Redis' words). Remark: "made <id>" when the
--          group was not there and was made to go on behind that id, with the id before which entries may have been
--          trimmed that were never moved, if any; "cut <n>" when n entries had too many fields and became dead letters;
--          "unread <n>" when n entries were cut from the source before they were moved, as far as that is known (each
--          is told once); several, with ", " between them; or "".
-- Why Lua: an entry must be in the work stream exactly if the source's group is past it, whatever happens to us.
--          XREADGROUP NOACK moves the group, XADD follows. Everything that could refuse XADD is found before anything
--          moves: memory (HSETNX needs some), a key of another type, an id that is not the highest. Should it be
--          refused all the same, the group is set back to what was moved last. A lost reply costs nothing: moved
--          entries are no longer new.
-- Memory: refused when full
--- @numbers count 3, large 4, count 5
local work, group, field, longest = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local most, quantum = tonumber(ARGV[4]), tonumber(ARGV[5])
-- More values than MOST_VALUES do not fit on Lua's stack.
local MOST_VALUES, OURS = 7000, {usher_from = true, usher_ticket = true}
redis.call('HSETNX', KEYS[2], '', '')
redis.call('XLEN', KEYS[3])

local function first_id(stream, from, to)
  local _, _, id = each_entry('XRANGE', stream, from, to, 1, function() end)
  return id
end

-- Find the end of the work stream, and how much may be added.
local at_first = room
local ms, seq = end_of(work)
local now, given = now_ms(), (group_of(work, group) or {})['last-delivered-id'] or '0-0'

local function undelivered()
  local count = seq - tonumber(string.match(given, '(%d+)$'))
  if count < most then return math.max(0, count) end
  -- There may be less of it: trimmed, or the group was made again at 0-0.
  local first = first_id(work, '(' .. given, '+')
  return first and math.max(0, seq - tonumber(string.match(first, '(%d+)$')) + 1) or 0
end
local space, bytes, moved_in_all, chunk = most - undelivered(), 0, 0, 1
room = at_first -- the end of the work stream may be as large: the first source has its turn all the same

-- Return the entry as it is in the work stream (our two fields first, and none of these names among the producer's) and
-- its size in bytes.
local function gathered(source, id, fields)
  local ticket, size = ticket_of(fields, field, longest, 0)
  local prefix = ticket and ticket ~= '' and source .. '/' or ''
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
local function note(of)
  if not of.last then return end
  redis.call('HSET', KEYS[2], of.source, of.last)
  redis.call('HSET', of.groups, group, of.last)
end

-- No entry ever gets the id of a dead letter. XSETID and not XADD with XDEL: nothing is to count as deleted.
local function use_up(id)
  if redis.call('EXISTS', work) == 0 then
    redis.call('XADD', work, 'MAXLEN', 0, id, 'usher_cut', '')
  else
    redis.call('XSETID', work, id)
  end
end

-- Add entries of a source, which its group is past, up to one that is refused.
local function add(of, entries)
  for _, found in ipairs(entries) do
    local id = found[1]
    local entry, size = gathered(of.source, id, found[2])
    local new, added = numbered(ms, seq + 1), {}
    if #entry > MOST_VALUES then
      local ticket = entry[3] == 'usher_ticket' and entry[4] or ''
      bury(KEYS[3], new, ticket, 'too_many_fields', '', '0', 'master', now, now, entry)
      use_up(new)
      of.cut = of.cut + 1
    else
      added = redis.pcall('XADD', work, new, unpack(entry))
    end
    if type(added) == 'table' and added.err then
      redis.call('XGROUP', 'SETID', of.source, group, of.last or of.start)
      of.refused = added.err
      return
    end
    seq, bytes, moved_in_all = seq + 1, bytes + size, moved_in_all + 1
    of.moved, of.last = of.moved + 1, id
  end
end

-- Return true when another stream took the place of this one unseen (RENAME, RESTORE, DEL and XADD in one transaction):
-- it begins no later, and lacks the entry that was moved last. A stream of which just that entry was deleted looks the
-- same; what is left before it then comes again, which is better than never.
local function is_another(source, moved)
  return first_id(source, '-', moved) and not body_of(source, moved)
end

-- The group is not there: the first time, or it was destroyed, or the stream was deleted and came back.
local function make_group(of)
  local source, start = of.source, '0-0'
  local moved, last = redis.call('HGET', KEYS[2], source), last_id(source)
  if moved and not is_above(moved, last) and not is_another(source, moved) then start = moved end
  local made = redis.pcall('XGROUP', 'CREATE', source, group, start)
  if type(made) == 'table' and made.err then return nil, made.err end
  redis.call('HSET', of.groups, group, start)
  of.start = start
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
  if redis.call('HEXISTS', KEYS[2], source) == 1 then return false end
  local pending = redis.pcall('XPENDING', source, group)
  return not pending.err and pending[1] > 0
end

local function ends(of, outcome, words)
  of.outcome, of.words = outcome, words or ''
end

-- Look at a source whose turn it is. Its turn may end here.
local function open(of)
  local saved = redis.pcall('HGET', of.groups, group) -- what is no hash fails here, before anything has changed
  if type(saved) == 'table' and saved.err then return ends(of, 'REFUSED', saved.err) end
  if is_of_before(of.source) then return ends(of, 'BEFORE') end
  of.facts = group_of(of.source, group)
  of.start = of.facts and of.facts['last-delivered-id']
  local gone = of.facts and count_cut(KEYS[4], of.source, of.facts) or 0 -- as far as nobody was told yet
  if gone > 0 then of.unread = 'unread ' .. gone end
end

-- Make the group that is not there.
local function begin(of)
  if redis.call('EXISTS', of.source) == 0 then
    redis.call('HDEL', KEYS[2], of.source)
    redis.call('HDEL', of.groups, group)
    return ends(of, 'GONE')
  end
  local made, words = make_group(of)
  if not made then return ends(of, 'REFUSED', words) end
  of.made = made
end

-- Return the next entries, which the group is past from now on; nil when the turn has ended here.
local function read(of, count)
  local found = redis.pcall('XREADGROUP', 'GROUP', group, 'gather', 'COUNT', count, 'NOACK', 'STREAMS', of.source, '>')
  if not found then return {} end
  if not found.err then return found[1][2] end
  if not string.find(found.err, 'NOGROUP', 1, true) or of.made ~= '' then return ends(of, refusal(found.err)) end
  begin(of)
  return not of.outcome and read(of, count) or nil
end

-- Nothing is left, or no more can be moved.
local function finish(of)
  if of.refused then return ends(of, 'REFUSED', of.refused) end
  local is_idle = of.moved == 0 and of.made == '' and of.facts
  if is_idle and is_beyond(of.source, of.facts) then return ends(of, 'AHEAD', of.facts['last-delivered-id']) end
  of.outcome = 'OVER'
end

-- Move what comes next of one source.
local function take(of)
  while not of.outcome do
    local count = math.min(quantum - of.moved, space - moved_in_all, chunk)
    if count <= 0 or not has_room() then of.outcome = 'MORE' break end
    local entries = read(of, count)
    if not entries then break end
    local before = bytes
    add(of, entries)
    note(of)
    room = room - EACH * #entries - 2 * (bytes - before) -- read and written
    -- As in each_entry.
    chunk = math.max(1, math.min(4 * chunk, CHUNK, math.floor(room * moved_in_all / (4 * math.max(1, bytes)))))
    if of.refused or #entries < count then finish(of) end
  end
end

local sources, count, is_full = {}, (#KEYS - 4) / 2, 0
for at = 1, count do
  local of = {source = KEYS[at + 4], groups = KEYS[at + 4 + count], moved = 0, cut = 0, made = '', unread = ''}
  sources[at] = of
  if moved_in_all >= space then
    of.outcome, is_full = 'FULL', 1
  elseif not has_room() then
    of.outcome = 'MORE'
  else
    open(of)
    if not of.outcome then take(of) end
  end
end

local reply = {is_full, given}
for _, of in ipairs(sources) do
  local remark = of.words or of.made .. of.unread
  if not of.words and of.cut > 0 then remark = remark .. (remark ~= '' and ', ' or '') .. 'cut ' .. of.cut end
  local n = #reply
  reply[n + 1], reply[n + 2], reply[n + 3] = of.outcome, of.moved, remark
end
return reply
