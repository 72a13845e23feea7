-- How many entries a group, of which these are the facts, has read when it was given the next `count`, up to `last`. Redis >= 7 has that number
-- for the lag, and XREADGROUP counts it. False where it is not known: before 7 (`lag` is nil there); while an entry at the position or above it
-- was deleted (`lag` is false then); and when they are all there are, but the lag is another number (of entries that were trimmed unread, Redis
-- 7.0 still counts). At the end of the stream it is known again. Needs facts_of.
local function entries_read(stream, facts, count, last)
  local lag, read = facts['lag'], facts['entries-read']
  if lag == nil then return false end
  local is_length = lag == redis.call('XLEN', stream)
  if read and lag == count and not is_length then return read + count end -- the usual case; XINFO STREAM copies two whole entries
  local of_stream = facts_of(redis.call('XINFO', 'STREAM', stream))
  local added, final = of_stream['entries-added'], of_stream['last-entry']
  if of_stream['last-generated-id'] == last then return added end
  if is_length and added - lag ~= read then
    -- Redis 8: as long as a group is below all that is there, that is its lag, whatever was trimmed unread. Those of the next `count` that have
    -- gone since they were seen are not in it.
    count = #redis.call('XRANGE', stream, '(' .. facts['last-delivered-id'], last, 'COUNT', count)
  end
  local is_known = lag and (lag == count or not final or final[1] ~= last)
  return is_known and added - lag + count
end

-- The group has been given what is up to `last`; `read`: see above.
local function move_group(stream, group, last, read)
  if read then
    redis.call('XGROUP', 'SETID', stream, group, last, 'ENTRIESREAD', read)
  else
    redis.call('XGROUP', 'SETID', stream, group, last)
  end
end
