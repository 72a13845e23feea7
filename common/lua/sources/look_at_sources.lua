-- look_at_sources: how far each of these sources is gathered; only numbers travel.
-- KEYS: the sources
-- ARGV: 1 group, 2 most entries that are counted of one source where Redis has not counted them (before 7.0): fewer
--       where they are large, and of the last ones none
-- Returns: for each source: {state, entries not gathered yet, 1 if there may be more of them, else 0}; states: ok,
--          gone, not_a_stream, no_group (it was not looked at yet), ahead (its group is beyond its last id)
-- Why Lua: one round trip for hundreds of sources, and XRANGE alone would send every body.
-- Memory: works when full, as nothing is written
--- @numbers count 2

local function look(source)
  local kind = redis.call('TYPE', source).ok
  if kind == 'none' then return 'gone', 0, 0 end
  if kind ~= 'stream' then return 'not_a_stream', 0, 0 end
  local group, refused = group_of(source, ARGV[1])
  if refused then error(refused) end
  if not group then return 'no_group', redis.call('XLEN', source), 0 end
  local room = has_room()
  if room and is_beyond(source, group) then return 'ahead', 0, 0 end
  if type(group['lag']) == 'number' and group['lag'] > 0 then return 'ok', group['lag'], 0 end
  if not room then return 'ok', 0, 1 end
  local start, most = '(' .. group['last-delivered-id'], tonumber(ARGV[2])
  local is_all, found = each_entry('XRANGE', source, start, '+', most, function() end)
  return 'ok', found, is_all and 0 or 1
end

local reply = {}
for _, source in ipairs(KEYS) do
  local n = #reply
  reply[n + 1], reply[n + 2], reply[n + 3] = look(source)
end
return reply
