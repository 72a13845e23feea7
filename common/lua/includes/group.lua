-- Turn a reply of XINFO, names and values by turns, into a table.
local function facts_of(reply)
  local facts = {}
  for at = 1, #reply, 2 do facts[reply[at]] = reply[at + 1] end
  return facts
end

-- Return the facts of a group as XINFO GROUPS names them; nil, and Redis' words if it has any, where it is not.
local function group_of(stream, group)
  local replies = redis.pcall('XINFO', 'GROUPS', stream)
  for _, flat in ipairs(replies) do
    local facts = facts_of(flat)
    if facts['name'] == group then return facts end
  end
  return nil, replies.err
end

-- Do the same, and raise NOGROUP when the group or the stream is missing: XPENDING says so, XINFO does not.
local function group_facts(stream, group)
  local facts = group_of(stream, group)
  if facts then return facts end
  redis.call('XPENDING', stream, group, '-', '+', 1)
  redis.call('XINFO', 'GROUPS', stream) -- it failed for another reason: raise that one
end
