-- Turn a reply of XINFO, names and values by turns, into a table.
local function facts_of(reply)
  local facts = {}
  for at = 1, #reply, 2 do facts[reply[at]] = reply[at + 1] end
  return facts
end

-- Return the facts of a group as XINFO GROUPS names them. Raises NOGROUP when the group or the stream is missing:
-- XPENDING says so, XINFO does not.
local function group_facts(stream, group)
  for _, flat in ipairs(redis.pcall('XINFO', 'GROUPS', stream)) do
    local facts = facts_of(flat)
    if facts['name'] == group then return facts end
  end
  redis.call('XPENDING', stream, group, '-', '+', 1)
  redis.call('XINFO', 'GROUPS', stream) -- it failed for another reason: raise that one
end

-- Return how many entries a group with these facts has read once it is given the next `count`, up to `last`.
-- Redis >= 7 keeps that number for the lag, and XREADGROUP counts it. False where it is not known: before 7 (`lag` is
-- nil there); while an entry at or above the position was deleted (`lag` is false then); and when these are the last
-- entries, but the lag is another number (Redis 7.0 still counts entries that were trimmed unread). At the end of the
-- stream it is known again.
local function entries_read(stream, facts, count, last)
  local lag, read = facts['lag'], facts['entries-read']
  if lag == nil then return false end
  local is_length = lag == redis.call('XLEN', stream)
  if read and lag == count and not is_length then return read + count end -- usual; XINFO STREAM copies two entries
  local of_stream = facts_of(redis.call('XINFO', 'STREAM', stream))
  local added, final = of_stream['entries-added'], of_stream['last-entry']
  if of_stream['last-generated-id'] == last then return added end
  if is_length and added - lag ~= read then
    -- Redis 8: as long as a group is below all that is there, that is its lag, whatever was trimmed unread. The lag
    -- does not count those of the next `count` that have gone since they were seen.
    count = #redis.call('XRANGE', stream, '(' .. facts['last-delivered-id'], last, 'COUNT', count)
  end
  local is_known = lag and (lag == count or not final or final[1] ~= last)
  return is_known and added - lag + count
end

-- Move the group to `last`: it has been given everything up to there. `read` is the result of entries_read.
local function move_group(stream, group, last, read)
  if read then
    redis.call('XGROUP', 'SETID', stream, group, last, 'ENTRIESREAD', read)
  else
    redis.call('XGROUP', 'SETID', stream, group, last)
  end
end
