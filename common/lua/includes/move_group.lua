-- The group, of which these are the facts, was given the next `count` entries, up to `last`. Redis >= 7 keeps the lag by a number of entries
-- read, which XREADGROUP would count; it is not known while an entry was deleted above the position (`lag` is nil then), and again at the end
-- of the stream. Needs facts_of.
local function move_group(stream, group, facts, count, last)
  local read = facts['lag'] and facts['entries-read'] and facts['entries-read'] + count
  if facts['lag'] ~= nil and not read then
    local of_stream = facts_of(redis.call('XINFO', 'STREAM', stream))
    read = of_stream['last-generated-id'] == last and of_stream['entries-added']
  end
  if read then
    redis.call('XGROUP', 'SETID', stream, group, last, 'ENTRIESREAD', read)
  else
    redis.call('XGROUP', 'SETID', stream, group, last)
  end
end
