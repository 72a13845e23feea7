-- begin: the first step of a new leader. No turn of another leader counts any more (each WATCHes `epoch`), and the
--        group is given again what a leader had read and not taken: it is in nobody's list, and that leader alone knew
--        it.
-- KEYS: 1 stream, 2 leader, 3 epoch, 4 taken, 5 groups of the stream, 6 counters, 7 changed
-- ARGV: 1 group, 2 epoch, 3 "1": the group was made just now, and begins where it is, else ""
-- Returns: {"FENCED"} or {"OK", last id that the group was given, now, how many entries that were or "", the last
--          fence, the last id of `changed`}
-- Why Lua: a late call of a deposed leader would set the group back behind what its successor has read.
-- Memory: works when full
if not leads(KEYS[2], ARGV[2]) then return {'FENCED'} end
local stream, group = KEYS[1], ARGV[1]
at_full_memory(KEYS[5])
redis.call('SET', KEYS[3], ARGV[2]) -- also before a group is made: a late turn would read from it
local facts = group_facts(stream, group)
local position, given = facts['last-delivered-id'], facts['entries-read']
local changes = redis.call('EXISTS', KEYS[7]) == 1 and facts_of(redis.call('XINFO', 'STREAM', KEYS[7]))
local taken, read = string.match(redis.call('GET', KEYS[4]) or '', '^(%d+%-%d+) (%d*)$')
if taken and is_above(position, taken) and ARGV[3] == '' then
  redis.call('XGROUP', 'SETID', stream, group, taken, unpack(read ~= '' and {'ENTRIESREAD', read} or {}))
  -- What was cut unread there has been counted (count_cut).
  local at, counted = string.match(redis.call('HGET', KEYS[6], 'cut_at ' .. stream) or '', '^(%S+) (.*)$')
  if at == position then redis.call('HSET', KEYS[6], 'cut_at ' .. stream, taken .. ' ' .. counted) end
  position, given = taken, tonumber(read)
elseif position ~= taken then -- made just now, or set back by hand
  redis.call('SET', KEYS[4], position .. ' ' .. (given and string.format('%.0f', given) or ''))
end
if redis.call('HEXISTS', KEYS[5], group) == 0 then redis.call('HSET', KEYS[5], group, position) end
local noted = changes and changes['last-generated-id'] or '0-0'
return {'OK', position, given or '', redis.call('HGET', KEYS[6], 'fence') or '0', noted}
