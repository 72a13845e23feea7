-- How many entries a group, of which these are the facts, has read when it was given the next `count`, up to `last`. Redis >= 7 has that number
-- for the lag, and XREADGROUP counts it. False where it is not known: before 7 (`lag` is nil there); while an entry at the position or above it
-- was deleted (`lag` is false then); and when it is known to be `wrong` (of entries that were trimmed unread, some servers still count). At the
-- end of the stream it is known again. Needs facts_of.
local function entries_read(stream, facts, count, last, wrong)
  if facts['lag'] == nil then return false end
  local is_known = facts['lag'] and not wrong
  if is_known and facts['entries-read'] then return facts['entries-read'] + count end
  local of_stream = facts_of(redis.call('XINFO', 'STREAM', stream))
  if of_stream['last-generated-id'] == last then return of_stream['entries-added'] end
  return is_known and of_stream['entries-added'] - facts['lag'] + count
end

-- The group has been given what is up to `last`; `read`: see above.
local function move_group(stream, group, last, read)
  if read then
    redis.call('XGROUP', 'SETID', stream, group, last, 'ENTRIESREAD', read)
  else
    redis.call('XGROUP', 'SETID', stream, group, last)
  end
end
