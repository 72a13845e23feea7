-- The facts of a group as XINFO GROUPS names them. Raises NOGROUP when there is no such group, or no stream: XPENDING does, XINFO does not.
-- Needs facts_of.
local function group_facts(stream, group)
  for _, flat in ipairs(redis.pcall('XINFO', 'GROUPS', stream)) do
    local facts = facts_of(flat)
    if facts['name'] == group then return facts end
  end
  redis.call('XPENDING', stream, group, '-', '+', 1)
  redis.call('XINFO', 'GROUPS', stream) -- it failed for another reason
end
