-- trim: cut a stream below an id, if really nobody needs what lies there.
-- KEYS: 1 stream, 2 checkpoints, 3 archived, 4 groups (saved positions)
-- ARGV: 1 id (it and all above is kept), 2 most entries to cut in this call, 3 "1": cut only what is archived, else "", 4 group that must be there, or
--       "" for none: of a source, its gather group. While it is gone, nobody knows that what lies there now was gathered.
-- Returns: {"CUT", number of entries} or {"NEEDED", who needs entries below the id}
-- Why Lua: looking and cutting are one step, so that a group or a log consumer that appears, goes back, or is lost in between loses nothing.
-- Memory: works when full
--- @include is_above
local floor, is_there = ARGV[1], ARGV[4] == ''
for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local facts = {}
  for at = 1, #group, 2 do facts[group[at]] = group[at + 1] end
  is_there = is_there or facts['name'] == ARGV[4]
  local oldest = redis.call('XPENDING', KEYS[1], facts['name'], '-', '+', 1)[1]
  if is_above(floor, facts['last-delivered-id']) or (oldest and is_above(floor, oldest[1])) then
    return {'NEEDED', 'group ' .. facts['name']}
  end
end
if not is_there then return {'NEEDED', 'group ' .. ARGV[4] .. ', which is gone,'} end
local saved = redis.call('HGETALL', KEYS[4])
for at = 1, #saved, 2 do
  local id = string.match(saved[at + 1], '^%d+%-%d+$')
  if not id or is_above(floor, id) then return {'NEEDED', 'the saved position of group ' .. saved[at]} end
end
local noted = redis.call('HGETALL', KEYS[2])
for at = 1, #noted, 2 do
  local id = string.match(noted[at + 1], '^%d+ (%d+%-%d+) ')
  if not id or is_above(floor, id) then return {'NEEDED', 'checkpoint ' .. noted[at]} end
end
if ARGV[3] == '1' then
  local archived = redis.call('GET', KEYS[3])
  if not archived or is_above(floor, archived) then return {'NEEDED', 'archive'} end
end
return {'CUT', redis.call('XTRIM', KEYS[1], 'MINID', '~', floor, 'LIMIT', ARGV[2])}
