-- How many entries a group, of which these are the facts, has read when it was given the next `count`, up to `last`. Redis >= 7 has that number
-- for the lag, and XREADGROUP counts it. It is what leaves the lag less by `count`: the `entries-read` of before is too low for that in Redis 8
-- once entries were trimmed unread. False where it is not known: before 7 (`lag` is nil there); while an entry at the position or above it was
-- deleted (`lag` is false then); and when they are all there are, but the lag is another number (of entries that were trimmed unread, Redis 7.0
-- still counts). At the end of the stream it is known again. Needs facts_of.
local function entries_read(stream, facts, count, last)
  if facts['lag'] == nil then return false end
  local of_stream = facts_of(redis.call('XINFO', 'STREAM', stream))
  if of_stream['last-generated-id'] == last then return of_stream['entries-added'] end
  local final = of_stream['last-entry']
  local is_known = facts['lag'] and (facts['lag'] == count or not final or final[1] ~= last)
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
