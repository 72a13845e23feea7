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

-- Return how many entries were added to a stream and are gone without having been given to a group with these facts:
-- all that was added, without what the group has read and what is there. Known where the stream begins above the
-- group's position, by Redis >= 7, which has them as read with the next read; else 0. XINFO STREAM copies two entries:
-- it is asked only where more are unread than are there, or all that is there. Needs util, included before this file.
local function cut_unread(stream, facts)
  local read, lag = facts['entries-read'], facts['lag']
  if not read or (lag and lag < redis.call('XLEN', stream)) then return 0 end
  local of_stream = facts_of(redis.call('XINFO', 'STREAM', stream))
  local first = of_stream['first-entry']
  if first and not is_above(first[1], facts['last-delivered-id']) then return 0 end
  return math.max(0, of_stream['entries-added'] - read - of_stream['length'])
end

-- Count entries that were cut unread, each once: at the same position of the group only what came since. Return that.
local function count_cut(counters_key, stream, facts)
  local cut, position = cut_unread(stream, facts), facts['last-delivered-id']
  if cut == 0 then return 0 end
  local seen = redis.call('HGET', counters_key, 'cut_at ' .. stream) or ''
  local at, number = string.match(seen, '^(%S+) (%d+)$')
  local new = cut - (at == position and tonumber(number) or 0)
  if new <= 0 then return 0 end
  count_up(counters_key, 'unread_cut', new)
  redis.call('HSET', counters_key, 'cut_at ' .. stream, position .. ' ' .. cut)
  return new
end

-- Claim for `name` an entry that nobody has pending, although neither an acknowledgement nor a letter of ours ended it
-- (XACK, XGROUP DELCONSUMER by hand). Returns true when it is pending again; false when its body is gone, or when the
-- group is still to be given it. XCLAIM asks for the body itself, and does not copy it. Needs util, included
-- before this file.
local function claim_again(stream, group, name, id)
  return not is_above(id, group_facts(stream, group)['last-delivered-id'])
    and #redis.call('XCLAIM', stream, group, name, '0', id, 'FORCE', 'JUSTID') == 1
end
