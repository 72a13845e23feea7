-- Bodies are copied into Lua, and Redis does nothing else meanwhile. So a script that reads bodies has `room` for 4
-- MiB: it looks at one entry in any case, goes on while has_room(), and says how far it came. An entry counts EACH
-- bytes more than it has: small ones are bounded too.
local EACH, CHUNK, room = 512, 32, 4194304

local function has_room() return room > 0 end

local function spend(bytes) room = room - EACH - bytes end

local function size_of(fields)
  local bytes = 0
  for at = 1, #fields do bytes = bytes + #fields[at] end
  return bytes
end

local function body_of(stream, id)
  local found = redis.call('XRANGE', stream, id, id)[1]
  if not found then return nil end
  spend(size_of(found[2]))
  return found[2]
end

-- Call `look(id, fields)`, which may return the size of the fields, for up to `most` entries between two ends as
-- `command`, XRANGE or XREVRANGE, has them, while there is room. Return whether there are no more, the number of
-- entries, and the id of the last one or nil. Their sizes are not known before: so there are a few at a time, the fewer
-- the larger the former ones were.
local HIGHEST = '18446744073709551615-18446744073709551615' -- above it XRANGE finds no id to begin with
local function each_entry(command, stream, from, to, most, look)
  local n, last, chunk, before = 0, nil, 1, room
  if from == '(' .. HIGHEST then return true, 0 end
  while n < most and (n == 0 or has_room()) do
    local wanted = math.min(chunk, most - n)
    local rows = redis.call(command, stream, last and '(' .. last or from, to, 'COUNT', wanted)
    local found, bytes = #rows, 0
    for i = 1, found do
      local row = rows[i]
      bytes = bytes + (look(row[1], row[2]) or size_of(row[2]))
    end
    n, room, last = n + found, room - bytes - EACH * found, found > 0 and rows[found][1] or last
    if found < wanted or last == HIGHEST then return true, n, last end
    chunk = math.max(1, math.min(4 * chunk, CHUNK, math.floor(room * n / (2 * (before - room)))))
  end
  return false, n, last
end

-- Return the last id that the stream gave. XINFO STREAM copies its first and its last entry.
local function last_id(stream)
  if redis.call('EXISTS', stream) == 0 then return '0-0' end
  local facts = facts_of(redis.call('XINFO', 'STREAM', stream))
  if facts['first-entry'] then spend(size_of(facts['first-entry'][2]) + size_of(facts['last-entry'][2])) end
  return facts['last-generated-id']
end

-- Return true when the group with these facts (see group_facts) is beyond the last id of the stream. While it has no
-- lag (as Redis >= 7 counts, also of one that is beyond), nothing came that it will not be given.
local function is_beyond(stream, facts)
  if facts['lag'] == 0 and redis.call('XLEN', stream) > 0 then return false end
  return is_above(facts['last-delivered-id'], last_id(stream))
end

-- Return how many entries were added to a stream and are gone without having been given to a group with these facts:
-- all that was added, without what the group has read and what is there. Known by Redis >= 7, which has them as read
-- with the next read, else 0; more than 2,000 unread ones are not counted: those deleted among them are told as one.
-- XINFO STREAM copies two entries: it is asked only where more are unread than are there, or one of them was deleted.
local function cut_unread(stream, facts)
  local read, lag, position = facts['entries-read'], facts['lag'], facts['last-delivered-id']
  if not read or (lag and lag < redis.call('XLEN', stream)) then return 0 end
  local of_stream, is_all = facts_of(redis.call('XINFO', 'STREAM', stream)), true
  local first, left = of_stream['first-entry'], of_stream['length']
  if first and not is_above(first[1], position) then
    if not is_above(of_stream['max-deleted-entry-id'], position) then return 0 end
    is_all, left = each_entry('XRANGE', stream, '(' .. position, '+', 2000, function() end)
  end
  return is_all and math.max(0, of_stream['entries-added'] - read - left) or 1
end

-- Count entries that were cut unread, each once: at the same position of the group only what came since. Return that.
-- What is noted: position, those at it, and all of this stream.
local function count_cut(counters_key, stream, facts)
  local cut, position = cut_unread(stream, facts), facts['last-delivered-id']
  if cut == 0 then return 0 end
  local seen = redis.call('HGET', counters_key, 'cut_at ' .. stream) or ''
  local at, number, of_all = string.match(seen, '^(%S+) (%d+) (%d+)$')
  local new = cut - (at == position and tonumber(number) or 0)
  if new <= 0 then return 0 end
  count_up(counters_key, 'unread_cut', new)
  local noted = string.format('%s %.0f %.0f', position, cut, (tonumber(of_all) or 0) + new)
  redis.call('HSET', counters_key, 'cut_at ' .. stream, noted)
  return new
end
