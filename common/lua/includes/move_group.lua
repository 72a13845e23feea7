-- How many entries a group, of which these are the facts, has read when it was given the next `count`, up to `last`. Redis >= 7 has that number
-- for the lag, and XREADGROUP counts it. False where it is not known: before 7; while an entry above the position was deleted (`lag` is nil
-- then), but for the end of the stream. Needs facts_of.
local function entries_read(stream, facts, count, last)
  if facts['lag'] == nil then return false end
  if facts['lag'] and facts['entries-read'] then return facts['entries-read'] + count end
  local of_stream = facts_of(redis.call('XINFO', 'STREAM', stream))
  if facts['lag'] then return of_stream['entries-added'] - facts['lag'] + count end
  return of_stream['last-generated-id'] == last and of_stream['entries-added']
end

local function move_group(stream, group, last, read)
  if read then
    redis.call('XGROUP', 'SETID', stream, group, last, 'ENTRIESREAD', read)
  else
    redis.call('XGROUP', 'SETID', stream, group, last)
  end
end
